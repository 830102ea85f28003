"""Training metrics for TensorBoard, W&B, MLflow, ClearML and Trackio, beside the run's own log.

Trackers are third-party code, so each has a thread and a bounded queue of its own: one that hangs, fails or cannot keep
up loses rows, is reported once, and does not delay the training.

A recovery repeats steps, and a new process of the actor continues the run. For TensorBoard a new file then names the
step from which on the earlier ones are purged. The others cannot go back: each row has its step as a metric, which is
the x axis, and the number of its attempt; of a step that is there twice, the row with the higher attempt is valid.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from elastic_rl.runtime.files import replace_file
from elastic_rl.runtime.secret_names import without_secrets_of
from elastic_rl.runtime.sequences import batches

log = logging.getLogger(__name__)

_MAX_QUEUED = 1000
"""Rows that may wait for a tracker; further ones are dropped."""
_PROJECT = "elastic-rl"
"""Project, or experiment, of the trackers' runs, if their environment variables name none."""
_MLFLOW_BATCH = 1000
"""Metrics of one request, at most, as MLflow's servers take them."""
_MLFLOW_REFUSES = re.compile(r"[^\w\-. :/]|(?<![^/])/|/$|^\.\.|(?<![^/])\.{1,2}(?=/|$)")
"""What no name of a metric has there: signs other than these, and parts between slashes that are empty, ``.`` or ``..``
(its ``validation.py``: a name is a path in its shortest form, which does not begin with two dots)."""
_MAX_ERROR, _MAX_READ = 2000, 64_000
"""Characters of an error that are reported, and that are looked at: some errors have a server's whole page in them."""
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


def mlflow_name(name: str) -> str:
    """The name that a metric has in MLflow: what it refuses is written as numbers, so that names of users, which may
    have any sign, stay apart. Pure."""
    return _MLFLOW_REFUSES.sub(lambda found: "_" + "".join(f"{ord(c):x}" for c in found[0]) + "_", name)


class _JobRun:
    """The one run that a job has with a tracker, however often its actor is started: a file with its id and, by run of
    ours, the number of attempts so far."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "run.json"
        self.id, self._attempts = "", dict[str, int]()
        """``id``: "" before the tracker's run was made."""
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
            self.id, self._attempts = str(known["id"]), {str(k): int(v) for k, v in known["attempts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none yet, or it is damaged
            pass

    def begin(self, run_id: str) -> None:
        """The job's run is this one from now on."""
        self.id, self._attempts = run_id, {}
        self._save()

    def values(self, row: Row) -> dict[str, float]:
        """The numbers of a row by ``RUN/NAME``, with ``RUN/step`` and ``RUN/attempt``."""
        if row.void_from is not None:
            self._attempts[row.run] = self._attempts.get(row.run, 0) + 1
            self._save()
        values = {"step": row.step, "attempt": self._attempts[row.run], **row.values}
        return {f"{row.run}/{name}": value for name, value in values.items()}

    def _save(self) -> None:
        replace_file(self._file, json.dumps({"id": self.id, "attempts": self._attempts}))


class WandB:
    """Writes one run of W&B for the job, however often its actor is started: offline into ``folder``/wandb, for ``wandb
    sync``, or to W&B's server. Project, entity, key and server are those of W&B's own environment variables."""

    def __init__(self, folder: Path, job: str, mode: Literal["offline", "online"] = "offline") -> None:
        import wandb
        self._known = _JobRun(folder / "wandb")
        if not self._known.id:
            self._known.begin(uuid.uuid4().hex[:16])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT, group=job, name=job, id=self._known.id,
            resume="allow", dir=str(folder), mode=mode,
            settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False,
                                    disable_job_creation=True))
        for run in dict.fromkeys(_RUNS.values()):
            self._run.define_metric(f"{run}/step")
            self._run.define_metric(f"{run}/*", step_metric=f"{run}/step")

    def write(self, row: Row) -> None:
        self._run.log(self._known.values(row))

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Writes one run of MLflow for the job, however often its actor is started: to the server or store that MLflow's
    own environment variables name, else into the database ``folder``/mlflow/mlflow.db. A run that was deleted there is
    followed by a new one."""

    def __init__(self, folder: Path, job: str) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
        self._metric, self._known = Metric, _JobRun(folder / "mlflow")
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI")
                                    or f"sqlite:///{(folder / 'mlflow' / 'mlflow.db').resolve()}")
        if self._known.id:
            try:
                if self._client.get_run(self._known.id).info.lifecycle_stage == "active":
                    self._client.update_run(self._known.id, status="RUNNING")
                    return
            except MlflowException as e:
                if e.error_code != "RESOURCE_DOES_NOT_EXIST":  # no answer says nothing of the run
                    raise
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._known.begin(self._client.create_run(experiment, run_name=job).info.run_id)

    def write(self, row: Row) -> None:
        at_ms = int(time.time() * 1000)
        metrics = [self._metric(mlflow_name(name), float(value), at_ms, row.step)
                   for name, value in self._known.values(row).items()]
        for part in batches(metrics, _MLFLOW_BATCH):
            self._client.log_batch(self._known.id, part)

    def close(self) -> None:
        self._client.set_terminated(self._known.id)


class Trackio:
    """Writes one run of Trackio for the job, however often its actor is started: to the server or Space that Trackio's
    own environment variables name, else into ``folder``/trackio. Trackio knows a run by its name, which begins with
    the job's: other clusters may have jobs of that name. It numbers the rows itself."""

    def __init__(self, folder: Path, job: str) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))  # which it reads as it is imported
        import trackio
        self._known = _JobRun(folder / "trackio")
        if not self._known.id:
            self._known.begin(f"{job}-{uuid.uuid4().hex[:8]}")
        self._run = trackio.init(os.environ.get("TRACKIO_PROJECT") or _PROJECT, name=self._known.id, group=job,
                                 resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, row: Row) -> None:
        self._run.log(self._known.values(row))

    def close(self) -> None:
        self._run.finish()


class ClearML:
    """Writes one task of ClearML for the job, however often its actor is started, to ClearML's server; without a key
    for it in ClearML's environment variables, one for each process into ``folder``/clearml/offline, for
    ``Task.import_offline_session``: it continues no task offline."""

    def __init__(self, folder: Path, job: str) -> None:
        known = folder / "clearml"
        offline = not os.environ.get("CLEARML_API_ACCESS_KEY")
        if offline:
            os.environ.setdefault("CLEARML_CACHE_DIR", str(known))
        from clearml import Task
        if offline:
            Task.set_offline(True)
        self._known = _JobRun(known)
        # Nothing but numbers: no code, packages, output, machine or arguments. An offset of 0 keeps the steps' numbers.
        self._task = Task.init(
            os.environ.get("CLEARML_PROJECT") or _PROJECT, job, output_uri=False,
            reuse_last_task_id=self._known.id if self._known.id and not offline else False,
            continue_last_task=0 if self._known.id and not offline else False,
            auto_connect_arg_parser=False, auto_connect_frameworks={"*": False, "detect_repository": False},
            auto_resource_monitoring=False, auto_connect_streams=False)
        if self._task.id != self._known.id and not (offline and self._known.id):
            self._known.begin(self._task.id)
        self._logger = self._task.get_logger()

    def write(self, row: Row) -> None:
        for name, value in self._known.values(row).items():
            self._logger.report_scalar(name, row.run, value, row.step)

    def close(self) -> None:
        self._task.close()


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
        except BaseException as e:  # third-party code, also its SystemExit: the training must not depend on it
            self._report(without_secrets_of(os.environ, f"{type(e).__name__}: {e}"[:_MAX_READ])[:_MAX_ERROR])
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
        """``names``: some of tensorboard, wandb, mlflow, clearml and trackio. Each has a folder of its name in
        ``folder``."""
        makers: dict[str, Callable[[], Tracker]] = {
            "tensorboard": lambda: TensorBoard(folder / "tensorboard"), "wandb": lambda: WandB(folder, job, wandb_mode),
            "mlflow": lambda: MLflow(folder, job), "clearml": lambda: ClearML(folder, job),
            "trackio": lambda: Trackio(folder, job)}
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
