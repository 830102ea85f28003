"""Records of the run: one JSON object per line in ``steps.jsonl``; the job's status and its step metrics in etcd."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus, StepMetrics
from elastic_rl.etcd.transaction import batches
from elastic_rl.telemetry.trackers import Trackers


class RunLog:
    """Appends whole lines, flushed, so that a reader skips at most one incomplete record, the last. Passes each record
    to ``trackers``."""

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
    """Writes the job's status and step metrics. The record in etcd is the truth; memory has a copy for the next write.

    One transaction under the epoch writes a step's status together with its metrics, and a recovery's status together
    with the deletion of the metrics that it undoes.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, *, epoch: int, steps: int, seed: int) -> None:
        self._etcd, self._keys, self._epoch = etcd, keys, epoch
        found = etcd.get(keys.job_status())
        self.latest = readable_one(found, JobStatus) or JobStatus(
            phase="starting", steps=steps, seed=seed, started_at=time.time(), updated_at=time.time())
        self._metrics: StepMetrics | None = None

    def write(self, phase: str, *, metrics: StepMetrics | None = None, **changes: Any) -> None:
        """``metrics``: of a step that was just completed. Raises Fenced when a newer epoch has begun."""
        if metrics is not None:
            self._metrics = metrics
            changes["productive_s"] = self.latest.productive_s + metrics.seconds.get("total", 0.0)
        self._write(phase, changes, [self._put(metrics)] if metrics is not None else [])

    def evaluated(self, phase: str, step: int, eval_accuracy: float) -> None:
        """Writes the eval accuracy after ``step`` to the status and to the step's metrics. Raises Fenced."""
        ops = []
        if self._metrics is not None and self._metrics.step == step:
            self._metrics = self._metrics.replace(eval_accuracy=eval_accuracy)
            ops.append(self._put(self._metrics))
        self._write(phase, {"eval_accuracy": eval_accuracy}, ops)

    def resume(self, phase: str, step: int, **changes: Any) -> None:
        """Records that the run resumes from ``step``: deletes the metrics of later steps, and their productive time.
        Raises Fenced."""
        self._metrics = None
        undone = [m for m in map(StepMetrics.decode,
                                 (kv.value for kv in self._etcd.range(self._keys.steps_prefix())[0]))
                  if m.step > step]
        lost_s = sum(m.seconds.get("total", 0.0) for m in undone)
        changes |= {"step": step, "productive_s": max(0.0, self.latest.productive_s - lost_s)}
        ops = [Op.delete(self._keys.step_metrics(m.step)) for m in reversed(undone)]
        *rest, last = [*batches(ops)] or [[]]
        for batch in rest:  # newest first, so that there is no gap when this is interrupted
            fencing.write(self._etcd, self._keys, self._epoch, *batch)
        self._write(phase, changes, last)

    def _write(self, phase: str, changes: Mapping[str, Any], ops: Sequence[Op]) -> None:
        self.latest = self.latest.replace(phase=phase, updated_at=time.time(), **changes)
        fencing.write(self._etcd, self._keys, self._epoch, Op.put(self._keys.job_status(), self.latest.encode()), *ops)

    def _put(self, metrics: StepMetrics) -> Op:
        return Op.put(self._keys.step_metrics(metrics.step), metrics.encode())
