"""The program of each rank of a trainer group: restores or initialises its state, then executes commands."""

from __future__ import annotations

import logging
import os
import queue
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from elastic_rl.data.tasks import Addition
from elastic_rl.errors import ElasticRLError, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.runtime import die_with_parent, freeze_heap
from elastic_rl.telemetry import logs, traces
from elastic_rl.trainer import parallel
from elastic_rl.trainer.batch import TrainBatch
from elastic_rl.trainer.broadcast import Command, Kind, broadcast_command
from elastic_rl.trainer.model import ModelArch, Policy
from elastic_rl.trainer.optimizer import Adam
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.server import CommandServer, StepQueue, TrainJob
from elastic_rl.trainer.state import Checkpoints
from elastic_rl.trainer.step import TrainStep

log = logging.getLogger(__name__)

_SFT_SAVE_STEPS = 500


class TrainerWorker:
    """One rank. Rank 0 takes requests from the step queue; the others follow its commands."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: parallel.ParallelDims, member: Membership,
                 step_queue: StepQueue | None) -> None:
        self.ctx, self.cfg, self.par, self.member, self.step_queue = ctx, ctx.config, par, member, step_queue
        self.policy = Policy(ModelArch.read(ctx.model_dir), self.cfg, par)
        self.adam = Adam(self.policy, self.cfg)
        self.train_step = TrainStep(self.policy, self.adam, self.cfg, par)
        self.checkpoints = Checkpoints(ctx, etcd, par, self.policy, self.adam, member.incarnation,
                                       step_queue.wake.set if step_queue is not None else lambda: None)
        self.task = Addition(self.cfg.data, self.cfg.seed)
        self.sft_eval = random.Random(f"sft-eval-{self.cfg.seed}").sample(
            self.task.eval, min(self.cfg.sft.eval_problems, len(self.task.eval)))
        self._sft_accuracy: float | None = None
        self.progress = Progress()
        self._job: TrainJob | None = None

    # -- main loop ------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Returns on STOP; raises the error of a step, which ends the rank and makes the group re-form."""
        self._restore()
        idle_s = max(0.5, self.cfg.trainer.collective_timeout_s / 10)
        while True:
            if self.step_queue is not None:
                self.step_queue.heartbeat()
            command = broadcast_command(self._next(idle_s) if self.par.rank == 0 else None, self.par)
            if command.kind is Kind.STOP:
                self.checkpoints.finish()
                return
            if command.kind is Kind.SFT:
                self._sft(command.count)
            elif command.kind is Kind.TRAIN:
                self._train(TrainBatch.from_bytes(command.payload))
            elif command.kind is Kind.PUBLISH:
                self.checkpoints.publish(self.progress, policy=False)  # only the streams that were dropped
            else:
                self.member.progress(self.progress.step, self.progress.phase)  # idle, not hung
                self._report()

    def _restore(self) -> None:
        self._report("starting")
        restored = self.checkpoints.restore()
        if restored is None:
            self.policy.load_folder(self.ctx.model_dir)
        else:
            self.progress = restored
            if restored.phase == "rl":
                # A new number for the old weights: engines that hold a later step roll forward to it, never back.
                self.checkpoints.publish(restored)
        if self.step_queue is not None:
            self.step_queue.end_sft(self.progress.sft)
        self._report(ready=True)

    def _next(self, idle_s: float) -> Command:
        """Rank 0: the next command; IDLE when nothing was requested within ``idle_s``."""
        assert self.step_queue is not None
        if self.checkpoints.must_republish():
            return Command(Kind.PUBLISH)
        if self.step_queue.sft_requested.is_set() and self.progress.phase == "sft":
            return Command(Kind.SFT, self.cfg.sft.steps_to_next_eval(self._sft_accuracy))
        try:
            self._job = self.step_queue.jobs.get_nowait()
            return Command(Kind.TRAIN, self._job.step, self._job.body)
        except queue.Empty:
            self.step_queue.wake.wait(idle_s)
            self.step_queue.wake.clear()
        return Command(Kind.IDLE)

    def _report(self, phase: str = "", *, ready: bool = False) -> None:
        p = self.progress
        self.member.progress(p.step, phase or p.phase, policy_version=self.checkpoints.policy_version,
                             state_version=self.checkpoints.state_version)
        if self.step_queue is not None:
            self.step_queue.set_status(incarnation=self.member.incarnation, step=p.step, phase=p.phase,
                                       cursor=p.cursor, policy_version=self.checkpoints.policy_version,
                                       state_version=self.checkpoints.state_version, pid=os.getpid(),
                                       restarts=restarts(), **({"ready": True} if ready else {}))

    # -- commands -------------------------------------------------------------------------------------------------
    def _sft(self, count: int) -> None:
        """Takes up to ``count`` supervised steps; ends the phase at the target accuracy or the last step."""
        cfg, step, loss = self.cfg.sft, self.progress.step, float("nan")
        until = min(step + count, cfg.max_steps)
        while step < until:
            step += 1
            # Chosen by the seed and the step only, so that a resumed SFT phase has the same batches, on every rank.
            picks = random.Random(f"sft-{self.cfg.seed}-{step}").choices(self.task.train, k=cfg.batch_size)
            loss = self.train_step.sft(picks, pad=self.task.pad_id, lr=cfg.lr)
        self._sft_accuracy = eval_accuracy = self.train_step.exact_match(self.sft_eval, pad=self.task.pad_id)
        self.progress = self.progress.replace(step=step)
        if self.step_queue is not None:
            self.step_queue.record_sft({"step": step, "loss": loss, "eval_accuracy": eval_accuracy, "at": time.time()})
        if eval_accuracy >= cfg.target_eval_accuracy or step >= cfg.max_steps:
            self._end_sft({"steps": step, "eval_accuracy": eval_accuracy, "loss": loss})
        elif step // _SFT_SAVE_STEPS > (step - count) // _SFT_SAVE_STEPS:
            self.checkpoints.publish(self.progress, policy=False, state=True)
        self._report()

    def _end_sft(self, result: dict[str, Any]) -> None:
        self.adam.reset()  # RL starts with its own learning rate, without the momentum of the supervised gradient
        self.progress = Progress(phase="rl", sft=result)
        self.checkpoints.publish(self.progress, state=True)
        if self.step_queue is not None:
            self.step_queue.sft_requested.clear()
            self.step_queue.end_sft(result)

    def _train(self, batch: TrainBatch) -> None:
        self._report("train")
        metrics: dict[str, Any] = dict(self.train_step.train(batch, self.progress.step + 1))
        cursor = self._job.cursor if self._job is not None else {}
        self.progress = self.progress.replace(step=self.progress.step + 1, cursor=cursor)
        state = self.progress.step % self.cfg.train.state_every_steps == 0
        published = self.checkpoints.publish(self.progress, state=state)
        metrics |= {"publish_stall_s": published.stall_s, "gather_s": published.gather_s,
                    "copy_s": published.copy_s, "publish_wait_s": published.waited_s,
                    "policy_version": published.policy, "state_version": published.state}
        self._report()
        if self._job is not None:
            self._job.done.set_result(metrics)
            self._job = None


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
    step_queue = StepQueue(ctx.config.trainer.step_timeout_s) if rank == 0 else None
    server = CommandServer(step_queue, ctx.host).start() if step_queue is not None else None
    member = Membership(etcd, ctx.keys, "trainer", f"rank-{rank}", ttl_s=ctx.config.coordinator.lease_ttl_s,
                        url=server.url if server is not None else "", epoch=ctx.epoch,
                        info={"restarts": restarts()}).start()
    try:
        par = parallel.init(ctx.config)
        worker = TrainerWorker(ctx, etcd, par, member, step_queue)
        if rank == 0:
            kind = "trainer.restarted" if restarts() else "trainer.started"
            fencing.emit(etcd, ctx.keys, ctx.epoch, kind, "trainer",
                         f"group of {par.world} ranks, TP={par.tp} PP={par.pp} DP={par.dp}",
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
    if server is not None:
        server.close()
    dist.destroy_process_group()

