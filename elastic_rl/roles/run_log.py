"""The run's own record: one JSON object a line in ``steps.jsonl``; the job's status and its curve's points in etcd."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus, StepMetrics
from elastic_rl.etcd.transaction import batches
from elastic_rl.telemetry.trackers import Trackers

"""etcd takes at most 128 operations in a transaction; the client adds its own."""


class RunLog:
    """Appends whole lines, flushed, so that a reader never sees half a record and a killed writer loses at most one.
    ``trackers`` are told the same."""

    def __init__(self, path: Path, trackers: Trackers | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._trackers = path, trackers

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "at": time.time(), **fields}) + "\n"
        with self.path.open("a") as f:
            f.write(line)
        if self._trackers is not None:
            self._trackers.offer(kind, fields)

    def close(self) -> None:
        if self._trackers is not None:
            self._trackers.close()


class JobStatusWriter:
    """Keeps the latest status in memory only to write the next one; the truth is the record in etcd.

    What belongs together is written in one transaction under the epoch: a step's status and its point of the curve, a
    recovery's status and the end of the points that it undid.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, *, epoch: int, steps: int, seed: int) -> None:
        self._etcd, self._keys, self._epoch = etcd, keys, epoch
        found = etcd.get(keys.job_status())
        self.latest = JobStatus.decode(found.value) if found else JobStatus(
            phase="starting", steps=steps, seed=seed, started_at=time.time(), updated_at=time.time())
        self._point: StepMetrics | None = None

    def write(self, phase: str, *, point: StepMetrics | None = None, **changes: Any) -> None:
        """``point``: of a step that was just done. Raises Fenced when a newer incarnation runs the job."""
        if point is not None:
            self._point = point
            changes["productive_s"] = self.latest.productive_s + point.seconds.get("total", 0.0)
        self._write(phase, changes, [self._put(point)] if point is not None else [])

    def evaluated(self, phase: str, step: int, eval_accuracy: float) -> None:
        """The eval accuracy after ``step``, in the status and in the step's point. Raises Fenced."""
        ops = []
        if self._point is not None and self._point.step == step:
            self._point = self._point.replace(eval_accuracy=eval_accuracy)
            ops.append(self._put(self._point))
        self._write(phase, {"eval_accuracy": eval_accuracy}, ops)

    def resume(self, phase: str, step: int, **changes: Any) -> None:
        """The run goes on from ``step``: the points after it are deleted, and their time counts no more. Raises Fenced.
        """
        self._point = None
        undone = [p for p in map(StepMetrics.decode,
                                 (kv.value for kv in self._etcd.range(self._keys.steps_prefix())[0]))
                  if p.step > step]
        lost_s = sum(p.seconds.get("total", 0.0) for p in undone)
        changes |= {"step": step, "productive_s": max(0.0, self.latest.productive_s - lost_s)}
        ops = [Op.delete(self._keys.step_metrics(p.step)) for p in reversed(undone)]
        *rest, last = [*batches(ops)] or [[]]
        for batch in rest:  # newest first: whenever this stops half-way, there is no gap
            fencing.write(self._etcd, self._keys, self._epoch, *batch)
        self._write(phase, changes, last)

    def _write(self, phase: str, changes: Mapping[str, Any], ops: Sequence[Op]) -> None:
        self.latest = self.latest.replace(phase=phase, updated_at=time.time(), **changes)
        fencing.write(self._etcd, self._keys, self._epoch, Op.put(self._keys.job_status(), self.latest.encode()), *ops)

    def _put(self, point: StepMetrics) -> Op:
        return Op.put(self._keys.step_metrics(point.step), point.encode())
