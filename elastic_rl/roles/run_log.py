"""The run's own record: one JSON object a line in ``steps.jsonl``, and the job's status in etcd."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from elastic_rl.coordinator import epochs
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import JobStatus
from elastic_rl.coordinator.store import Op, Store


class RunLog:
    """Appends whole lines, flushed, so that a reader never sees half a record and a killed writer loses at most one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "at": time.time(), **fields}) + "\n"
        with self.path.open("a") as f:
            f.write(line)


class JobStatusWriter:
    """Keeps the latest status in memory only to write the next one; the truth is the record in etcd."""

    def __init__(self, store: Store, keys: Keys, *, epoch: int, steps: int, seed: int) -> None:
        self._store, self._keys, self._epoch = store, keys, epoch
        found = store.get(keys.job_status())
        self.latest = JobStatus.decode(found.value) if found else JobStatus(
            phase="starting", steps=steps, seed=seed, started_at=time.time(), updated_at=time.time())

    def write(self, phase: str, **changes: Any) -> None:
        """Raises Fenced when a newer incarnation runs the job."""
        self.latest = self.latest.but(phase=phase, updated_at=time.time(), **changes)
        epochs.write(self._store, self._keys, self._epoch, Op.put(self._keys.job_status(), self.latest.encode()))
