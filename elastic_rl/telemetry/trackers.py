"""Training metrics for TensorBoard and W&B, beside the run's own log.

Trackers are third-party code, so each has a thread and a bounded queue of its own: one that hangs, fails or cannot keep
up loses rows, is reported once, and does not delay the training.

A recovery repeats steps. For TensorBoard a new file then names the step from which on the earlier ones are purged. W&B
cannot go back: each row has its step as a metric, which is the x axis, and the number of its attempt; of a step that is
there twice, the row with the higher attempt is valid.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

_MAX_QUEUED = 1000
"""Rows that may wait for a tracker; further ones are dropped."""
_RUNS = {"step": "rl", "eval": "rl", "sft": "sft"}
"""Kind of a record → the run that it belongs to; each run counts its own steps."""


@dataclass(frozen=True)
class Row:
    """Numbers of one step of a run (rl or sft)."""

    run: str
    step: int
    values: Mapping[str, float]
    rewinds: bool = False
    """Whether earlier rows of this step and later ones are void: the first row of a repeated step, or of a process."""


def scalars(kind: str, fields: Mapping[str, Any]) -> tuple[str, int, dict[str, float]] | None:
    """Run, step and numbers of a record of the run log; None for a record that is no training step. Pure."""
    if kind not in _RUNS or "step" not in fields:
        return None
    values: dict[str, float] = {}
    for name, value in fields.items():
        if name in ("step", "at"):
            continue
        if isinstance(value, Mapping):
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
        last = self._last.get(run)
        rewinds = last is None or step < last or (step == last and kind != "eval")
        self._last[run] = step
        return Row(run, step, values, rewinds)


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
        if row.rewinds:
            if row.run in self._writers:
                self._writers.pop(row.run).close()
            self._writers[row.run] = self._make(str(self._folder / row.run), purge_step=row.step)
        writer = self._writers[row.run]
        for name, value in row.values.items():
            writer.add_scalar(name, value, row.step)
        writer.flush()  # a process that is killed has written its rows

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WandB:
    """Writes an offline run of W&B in ``folder``/wandb, for ``wandb sync``. Each process of the actor makes one; the
    runs of a job are one group."""

    def __init__(self, folder: Path, job: str) -> None:
        import wandb
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project="elastic-rl", group=job, dir=str(folder), mode="offline",
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False,
                                    disable_job_creation=True))
        self._attempts: dict[str, int] = {}
        for run in dict.fromkeys(_RUNS.values()):
            self._run.define_metric(f"{run}/step")
            self._run.define_metric(f"{run}/*", step_metric=f"{run}/step")

    def write(self, row: Row) -> None:
        self._attempts[row.run] = self._attempts.get(row.run, 0) + row.rewinds
        values = {"step": row.step, "attempt": self._attempts[row.run], **row.values}
        self._run.log({f"{row.run}/{name}": value for name, value in values.items()})

    def close(self) -> None:
        self._run.finish()


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
    def from_names(cls, names: Sequence[str], folder: Path, job: str, failed: Callable[[str, str], None]) -> Trackers:
        """``names``: of tensorboard and wandb. Each writes into a folder of its name in ``folder``."""
        makers: dict[str, Callable[[], Tracker]] = {
            "tensorboard": lambda: TensorBoard(folder / "tensorboard"), "wandb": lambda: WandB(folder, job)}
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
