"""What each rank of a trainer group runs: restore or initialise, then work off commands until it is ended."""

from __future__ import annotations

import logging
import os
import queue
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elastic_rl.data.tasks import Addition
from elastic_rl.errors import ElasticRLError, Fenced
from elastic_rl.etcd import events, fencing
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

FENCED_EXIT = 3
_SFT_SAVE_STEPS = 500


class TrainerWorker:
    """One rank. Rank 0 also owns the desk; the others follow its commands."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: parallel.ParallelDims, member: Membership,
                 desk: StepQueue | None) -> None:
        self.ctx, self.cfg, self.par, self.member, self.desk = ctx, ctx.config, par, member, desk
        self.policy = Policy(ModelArch.read(ctx.model_dir), self.cfg, par)
        self.adam = Adam(self.policy, self.cfg)
        self.stepper = TrainStep(self.policy, self.adam, self.cfg, par)
        self.checkpoints = Checkpoints(ctx, etcd, par, self.policy, self.adam, member.incarnation,
                                       desk.wake.set if desk is not None else lambda: None)
        self.task = Addition(self.cfg.data, self.cfg.seed)
        self.sft_eval = random.Random(f"sft-eval-{self.cfg.seed}").sample(
            self.task.eval, min(self.cfg.sft.eval_problems, len(self.task.eval)))
        self._sft_accuracy: float | None = None
        self.progress = Progress()
        self._job: TrainJob | None = None

    # -- life -----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Returns on STOP; raises what a step raised, which ends the rank and lets the group re-form."""
        self._take_up()
        idle_s = max(0.5, self.cfg.trainer.collective_timeout_s / 10)
        while True:
            if self.desk is not None:
                self.desk.beat()
            command = broadcast_command(self._next(idle_s) if self.par.rank == 0 else None, self.par)
            if command.kind is Kind.STOP:
                self.checkpoints.finish()
                return
            if command.kind is Kind.SFT:
                self._sft(command.count)
            elif command.kind is Kind.TRAIN:
                self._train(TrainBatch.from_bytes(command.payload))
            elif command.kind is Kind.PUBLISH:
                self.checkpoints.publish(self.progress, policy=False)  # only what is owed
            else:
                self.member.progress(self.progress.step, self.progress.phase)  # idle, and not hung
                self._report()

    def _take_up(self) -> None:
        self._report("starting")
        restored = self.checkpoints.restore()
        if restored is None:
            self.policy.load_folder(self.ctx.model_dir)
        else:
            self.progress = restored
            if restored.phase == "rl":
                # A new number for the old weights: engines that hold a later step roll forward to it, never back.
                self.checkpoints.publish(restored)
        if self.desk is not None:
            self.desk.end_sft(self.progress.sft)
        self._report(ready=True)

    def _next(self, idle_s: float) -> Command:
        """Rank 0: what to do next; IDLE when nothing was asked for within ``idle_s``."""
        assert self.desk is not None
        if self.checkpoints.owed():
            return Command(Kind.PUBLISH)
        if self.desk.sft_requested.is_set() and self.progress.phase == "sft":
            return Command(Kind.SFT, self.cfg.sft.steps_to_next_eval(self._sft_accuracy))
        try:
            self._job = self.desk.jobs.get_nowait()
            return Command(Kind.TRAIN, self._job.step, self._job.body)
        except queue.Empty:
            self.desk.wake.wait(idle_s)
            self.desk.wake.clear()
        return Command(Kind.IDLE)

    def _report(self, doing: str = "", *, ready: bool = False) -> None:
        p = self.progress
        self.member.progress(p.step, doing or p.phase, policy_version=self.checkpoints.policy_version,
                             state_version=self.checkpoints.state_version)
        if self.desk is not None:
            self.desk.set_status(incarnation=self.member.incarnation, step=p.step, phase=p.phase, cursor=p.cursor,
                                 policy_version=self.checkpoints.policy_version, pid=os.getpid(),
                                 state_version=self.checkpoints.state_version, restarts=restarts(),
                                 **({"ready": True} if ready else {}))

    # -- commands -------------------------------------------------------------------------------------------------
    def _sft(self, count: int) -> None:
        """Up to ``count`` supervised steps; ends the phase when the target or the last step is reached."""
        cfg, step, loss = self.cfg.sft, self.progress.step, float("nan")
        until = min(step + count, cfg.max_steps)
        while step < until:
            step += 1
            # From the seed and the step alone, so that a resumed SFT phase sees the same batches, on every rank.
            picks = random.Random(f"sft-{self.cfg.seed}-{step}").choices(self.task.train, k=cfg.batch_size)
            loss = self.stepper.sft(picks, pad=self.task.pad_id, lr=cfg.lr)
        self._sft_accuracy = eval_accuracy = self.stepper.exact_match(self.sft_eval, pad=self.task.pad_id)
        self.progress = self.progress.replace(step=step)
        if self.desk is not None:
            self.desk.record_sft({"step": step, "loss": loss, "eval_accuracy": eval_accuracy, "at": time.time()})
        if eval_accuracy >= cfg.target_eval_accuracy or step >= cfg.max_steps:
            self._end_sft({"steps": step, "eval_accuracy": eval_accuracy, "loss": loss})
        elif step // _SFT_SAVE_STEPS > (step - count) // _SFT_SAVE_STEPS:
            self.checkpoints.publish(self.progress, policy=False, state=True)
        self._report()

    def _end_sft(self, result: dict[str, Any]) -> None:
        self.adam.reset()  # RL starts with its own learning rate and no momentum of the supervised gradient
        self.progress = Progress(phase="rl", sft=result)
        self.checkpoints.publish(self.progress, state=True)
        if self.desk is not None:
            self.desk.sft_requested.clear()
            self.desk.end_sft(result)

    def _train(self, batch: TrainBatch) -> None:
        self._report("train")
        metrics: dict[str, Any] = dict(self.stepper.train(batch, self.progress.step + 1))
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
    """How often torch elastic re-formed this group."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def serve(context_file: str) -> None:
    """Runs this rank. Exits with FENCED_EXIT when its epoch is over."""
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
        log.error("this trainer's epoch %d is over, it ends: %s", ctx.epoch, e)
        sys.exit(FENCED_EXIT)


def _serve(ctx: RunContext, etcd: EtcdClient, rank: int) -> None:
    if (now := fencing.current_epoch(etcd, ctx.keys)) > ctx.epoch:
        raise Fenced(f"the run's epoch is {now}")
    desk = StepQueue(ctx.config.trainer.step_timeout_s) if rank == 0 else None
    server = CommandServer(desk, ctx.host).start() if desk is not None else None
    member = Membership(etcd, ctx.keys, "trainer", f"rank-{rank}", ttl_s=ctx.config.coordinator.lease_ttl_s,
                        url=server.url if server is not None else "", epoch=ctx.epoch,
                        info={"restarts": restarts()}).start()
    try:
        par = parallel.init(ctx.config)
        worker = TrainerWorker(ctx, etcd, par, member, desk)
        if rank == 0:
            kind = "trainer.restarted" if restarts() else "trainer.started"
            events.emit(etcd, ctx.keys, kind, "trainer",
                        f"group of {par.world} ranks, TP={par.tp} PP={par.pp} DP={par.dp}",
                        severity=Severity.WARNING if restarts() else Severity.INFO, restarts=restarts(),
                        incarnation=member.incarnation)
        freeze_heap()
        worker.run()
    except (ElasticRLError, RuntimeError):
        # No sign-off: the entry runs out with its lease, so that the end of this rank counts as a death.
        log.exception("rank %d ends", rank)
        raise
    member.close()
    if server is not None:
        server.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    serve(sys.argv[1])
