"""The run's own record: one JSON object a line in ``steps.jsonl``; the job's status and its curve's points in etcd."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_rl.coordinator import epochs
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import JobStatus, StepPoint
from elastic_rl.coordinator.store import Op, Store
from elastic_rl.telemetry.trackers import Trackers

_TXN_OPS = 100
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

    def __init__(self, store: Store, keys: Keys, *, epoch: int, steps: int, seed: int) -> None:
        self._store, self._keys, self._epoch = store, keys, epoch
        found = store.get(keys.job_status())
        self.latest = JobStatus.decode(found.value) if found else JobStatus(
            phase="starting", steps=steps, seed=seed, started_at=time.time(), updated_at=time.time())
        self._point: StepPoint | None = None

    def write(self, phase: str, *, point: StepPoint | None = None, **changes: Any) -> None:
        """``point``: of a step that was just done. Raises Fenced when a newer incarnation runs the job."""
        if point is not None:
            self._point = point
            changes["productive_s"] = self.latest.productive_s + point.seconds.get("total", 0.0)
        self._write(phase, changes, [self._put(point)] if point is not None else [])

    def evaluated(self, phase: str, step: int, heldout: float) -> None:
        """The held-out accuracy after ``step``, in the status and in the step's point. Raises Fenced."""
        ops = []
        if self._point is not None and self._point.step == step:
            self._point = self._point.but(heldout=heldout)
            ops.append(self._put(self._point))
        self._write(phase, {"heldout": heldout}, ops)

    def resume(self, phase: str, step: int, **changes: Any) -> None:
        """The run goes on from ``step``: the points after it are deleted, and their time counts no more. Raises Fenced.
        """
        self._point = None
        undone = [p for p in map(StepPoint.decode, (kv.value for kv in self._store.range(self._keys.steps_prefix())[0]))
                  if p.step > step]
        lost_s = sum(p.seconds.get("total", 0.0) for p in undone)
        changes |= {"step": step, "productive_s": max(0.0, self.latest.productive_s - lost_s)}
        ops = [Op.delete(self._keys.step_point(p.step)) for p in reversed(undone)]
        rest, last = ops[:-_TXN_OPS], ops[-_TXN_OPS:]
        for at in range(0, len(rest), _TXN_OPS):  # newest first: whenever this stops half-way, there is no gap
            epochs.write(self._store, self._keys, self._epoch, *rest[at:at + _TXN_OPS])
        self._write(phase, changes, last)

    def _write(self, phase: str, changes: Mapping[str, Any], ops: Sequence[Op]) -> None:
        self.latest = self.latest.but(phase=phase, updated_at=time.time(), **changes)
        epochs.write(self._store, self._keys, self._epoch, Op.put(self._keys.job_status(), self.latest.encode()), *ops)

    def _put(self, point: StepPoint) -> Op:
        return Op.put(self._keys.step_point(point.step), point.encode())
