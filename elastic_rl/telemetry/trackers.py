"""Training metrics for TensorBoard and W&B, beside the run's own log.

Trackers are third-party code, so each has a thread and a bounded queue of its own: one that hangs, fails or cannot keep
up loses rows, is reported once, and does not delay the training.

A recovery repeats steps, and a new process of the actor continues the run. For TensorBoard a new file then names the
step from which on the earlier ones are purged. W&B cannot go back: each row has its step as a metric, which is the x
axis, and the number of its attempt; of a step that is there twice, the row with the higher attempt is valid.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from elastic_rl.runtime.files import replace_file

log = logging.getLogger(__name__)

_MAX_QUEUED = 1000
"""Rows that may wait for a tracker; further ones are dropped."""
_RUNS = {"step": "rl", "eval": "rl", "sft": "sft", "sampled": "sampled"}
"""Kind of a record → the run that it belongs to; each run counts its own steps."""


@dataclass(frozen=True)
class Row:
    """Numbers of one step of a run (rl, sft, or sampled: a job that trains nothing)."""

    run: str
    step: int
    values: Mapping[str, float]
    void_from: int | None = None
    """Step from which on all earlier rows are void, where this row begins another attempt: the first one of a process,
    or of a repeated step. A training row replaces that of its step; an ``eval`` row comes after it and keeps it."""


def scalars(kind: str, fields: Mapping[str, Any]) -> tuple[str, int, dict[str, float]] | None:
    """Run, step and numbers of a record of the run log; None for a record that is no training step. Pure."""
    if kind not in _RUNS or "step" not in fields:
        return None
    values: dict[str, float] = {}
    for name, value in fields.items():
        if name in ("step", "at"):
            continue
        if name == "eval_sets":
            values |= {f"eval/{part}/accuracy": float(v) for part, v in value.items()}
        elif name == "eval_reward_parts":
            values |= {f"eval/reward_parts/{part}": float(v) for part, v in value.items()}
        elif isinstance(value, Mapping):
            values |= {f"{name}/{part}": float(v) for part, v in value.items() if isinstance(v, int | float)}
        elif name == "engines":
            values["engines_ready"] = float(sum(e.get("state") == "ready" for e in value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            values[name] = float(value)
    return _RUNS[kind], int(fields["step"]), values


class RewindDetector:
    """Detects repeated steps. An ``eval`` record belongs to a step that was seen already."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def row(self, kind: str, fields: Mapping[str, Any]) -> Row | None:
        found = scalars(kind, fields)
        if found is None:
            return None
        run, step, values = found
        last, first_void = self._last.get(run), step + 1 if kind == "eval" else step
        self._last[run] = step
        return Row(run, step, values, first_void if last is None or first_void <= last else None)


class Tracker(Protocol):
    """Created and called in one thread. After any exception it is not called again."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files in ``folder``, one subfolder a run, which ``tensorboard --logdir`` shows as two runs."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter
        self._make, self._folder = SummaryWriter, folder
        self._writers: dict[str, Any] = {}

    def write(self, row: Row) -> None:
        if row.void_from is not None:
            if row.run in self._writers:
                self._writers.pop(row.run).close()
            self._writers[row.run] = self._make(str(self._folder / row.run), purge_step=row.void_from)
        writer = self._writers[row.run]
        for name, value in row.values.items():
            writer.add_scalar(name, value, row.step)
        writer.flush()  # a process that is killed has written its rows

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandB:
    """Writes one run of W&B for the job, however often its actor is started: offline into ``folder``/wandb, for ``wandb
    sync``, or to W&B's server. Project, entity, key and server are those of W&B's own environment variables."""

    def __init__(self, folder: Path, job: str, mode: Literal["offline", "online"] = "offline") -> None:
        import wandb
        self._file = folder / "wandb" / "run.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._known = self._read()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "elastic-rl", group=job, name=job, id=self._known["id"],
            resume="allow", dir=str(folder), mode=mode,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False,
                                    disable_job_creation=True))
        for run in dict.fromkeys(_RUNS.values()):
            self._run.define_metric(f"{run}/step")
            self._run.define_metric(f"{run}/*", step_metric=f"{run}/step")

    def write(self, row: Row) -> None:
        attempts = self._known["attempts"]
        if row.void_from is not None:
            attempts[row.run] = attempts.get(row.run, 0) + 1
            self._save()
        values = {"step": row.step, "attempt": attempts[row.run], **row.values}
        self._run.log({f"{row.run}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()

    def _read(self) -> dict[str, Any]:
        """The id of the job's run in W&B, and by run the number of its attempts so far."""
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
            return {"id": str(known["id"]), "attempts": {str(k): int(v) for k, v in known["attempts"].items()}}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none yet, or it is damaged
            self._known = {"id": uuid.uuid4().hex[:16], "attempts": {}}
            self._save()
            return self._known

    def _save(self) -> None:
        replace_file(self._file, json.dumps(self._known))


class _TrackerThread:
    """A tracker's thread and queue. ``failed`` is called at most once, in a thread of its own."""

    def __init__(self, name: str, make: Callable[[], Tracker], failed: Callable[[str, str], None]) -> None:
        self._name, self._make, self._failed = name, make, failed
        self._rows: queue.Queue[Row | None] = queue.Queue(_MAX_QUEUED)
        self._reported = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def offer(self, row: Row) -> None:
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._report(f"too slow: {_MAX_QUEUED} rows are queued, further ones are dropped")

    def close(self, timeout_s: float) -> None:
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (row := self._rows.get()) is not None:
                tracker.write(row)
            tracker.close()
        except Exception as e:  # third-party code: the training must not depend on it
            self._report(f"{type(e).__name__}: {e}")
            while self._rows.get() is not None:  # drop what is still offered
                pass

    def _report(self, why: str) -> None:
        if not self._reported:
            self._reported = True
            log.warning("training metrics are no longer sent to %s: %s", self._name, why)
            threading.Thread(target=self._failed, args=(self._name, why), daemon=True).start()


class Trackers:
    """The configured trackers. ``offer`` never waits and never raises."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], failed: Callable[[str, str], None]) -> None:
        """``failed`` gets the name of a tracker that failed or is too slow, and the reason; once each."""
        self._threads = [_TrackerThread(name, make, failed) for name, make in makers.items()]
        self._rewinds = RewindDetector()

    @classmethod
    def from_names(cls, names: Sequence[str], folder: Path, job: str, failed: Callable[[str, str], None], *,
                   wandb_mode: Literal["offline", "online"] = "offline") -> Trackers:
        """``names``: some of tensorboard and wandb. Each writes into a folder of its name in ``folder``."""
        makers: dict[str, Callable[[], Tracker]] = {
            "tensorboard": lambda: TensorBoard(folder / "tensorboard"), "wandb": lambda: WandB(folder, job, wandb_mode)}
        return cls({name: makers[name] for name in names}, failed)

    def offer(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A record of the run log."""
        row = self._rewinds.row(kind, fields) if self._threads else None
        if row is not None:
            for thread in self._threads:
                thread.offer(row)

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes what is queued, for at most ``timeout_s`` seconds a tracker."""
        for thread in self._threads:
            thread.close(timeout_s)
