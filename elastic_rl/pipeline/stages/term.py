"""One term of the actor: the records that it writes, and what it shows of where the run is and what it waits for."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic_rl.config import Stream
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.sources import CheckedSource, make_source
from elastic_rl.dcs import model_files
from elastic_rl.dcs.publish.growing_stream import GrowingStream
from elastic_rl.errors import ElasticRLError, EtcdUnavailable
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.events import build
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import WORKING_PHASES, GroupLease, Severity, StepMetrics, stopped_message
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import checkpoint_capacity
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.paths import JobPaths
from elastic_rl.models.arch import ModelArch
from elastic_rl.pipeline.records.history import History
from elastic_rl.pipeline.records.reporting import SampleWriter
from elastic_rl.pipeline.records.run_events import PRODUCER, RunEvents, emitter
from elastic_rl.pipeline.records.run_log import JobStatusWriter, RunLog
from elastic_rl.pipeline.records.sample_ring import SampleRing
from elastic_rl.pipeline.records.spool import Spool
from elastic_rl.pipeline.records.tail_keys import open_history
from elastic_rl.pipeline.sampling.source_reads import SourceReads
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.words import counted
from elastic_rl.telemetry.trackers import Trackers

log = logging.getLogger(__name__)

_FENCE_CHECK_S = 5.0
_LAST_STEP = "last_step"
"""Key in the cursor of what is known of a step before it is trained."""
_PHASES = {"generate": "waiting for samples", "evaluate": "waiting for samples", "advantage": "waiting for advantages",
           "teacher": "waiting for the teacher",
           "reference": "waiting for the trainer's step", "actor_fwd": "waiting for the trainer's step",
           "value": "waiting for the critic",
           "train": "waiting for the trainer's step", "sft": "waiting for the trainer's step",
           "publish": "waiting for the trainer's step", "save": "waiting for the trainer's step",
           "devices": "waiting for the devices"}
"""Phases as a member: in these stages others work, and report their own progress."""


class ActorTerm:
    """One term of the actor; it is shared by the stages of a mode, in the loop's thread."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, member: Membership, number: int, writer: FencedWriter,
                 status: JobStatusWriter, history: History, stopping: threading.Event,
                 stop_asked: threading.Event) -> None:
        """``writer``: holds the term's fencing token. ``history``: whose tail ``status`` writes. ``stopping``: ends
        every wait with Fenced. ``stop_asked``: the run is to stop, see ``Waits``."""
        self.ctx, self.cfg, self.etcd, self.keys, self.member = ctx, ctx.config, etcd, ctx.keys, member
        self.number, self.writer, self.status = number, writer, status
        self.phase, self.step = "starting", 0
        """Phase and step of the run, as they are shown."""
        self.pieces: Callable[[], int] = int
        """Tells how many groups and parts of the next step are done."""
        self._fence_read = 0.0
        """Monotonic time at which a wait last checked that this is still the actor."""
        self.waits = Waits(self._show_wait, stopping, stop_asked)
        self.emit = emitter(writer, self.waits)
        self.events = RunEvents(etcd, ctx.keys, self.emit)
        paths = JobPaths.of(self.cfg)
        self.run_log = RunLog(history, Trackers.from_names(
            self.cfg.telemetry.trackers, paths.folder, self.cfg.job, self._tracker_failed,
            wandb_mode=self.cfg.telemetry.wandb_mode))
        self.samples = SampleWriter(SampleRing(etcd, ctx.keys), ctx.model_dir)
        self.security = dcs_security(self.cfg)
        stream, self._model_stream = (GrowingStream(
            etcd, ctx.keys, name, self.cfg.dcs, epoch=ctx.epoch, token=writer, owner=f"actor-{number}",
            security=self.security) for name in (Stream.RUN_LOG, Stream.MODEL))
        sizes = checkpoint_capacity.version_sizes(self.cfg, ModelArch.read(ctx.model_dir))
        self._spool = Spool(etcd, ctx.keys, history, stream,
                            most_bytes=checkpoint_capacity.records_bytes(self.cfg, sizes),
                            path=paths.steps, lock=paths.run_log_lock, further={
                                "the files of the model cannot be published, which engines on other hosts wait for":
                                lambda: model_files.publish(self._model_stream, Path(ctx.model_dir)) and False})
        self._spool.start()

    @classmethod
    def begin(cls, ctx: RunContext, etcd: EtcdClient, member: Membership, stopping: threading.Event,
              stop_asked: threading.Event) -> ActorTerm:
        """Begins the next term, which fences off all earlier ones. Waits while etcd is away. Raises Fenced when the
        epoch is over."""
        waits = Waits(lambda stage, kind, what: member.progress(0, f"waiting for {kind}" if kind else stage), stopping)
        waits.stage("starting")
        number = waits.retry("etcd", lambda: fencing.begin_term(etcd, ctx.keys, ctx.epoch, member.incarnation))
        writer = FencedWriter.of_term(etcd, ctx.keys, ctx.epoch, number)
        history = waits.retry("etcd", lambda: open_history(etcd, ctx.keys, writer, ctx.job))
        status = waits.retry("etcd", lambda: JobStatusWriter(
            etcd, ctx.keys, writer, steps=ctx.config.total_steps, seed=ctx.config.seed, history=history))
        term = cls(ctx, etcd, member, number, writer, status, history, stopping, stop_asked)
        try:
            term.waits.stage("starting")
        except BaseException:
            term.close()  # else its thread would keep the file of the records from the next term
            raise
        return term

    def close(self) -> None:
        self._spool.close()
        self._model_stream.close()
        self.run_log.close()

    def open_source(self) -> tuple[CheckedSource, SourceReads]:
        """The data source, as soon as it can be made, and how this thread reads it. What it reads may be away now, as
        it may be later; a job that is wrong is refused before it begins (``job.check``)."""
        reads = SourceReads(self.cfg.data.source, self.waits)
        return self.waits.retry("source", lambda: reads.read("be made", lambda: make_source(self.cfg))), reads

    # -- what is shown ------------------------------------------------------------------------------------------------
    def _show_wait(self, stage: str, kind: str, what: str) -> None:
        self.member.progress(self.step, f"waiting for {kind}" if kind else _PHASES.get(stage, stage))
        self.status.pieces(self.pieces())
        self.status.activity(stage, kind, what)
        if kind and kind != "etcd" and time.monotonic() - self._fence_read >= _FENCE_CHECK_S:
            self._fence_read = time.monotonic()
            with contextlib.suppress(EtcdUnavailable):  # a wait whose text stays the same writes nothing
                self.writer.require()

    def alive(self, phase: str = "writing") -> None:
        """Says that long work goes on. Raises Fenced."""
        self.waits.pause(0.0)
        self.waits.works()
        self.status.pieces(self.pieces())
        self.member.progress(self.step, phase)

    def _tracker_failed(self, name: str, reason: str) -> None:
        try:
            self.writer.emit(event_kinds.TRACKER_FAILED, name, f"{name} gets no more metrics of the training: {reason}",
                             severity=Severity.WARNING)
        except ElasticRLError:  # this is the tracker's thread: whatever it is, the loop meets it too
            log.warning("tracker %s failed: %s", name, reason)

    # -- what is written ----------------------------------------------------------------------------------------------
    def write(self, **changes: Any) -> None:
        """Writes the status, as soon as etcd takes it: see ``JobStatusWriter.write``."""
        self.waits.retry("etcd", lambda: self.status.write(self.phase, **changes))

    def write_evaluation(self, step: int, accuracy: float, sets: Mapping[str, float], *, error: float = 0.0) -> None:
        """See ``JobStatusWriter.evaluated``."""
        self.waits.retry("etcd", lambda: self.status.evaluated(self.phase, step, accuracy, sets, error=error))

    def write_lease(self, groups: IntervalSet) -> None:
        """Writes down that this actor works on these groups. Raises Fenced and EtcdUnavailable."""
        lease = GroupLease(producer=PRODUCER, epoch=self.ctx.epoch, term=self.number, groups=groups.to_json(),
                           at=time.time())
        self.writer.write(Op.put(self.keys.group_lease(PRODUCER), lease.encode()))

    def resume(self, phase: str, step: int, shown_step: int, policy_version: int) -> None:
        """The run is at this committed state. ``shown_step``: 0 in the phase before the steps that are shown."""
        self.phase, self.step = phase, step
        sft = {"sft_step": step} if phase == "sft" else {}
        self.status.resume(phase, shown_step, policy_version=policy_version, **sft)

    def step_of_predecessor(self, cursor: Mapping[str, Any], step: int, policy_version: int
                            ) -> tuple[StepMetrics, list[int]] | None:
        """Metrics and groups of a step whose actor was gone when it was done: what is known of it came with its
        command. None where the step was reported. Raises EtcdUnavailable."""
        known = cursor.get(_LAST_STEP) or {}
        metrics = StepMetrics.model_validate(known["metrics"]) if known else None
        if metrics is None or metrics.step != step or self.etcd.get(self.keys.step_metrics(step)) is not None:
            return None
        return metrics.replace(policy_version=policy_version), list(IntervalSet.from_json(known["groups"]))

    def finish(self, step: int) -> None:
        self.member.progress(step, "finished")
        self._end("finished", event_kinds.RUN_FINISHED, f"finished after {counted(step, 'step')}", step=step)

    def stop(self, step: int | None, **changes: Any) -> None:
        """Ends the run where it is. ``step``: the committed one, of the phase; None where the trainer is away.
        ``changes``: what else of the status changes."""
        self.member.progress(step or self.step, "stopped")
        trains = self.status.latest.phase in WORKING_PHASES
        message = stopped_message(self.status.latest, committed=step is not None or not trains)
        self._end("stopped", event_kinds.RUN_STOPPED, message, message=message, **changes)

    def _end(self, phase: str, kind: EventKind, text: str, **changes: Any) -> None:
        """Writes the end of the run and its event in one transaction, as soon as etcd takes it: who sees one sees the
        other, also where this actor ends in between."""
        self.phase, event = phase, build(kind, self.ctx.job, text)  # once, however often it is written
        self.write(event=event, **changes)


def known_before(metrics: StepMetrics, groups: IntervalSet) -> dict[str, Any]:
    """What the cursor has of a step before it is trained: see ``ActorTerm.step_of_predecessor``."""
    return {_LAST_STEP: {"metrics": metrics.model_dump(mode="json"), "groups": groups.to_json()}}
