"""Records of the run: its log, one JSON object a line; the job's status and its step metrics in etcd."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from elastic_rl.errors import ElasticRLError, Fenced
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.job_records import ended
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import ENDED_PHASES, Event, GenerationCap, JobStatus, StepMetrics
from elastic_rl.etcd.transaction import batches
from elastic_rl.pipeline.records.activity import Activity, ActivityThrottle
from elastic_rl.pipeline.records.history import Block, History, record_line
from elastic_rl.pipeline.records.tail_keys import put_ops
from elastic_rl.plugins.user_code import plain
from elastic_rl.runtime.files import open_for_readers
from elastic_rl.telemetry.trackers import Trackers

log = logging.getLogger(__name__)

_MAX_REASONS = 16
_OTHER = "other"
_WAITING_FOR = 4000
"""Longest text of a wait, in characters."""
_PROGRESS_EVERY_S = 1.0
_PIECES_EVERY_S = 10.0
_CAP_AGAIN_S = 10.0
"""Pause before the generation cap is written again, where that failed."""
_STEP_S_KEPT = 0.8
"""Fraction of the usual time of a step that is kept at each new one."""


class LineSink(Protocol):
    """Takes the lines of a run's log, each with its newline. Raises nothing."""

    def append(self, line: bytes) -> None: ...


class LineFile:
    """Appends each line to a file, also after one that was cut off, by a full disk or a crash, so that a failed write
    costs one line and no other."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def append(self, line: bytes) -> None:
        try:
            _append(self._path, line)
        except OSError as e:  # a full disk must not end the run
            log.error("%s cannot be written, so the report will lack a record: %s", self._path, e)


class RunLog:
    """The records of a run, for ``sink``, each as a line of its own. Passes them to ``trackers`` too."""

    def __init__(self, sink: LineSink, trackers: Trackers | None = None) -> None:
        self._sink, self._trackers = sink, trackers

    def write(self, kind: str, **fields: Any) -> None:
        self._sink.append(record_line(kind, **{"at": time.time(), **fields}))
        if self._trackers is not None:
            self._trackers.offer(kind, fields)

    def close(self) -> None:
        if self._trackers is not None:
            self._trackers.close()


def _append(path: Path, line: bytes) -> None:
    """Appends a line, with a newline before it where the last one has none. Raises OSError, also when only a part was
    written."""
    with open(path, "a+b", buffering=0, opener=open_for_readers) as f:
        end = f.seek(0, os.SEEK_END)
        if end:
            f.seek(end - 1)
            if f.read(1) != b"\n":
                line = b"\n" + line
        # One write, since other processes append to the same file.
        if f.write(line) != len(line):
            raise OSError(errno.ENOSPC, "only a part was written")


class JobStatusWriter:
    """Writes the job's status and step metrics. The record in etcd is the truth; memory has a copy for the next write.
    Thread-safe.

    One transaction under the actor's fencing token writes a step's status together with its metrics, its samples and
    what the run's log has got since the last one, and a recovery's status together with the deletion of the metrics
    that it undoes.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, writer: FencedWriter, *, steps: int, seed: int,
                 clock: Callable[[], float] = time.time, history: History | None = None) -> None:
        """``writer``: holds the fencing token of the actor. ``history``: the run's log, if this writer is to write its
        tail. Raises EtcdUnavailable."""
        self._history = history
        self._etcd, self._keys, self._writer, self._clock = etcd, keys, writer, clock
        found = etcd.get(keys.job_status())
        self.latest = readable_one(found, JobStatus) or JobStatus(
            phase="starting", steps=steps, seed=seed, started_at=clock(), updated_at=clock())
        self._metrics: StepMetrics | None = None
        self._needs_written = True
        """Whether etcd has ``latest.needs_version``."""
        self._cap_written, self._cap_tried_at = self.latest.generation_cap, 0.0
        """Which limit etcd says, and when another one was to be written."""
        self.latest = self.latest.replace(generation_cap=GenerationCap.NONE)  # it was another incarnation's
        self._lock = threading.RLock()
        self._activity = ActivityThrottle()
        # An earlier incarnation may have ended in a wait; what this one does is another one.
        self._activity.written(Activity(self.latest.stage, self.latest.waiting_kind, self.latest.waiting_for,
                                        self.latest.waiting_since))

    def activity(self, stage: str, waiting_kind: str = "", waiting_for: str = "") -> None:
        """Says what the run does now: it works on ``stage``, or it waits in it for a part of the system
        (``waiting_kind``, as of ``JobStatus``), in words for people ``waiting_for``.

        May be called as often as there is something to say, also at each poll of a wait: it writes rarely
        (``activity``), and every other write of the status says it too. Without etcd, or when etcd refuses
        the text, it writes nothing, and the next call tries again; it may wait for ``etcd.retry_budget_s``. Raises
        Fenced when the writer's token is over.
        """
        with self._lock:
            now = self._clock()
            self._activity.update(now, stage, waiting_kind, plain(waiting_for, _WAITING_FOR))
            if self._activity.due(now):
                self._try_write()

    def progress(self, **changes: Any) -> None:
        """Changes fields that are for people: the next write says so, and there is one of its own if the last one was
        ``_PROGRESS_EVERY_S`` ago. May be called as often, and where etcd is away, as ``activity``. Raises Fenced."""
        with self._lock:
            self.latest = self.latest.replace(**changes)
            if not 0.0 <= self._clock() - self.latest.updated_at < _PROGRESS_EVERY_S:
                self._try_write()

    def needs(self, version: int, *, at_once: bool) -> None:
        """Says that the run needs engines that serve this version or a newer one. ``at_once``: writes it now, if it was
        not; else the next write says it. May be called as often, and where etcd is away, as ``activity``. Raises
        Fenced."""
        with self._lock:
            if version > self.latest.needs_version:
                self.latest, self._needs_written = self.latest.replace(needs_version=version), False
            if at_once and not self._needs_written:
                self._try_write()

    def pieces(self, count: int) -> None:
        """So many groups and parts of the next step are done (``JobStatus.pieces``): the next write says so, and there
        is one of its own if the last one was ``_PIECES_EVERY_S`` ago. May be called as often, and where etcd is away,
        as ``activity``. Raises Fenced."""
        with self._lock:
            if count == self.latest.pieces:
                return
            self.latest = self.latest.replace(pieces=count)
            if not 0.0 <= self._clock() - self.latest.updated_at < _PIECES_EVERY_S:
                self._try_write()

    def generation_cap(self, cap: GenerationCap) -> None:
        """Reports the generation cap (``CapWatch``), and writes it if it is another one. May be
        called as often, and where etcd is away, as ``activity``. Raises Fenced."""
        now = self._clock()
        # Without the lock, which another thread may hold for as long as etcd does not answer.
        if cap == self.latest.generation_cap and (
                cap == self._cap_written or 0.0 <= now - self._cap_tried_at < _CAP_AGAIN_S):
            return
        with self._lock:
            self.latest, self._cap_tried_at = self.latest.replace(generation_cap=cap), now
            self._try_write()

    def _try_write(self) -> None:
        try:
            self._write(self.latest.phase, {}, [])
        except Fenced:
            raise
        except ElasticRLError as e:  # nothing of the run depends on it
            log.warning("what the run does is not written: %s", e)

    def write(self, phase: str, *, metrics: StepMetrics | None = None, samples: Sequence[Op] = (),
              event: Event | None = None, **changes: Any) -> None:
        """``metrics``: of a step that was just completed. ``samples``: the operations that write samples of it.
        ``event``: what the change is reported by, which is written once, however often this is repeated. Raises Fenced
        when the writer's token is over, and EtcdUnavailable: the same call can then be repeated."""
        with self._lock:
            if metrics is not None:
                total_s, usual_s = metrics.seconds.get("total", 0.0), self.latest.step_s
                changes["productive_s"] = self.latest.productive_s + total_s
                changes["step_s"] = total_s + _STEP_S_KEPT * (usual_s - total_s) if usual_s else total_s
                changes["pieces"] = 0
                changes["dropped_groups"] = _add(self.latest.dropped_groups, _dropped(metrics), 1)
            self._write(phase, changes, [*([self._put(metrics)] if metrics is not None else []), *samples], event)
            self._metrics = metrics or self._metrics

    def evaluated(self, phase: str, step: int, eval_accuracy: float,
                  eval_sets: Mapping[str, float] = MappingProxyType({}), *, error: float = 0.0) -> None:
        """Writes the mean reward of the main evaluation set after ``step``, its standard error, and those of further
        sets by name, to the status and, but for the error, to the step's metrics. Raises Fenced."""
        with self._lock:
            ops, found = [], {"eval_accuracy": eval_accuracy, "eval_sets": dict(eval_sets)}
            of_run = {"eval_measure": "reward", "eval_error": error}
            if step == 0:
                of_run |= {"eval_start": eval_accuracy, "eval_start_error": error}
            if self._metrics is not None and self._metrics.step == step:
                self._metrics = self._metrics.replace(**found)
                ops.append(self._put(self._metrics))
            self._write(phase, found | of_run, ops)

    def resume(self, phase: str, step: int, **changes: Any) -> None:
        """Records that the run resumes from ``step``: deletes the metrics of later steps, their productive time and
        their dropped groups. Raises Fenced."""
        with self._lock:
            self._resume(phase, step, changes)

    def _resume(self, phase: str, step: int, changes: dict[str, Any]) -> None:
        self._metrics = None
        # Read again: an attempt whose answer was lost may have been applied.
        self.latest = readable_one(self._etcd.get(self._keys.job_status()), JobStatus) or self.latest
        # Keys sort by step, so what the trainer's state covers, which is almost all of it, is not read.
        pages = self._etcd.pages(self._keys.steps_prefix(), after=self._keys.step_metrics(step))
        undone = [m for page in pages for m, _ in readable(page.kvs, StepMetrics)]
        lost_s = sum(m.seconds.get("total", 0.0) for m in undone)
        changes |= {"step": step, "pieces": 0, "productive_s": max(0.0, self.latest.productive_s - lost_s)}
        dropped = self.latest.dropped_groups
        for metrics in undone:
            dropped = _add(dropped, _dropped(metrics), -1)
        changes["dropped_groups"] = dropped
        ops = [Op.delete(self._keys.step_metrics(m.step)) for m in reversed(undone)]
        *rest, last = [*batches(ops)] or [[]]
        for batch in rest:  # newest first, so that there is no gap when this is interrupted
            self._writer.write(*batch)
        self._write(phase, changes, last)

    def _write(self, phase: str, changes: Mapping[str, Any], ops: Sequence[Op], event: Event | None = None) -> None:
        now = self._clock()
        if phase in ENDED_PHASES:
            self._activity.update(now, "")
        shown = self._activity.visible(now)
        new = self.latest.replace(**{"phase": phase, "updated_at": now, **asdict(shown), **changes})
        if phase in ENDED_PHASES:
            new = ended(new, phase, new.message, now)
        blocks = self._blocks()
        ops = [Op.put(self._keys.job_status(), new.encode()), *ops, *put_ops(self._keys, blocks)]
        # Where the event is there already, an answer was lost; another thread may have written its status since.
        if event is None or not self._writer.write_event(event, ops=ops):
            self._writer.write(*ops)
        self.latest, self._needs_written, self._cap_written = new, True, new.generation_cap
        self._activity.written(shown)
        if self._history is not None:
            self._history.commit(blocks)

    def _blocks(self) -> Sequence[Block]:
        """What the run's log has got since the last write. What does not fit into one transaction with the status is
        written before it."""
        if self._history is None:
            return ()
        while True:
            blocks, more = self._history.pending()
            if not more:
                return blocks
            self._writer.write(*put_ops(self._keys, blocks))
            self._history.commit(blocks)

    def _put(self, metrics: StepMetrics) -> Op:
        return Op.put(self._keys.step_metrics(metrics.step), metrics.encode())


def _dropped(metrics: StepMetrics) -> dict[str, int]:
    """The step's dropped groups by reason; those without one as another."""
    named = metrics.dropped_by_reason
    rest = metrics.dropped_groups - sum(named.values())
    return _add(named, {_OTHER: rest}, 1) if rest > 0 else dict(named)


def _add(counts: Mapping[str, int], more: Mapping[str, int], sign: int) -> dict[str, int]:
    """Sums by reason. A run has few reasons; one that names too many has the rest of them counted as one."""
    sums = dict(counts)
    for reason, count in more.items():
        name = reason if reason in sums or len(sums) < _MAX_REASONS else _OTHER
        sums[name] = sums.get(name, 0) + sign * count
    return {reason: count for reason, count in sums.items() if count > 0}
