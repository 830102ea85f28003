"""The program of each rank of a trainer group: restores or initialises its state, then executes commands."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save

from elastic_rl.algorithms.registry import algorithm_of, required_tensors, uses_reference
from elastic_rl.data.batch import Batch
from elastic_rl.dcs.security import TOKEN_FILE, Security
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    ElasticRLError,
    EtcdUnavailable,
    Fenced,
    PluginFailed,
    TrainerFailed,
)
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime import die_with_parent, freeze_heap
from elastic_rl.telemetry import logs, traces
from elastic_rl.trainer.broadcast import Message, Order, broadcast_message, gather_text, share_of_replica
from elastic_rl.trainer.checkpoint.checkpoints import Checkpoints
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.policy import ModelArch, Policy
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.reference import Reference
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.commands import Command, CommandKind, WriterGate, after_begin_rl, after_update
from elastic_rl.trainer.service.server import TrainerService
from elastic_rl.trainer.step import TrainStep
from elastic_rl.trainer.throughput import Throughput

log = logging.getLogger(__name__)


@dataclass
class _Wanted:
    """A publish that is to be begun as soon as etcd gives numbers. ``command``: is done when it has begun or, with
    ``join``, when it has ended; ``result``: of that command, so far."""

    policy: bool = False
    state: bool = False
    join: bool = False
    command: Command | None = None
    result: dict[str, Any] = field(default_factory=dict)


class TrainerWorker:
    """One rank. Rank 0 takes commands from its board and checks them; the others follow."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: parallel.ParallelDims, member: Membership,
                 board: Board, share_urls: list[str]) -> None:
        """``share_urls``: of the ranks that take the shares of a batch, by data-parallel rank."""
        self.ctx, self.cfg, self.par, self.member, self.board = ctx, ctx.config, par, member, board
        self._etcd, self._share_urls = etcd, share_urls
        self.policy = Policy(ModelArch.read(ctx.model_dir), self.cfg, par)
        self.adam = Adam(self.policy, self.cfg)
        self.train_step = TrainStep(self.policy, self.adam, self.cfg, par)
        dtype = next(self.policy.module.parameters()).dtype
        self.throughput = Throughput(self.policy.arch, self.cfg.device, par, dtype)
        algorithm = algorithm_of(self.cfg)
        self._adds_reference = "ref_logprobs" in required_tensors(algorithm, self.cfg.algorithm)
        self.reference = (Reference(self.policy, self.cfg.algorithm.reference_every_steps, self.cfg.dcs.bucket_bytes)
                          if uses_reference(algorithm, self.cfg.algorithm) else None)
        self.checkpoints = Checkpoints(ctx, etcd, par, self.policy, self.adam, member.incarnation, board.wake.set,
                                       self._on_restore, self.reference)
        self.progress = Progress()
        self._wanted: _Wanted | None = None
        self._ready = False
        self._pause = threading.Event()  # never set
        self.gate = WriterGate(ctx.epoch, member.incarnation)

    # -- main loop ------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Returns on STOP; raises the error of a step, which ends the rank and makes the group re-form."""
        self._restore()
        idle_s = max(0.5, self.cfg.trainer.collective_timeout_s / 10)
        while True:
            message = broadcast_message(self._next(idle_s) if self.par.rank == 0 else None, self.par)
            if message.order is Order.STOP:
                self.checkpoints.finish()
                return
            if message.order is Order.EXECUTE:
                self._execute(Command.decode(message.payload))
            elif message.order is Order.PUBLISH:
                self._publish(message.payload)
            else:
                self._report()  # idle, not hung

    def _restore(self) -> None:
        self._report("starting")
        restored = self.checkpoints.restore()
        if restored is None:
            self.checkpoints.load_initial(self.ctx.model_dir)
            self.adam.reset()
            self.progress = Progress()
        else:
            self.progress = restored
            if restored.phase == "rl":
                # A new number for the old weights: engines that hold a later step roll forward to it, never back.
                self._wanted = _Wanted(policy=True)
                return  # ready once that number is known
        self._report(ready=True)

    def _on_restore(self, phase: str, detail: str) -> None:
        """A sign of life during a restore, which may wait for etcd or a node for as long as they are away."""
        self.member.progress(self.progress.step, phase, restoring=detail)

    def _next(self, idle_s: float) -> Message:
        """Rank 0: the next message; IDLE when nothing was requested within ``idle_s``."""
        self._read_claims()
        if self._wanted is not None or self.checkpoints.must_republish():
            return self._begin_publish(self._wanted or _Wanted(), idle_s)
        command = self.board.next()
        if command is None:
            self.board.wake.wait(idle_s)
            self.board.wake.clear()
            return Message(Order.IDLE)
        try:
            self._learn_term()
            earlier = self.gate.admit(command, self.progress)
        except (Fenced, Conflict, TrainerFailed, PluginFailed) as e:
            log.warning("refused %s of step %d: %s", command.kind, command.step, e)
            self.board.refused(command, e)
            return Message(Order.IDLE)
        if earlier is not None:
            self.board.done(command, earlier)
            return Message(Order.IDLE)
        return Message(Order.EXECUTE, command.encode())

    def _begin_publish(self, wanted: _Wanted, idle_s: float) -> Message:
        """Takes the numbers of a publish while no other rank waits for this one: etcd may be away for an hour, and a
        collective would not wait so long."""
        try:
            numbers = self.checkpoints.begin(self.progress, policy=wanted.policy, state=wanted.state)
        except Fenced:
            raise
        except ElasticRLError as e:  # etcd is away, the catalog is suspended, or a lease was lost meanwhile
            log.warning("waiting to publish step %d: %s", self.progress.step, e)
            self.board.waits_for = f"the trainer to publish step {self.progress.step}: {e}"
            self._report("waiting to publish")
            self._pause.wait(min(1.0, idle_s))
            return Message(Order.IDLE)
        return Message(Order.PUBLISH, json.dumps({"numbers": numbers, "join": wanted.join}).encode())

    def _publish(self, payload: bytes) -> None:
        order = json.loads(payload)
        self._report("waiting for the publish")  # of an earlier version, and then of this one
        self.board.waits_for = "the trainer to publish: an earlier version is not committed yet"
        published = self.checkpoints.publish(order["numbers"], self.progress.step,
                                             has_reference=self.progress.reference is not None)
        self.board.waits_for = "the trainer to commit its state" if order["join"] else ""
        committed = self.checkpoints.join() if order["join"] else None
        self.board.waits_for = ""
        wanted, self._wanted = self._wanted, None
        self._report(ready=True)
        if wanted is not None and wanted.command is not None:
            self._finish(wanted.command, wanted.result | {
                "publish_stall_s": published.stall_s, "gather_s": published.gather_s, "copy_s": published.copy_s,
                "publish_wait_s": published.waited_s, "policy_version": published.policy,
                "state_version": published.state, "committed": committed})

    def _read_claims(self) -> None:
        """An actor that has taken over fences its predecessor off here, also while etcd is unavailable."""
        with contextlib.suppress(queue.Empty):
            while True:
                epoch, term = self.board.claims.get_nowait()
                with contextlib.suppress(Fenced):
                    self.gate.claim(epoch, term)

    def _learn_term(self) -> None:
        """Raises the gate's term to the one in etcd: the newest actor may not have reached this group yet."""
        with contextlib.suppress(EtcdUnavailable):  # then no newer actor can have begun its term either
            self.gate.term = max(self.gate.term, fencing.current_term(self._etcd, self.ctx.keys))

    def _report(self, phase: str = "", *, ready: bool = False) -> None:
        p = self.progress
        self._ready = self._ready or ready
        self.member.progress(p.step, phase or "waiting for a command", ready=self._ready,
                             policy_version=self.checkpoints.policy_version,
                             state_version=self.checkpoints.state_version)
        if self.par.rank == 0 and self._wanted is None:  # else step and version would not belong together
            self.board.set_status(
                group=self.member.incarnation, epoch=self.ctx.epoch, step=p.step, phase=p.phase, cursor=p.cursor,
                consumed=p.consumed.to_json(), policy_version=self.checkpoints.policy_version,
                state_version=self.checkpoints.state_version, share_urls=self._share_urls, restarts=restarts(),
                **({"ready": True} if ready else {}))

    # -- commands -------------------------------------------------------------------------------------------------
    def _execute(self, command: Command) -> None:
        """On every rank. What a rank raises here ends it, and the group re-forms from its last state."""
        self._report(command.kind)
        share = self._share(command) if command.batch else None
        if command.batch and share is None:
            self._refuse(command, Conflict(f"not every rank has its share of batch {command.batch}",
                                           hint="send the shares again, then the command"))
            return
        if (fault := self._reference_fault(command)) is not None:
            self._refuse(command, fault)
        elif command.kind is CommandKind.UPDATE and share is not None:
            self._update(command, share)
        elif command.kind is CommandKind.FORWARD_LOGPROBS and share is not None:
            self._forward(command, share)
        elif command.kind is CommandKind.SAVE:
            self._save(command)
        else:
            self._refuse(command, ConfigError(f"{command.kind} needs a batch"))
        if command.batch:
            self.board.discard_share(command.batch)

    def _finish(self, command: Command, result: dict[str, Any]) -> None:
        self._report()
        # JSON has no other numbers.
        result = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in result.items()}
        if self.par.rank == 0:
            self.gate.executed(command, result)
            self.board.done(command, result)

    def _refuse(self, command: Command, error: ElasticRLError) -> None:
        self._report()
        if self.par.rank == 0:
            self.board.refused(command, error)

    def _share(self, command: Command) -> Batch | None:
        raw = share_of_replica(self.board.share(command.batch) if self.par.is_share_leader else None, self.par)
        return Batch.from_bytes(raw) if raw is not None else None

    def _forward(self, command: Command, share: Batch) -> None:
        outputs = ({"logprobs": self._reference_logprobs(share)} if command.weights == "reference"
                   else self.train_step.forward_logprobs(share, self.progress.phase))
        if self.par.is_share_leader:
            self.board.put_output(command.id, save(outputs))
        parallel.barrier(self.par)  # once rank 0 says that it is done, every output is there
        self._finish(command, {})

    def _reference_logprobs(self, share: Batch) -> torch.Tensor:
        """[n, T] fp32, of the reference policy of the next step."""
        assert self.reference is not None  # by ``_reference_fault``
        with self.reference.in_place():
            return self.train_step.forward_logprobs(share, greedy=False)["logprobs"]

    def _reference_fault(self, command: Command) -> ConfigError | None:
        """Why a command cannot be executed that needs the reference policy; the same on every rank."""
        if self.reference is not None:
            uses = command.kind is CommandKind.UPDATE and command.phase == "rl"
            return self.reference.fault(self.progress) if uses or command.weights == "reference" else None
        if command.weights != "reference":
            return None
        return ConfigError("the settings of this trainer ask for no reference policy",
                           hint="set algorithm.kl_coef or algorithm.report_kl in a new job")

    def _update(self, command: Command, share: Batch) -> None:
        updates = self.adam.updates
        if command.phase == "rl" and self._adds_reference:
            share = Batch({**share.tensors, "ref_logprobs": self._reference_logprobs(share)})
        try:
            metrics: dict[str, Any] = dict(self.train_step.train(share, command.phase, command.step))
        except PluginFailed as e:  # on every rank
            log.error("step %d was not made: %s", command.step, e)
            if self.adam.updates != updates:  # a step is made whole or not at all
                e = self._go_back_from(command, e)
            self._refuse(command, e)
            return
        metrics |= self.throughput.of_step(share, self.adam.updates - updates, metrics["train_s"])
        self.progress = after_update(self.progress, command)
        if self.reference is not None:
            if command.phase == "rl":
                metrics["reference_step"] = self.progress.reference
            self.progress = self.reference.renew(self.progress)
        sft = command.phase == "sft"
        every = self.cfg.sft.state_every_steps if sft else self.cfg.train.state_every_steps
        state = command.step % every == 0
        if sft and not state:
            self._finish(command, metrics)
        else:
            self._wanted = _Wanted(policy=not sft, state=state, command=command, result=metrics)

    def _go_back_from(self, command: Command, error: PluginFailed) -> PluginFailed:
        """After updates of a step that failed: the group goes back to its last committed state, and makes no step until
        a person has corrected what failed. Returns what the actor is told, and tells the operator."""
        self.board.waits_for = "the trainer to commit what is being published, and to go back to its last state"
        self._report("waiting for the publish")
        self.checkpoints.join()  # else its collectives would meet those of the restore
        self._restore()
        self.board.waits_for = ""
        held = PluginFailed(f"{error.message}; step {command.step} had made an update by then, so the trainer is back "
                            f"at step {self.progress.step} and makes no step",
                            hint=" ".join(filter(None, (error.hint, "correct it, and `elastic-rl restart trainer`"))))
        if self.par.rank == 0:
            self.gate.hold(held)
            with contextlib.suppress(EtcdUnavailable):  # the status of the job says it too
                fencing.emit(self._etcd, self.ctx.keys, self.ctx.epoch, "trainer.rewound", "trainer", str(held),
                             severity=Severity.ERROR, step=command.step, to_step=self.progress.step)
        return held

    def _save(self, command: Command) -> None:
        if command.begin_rl and self.progress.phase == "sft":
            self.adam.reset()  # RL starts with its own learning rate, without the momentum of the supervised gradient
            self.progress = after_begin_rl(self.progress, command)
            if self.reference is not None:
                self.progress = self.reference.renew(self.progress)
        else:
            self.progress = self.progress.replace(cursor=dict(command.cursor))
        self._wanted = _Wanted(policy=command.begin_rl or command.publish, state=True, join=True, command=command)


def restarts() -> int:
    """How often torch elastic has restarted this group."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def serve(context_file: str) -> None:
    """Runs this rank. Exits with ``parallel.FENCED_EXIT`` when its epoch is over."""
    die_with_parent()
    ctx = RunContext.load(Path(context_file))
    rank = int(os.environ["RANK"])
    logs.setup(f"trainer-rank-{rank}", ctx.config.telemetry.log_level)
    traces.setup(ctx.config.telemetry.otlp_endpoint, "elastic-rl.trainer")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        with ctx.connect() as etcd:
            _serve(ctx, etcd, rank)
    except Fenced as e:
        log.error("epoch %d of this trainer is over: %s", ctx.epoch, e)
        sys.exit(parallel.FENCED_EXIT)


def _serve(ctx: RunContext, etcd: EtcdClient, rank: int) -> None:
    if (now := fencing.current_epoch(etcd, ctx.keys)) > ctx.epoch:
        raise Fenced(f"the run's epoch is {now}")
    needs = [name for name in required_tensors(algorithm_of(ctx.config), ctx.config.algorithm)
             if name != "ref_logprobs"]  # the ranks add these
    vocab = ModelArch.read(ctx.model_dir).vocab

    def check_share(raw: bytes) -> None:
        batch = Batch.from_bytes(raw)
        batch.require_tokens_below(vocab)
        if "old_logprobs" in batch or "advantages" in batch:  # for RL; demonstrations have neither
            for name in needs:
                batch[name]

    board = Board(ctx.config.trainer.max_share_bytes)
    # The ranks of a stage and of one replica are consecutive, so the first ranks are those of the first stage.
    trainer = ctx.config.trainer
    stage, replica = trainer.ranks // trainer.pipeline_parallel, trainer.tensor_parallel * trainer.context_parallel
    service = TrainerService(
        board, ctx.host, Security.from_config(ctx.config.dcs, ctx.config.cluster_dir / TOKEN_FILE),
        check_share).start() if rank < stage and rank % replica == 0 else None
    member = Membership(etcd, ctx.keys, "trainer", f"rank-{rank}", ttl_s=ctx.config.coordinator.lease_ttl_s,
                        url=service.url if service is not None else "", epoch=ctx.epoch,
                        info={"restarts": restarts()}).start()
    try:
        par = parallel.init(ctx.config)
        urls = [url for url in gather_text(service.url if service is not None else "", par) if url]
        worker = TrainerWorker(ctx, etcd, par, member, board, urls)
        if rank == 0:
            kind = "trainer.restarted" if restarts() else "trainer.started"
            fencing.emit(etcd, ctx.keys, ctx.epoch, kind, "trainer",
                         f"group of {par.world} ranks, TP={par.tp} CP={par.cp} PP={par.pp} DP={par.dp}",
                         severity=Severity.WARNING if restarts() else Severity.INFO, restarts=restarts(),
                         incarnation=member.incarnation)
        freeze_heap()
        worker.run()
    except Fenced:
        member.close()  # the run was restarted on purpose: no death of this rank
        raise
    except (ElasticRLError, RuntimeError):
        # Not deregistered: the entry expires with its lease, so that the end of this rank counts as a death.
        log.exception("rank %d ends", rank)
        raise
    member.close()
    if service is not None:
        service.close()
    dist.destroy_process_group()
