"""The abort switch of a run: who asks for it, what of its own makes a run abort itself, and what is undone then."""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.errors import ConfigError, DeadlineExceeded, ElasticRLError
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.etcd.records import Severity
from elastic_rl.faults.undo import FILE, Undone, UndoRegistry, shown, undo_all
from elastic_rl.host import file_lock
from elastic_rl.runtime.files import os_error_text, require_own_folder
from elastic_rl.runtime.waiting import wait_until

log = logging.getLogger(__name__)

ABORT_FILE, LOCK_FILE = "abort", "runner.lock"
STRIKES_FILE = "chaos.lock"
"""In the folder of a cluster: locked by the run that strikes it, where that is not its own."""
_ANOTHER = "name another folder with --out"
TRIES = "try-*"
"""Folders of the runs of ``chaos shrink``, in its own."""
_REACTS_S = 60.0
"""Time for a run that is told to end to undo what it did."""
_AFTERWARDS_S = 60.0
"""An alert that begins so soon after the recovery from a fault is of that fault."""
_BY_FILE = f"the file {ABORT_FILE} is in the folder of the run"
"""The reason of a switch that ``chaos abort`` has used."""


class AbortSwitch:
    """The switch that ends a run early, for a reason of this process or by ``chaos abort``. The first reason counts."""

    def __init__(self, folder: Path) -> None:
        self._file, self._requested, self._lock = folder / ABORT_FILE, threading.Event(), threading.Lock()
        self._why = ""

    def request(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
        self._requested.set()

    @property
    def why(self) -> str:
        """Why the run is to end early; "" as long as it is not. The file is gone once the run has seen it, for whoever
        has made it."""
        if self._file.exists():
            self.request(_BY_FILE)
            with suppress(OSError):  # a folder of that name says the same
                self._file.unlink(missing_ok=True)
        return self._why

    def wait(self, timeout_s: float) -> None:
        """Returns once the run is to end early, or after so long."""
        self._requested.wait(timeout_s)


def by_operator(why: str) -> bool:
    """Whether somebody has ended a run, by a signal or by the file, and the run not itself. ``why``: of its switch."""
    return why == _BY_FILE or why in signal.Signals.__members__


@contextmanager
def running(folder: Path) -> Iterator[AbortSwitch]:
    """Makes this process the one that runs in a folder within the block, which is made unless it is there; at its end,
    whatever it is, what faults have left is undone. Raises ConfigError where another one does, or for a folder that
    others may enter, and PreflightFailed for a folder of another user, or a link."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    except OSError as e:
        raise ConfigError(f"{folder} cannot be made: {os_error_text(e)}", hint=_ANOTHER) from e
    require_private(folder)
    with _opened(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT) as lock:
        if not file_lock.taken(lock):
            raise ConfigError(f"another process runs in {folder}", hint=_ANOTHER)
        try:
            (folder / ABORT_FILE).unlink(missing_ok=True)
        except OSError as e:
            raise ConfigError(f"{folder / ABORT_FILE} cannot be removed: {e.strerror}", hint="remove it") from e
        try:
            yield AbortSwitch(folder)
        finally:
            for line in undo_all(folder).failed:
                log.warning("not undone: %s", line)


def require_private(folder: Path) -> None:
    """Raises ConfigError for a folder that others may enter, and PreflightFailed for one of another user, or a link."""
    require_own_folder(folder, hint=_ANOTHER)
    if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
        raise ConfigError(f"others may enter {folder} (mode {mode:o}), and read what the run writes there",
                          hint="chmod 700 it, or name a new folder with --out")


@contextmanager
def alone(cluster: Path) -> Iterator[None]:
    """Within the block no other run strikes the cluster of this folder: each of two would leave one replica of a part
    alive, and both none. Raises ConfigError where one does."""
    with _opened(cluster / STRIKES_FILE, os.O_RDWR | os.O_CREAT, hint="run as the user of the cluster, and remove it "
                 "where another user has made it") as lock:
        if not file_lock.taken(lock):
            raise ConfigError("another chaos run strikes this cluster", hint=(
                "wait for its end, or end it with `elastic-rl chaos abort` and the folder that it has said"))
        yield


def _opened(path: Path, flags: int, hint: str = "name another folder") -> IO[bytes]:
    """An open file of a folder of results, private where it is made. Others may have put a link or a FIFO there, which
    is neither followed nor waited for. Raises ConfigError, and FileNotFoundError."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise ConfigError(f"{path} cannot be opened: {e.strerror}", hint=hint) from e
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"{path} is no regular file", hint=hint)
    if flags & os.O_ACCMODE == os.O_RDONLY:
        return os.fdopen(descriptor, "rb", buffering=0)
    return os.fdopen(descriptor, "r+b", buffering=0)


def is_running(folder: Path) -> bool:
    """Raises ConfigError for a lock that is no file."""
    try:
        with _opened(folder / LOCK_FILE, os.O_RDONLY) as lock:
            return not file_lock.taken(lock, shared=True)
    except FileNotFoundError:
        return False


def abort(folder: Path) -> Undone | None:
    """Has the run in a folder end, and returns None once its process has seen that and has undone what faults have
    stopped; it may take long to see it only while its cluster starts, before any fault. Where the process is gone, this
    undoes what its faults have left, and returns what it did. Raises ConfigError for a folder without a run, and
    DeadlineExceeded for one whose process does not react."""
    if not (folder / LOCK_FILE).exists():
        running = [str(lock.parent) for name in ("*", TRIES) for lock in folder.glob(f"{name}/{LOCK_FILE}")
                   if is_running(lock.parent)]
        raise ConfigError(f"no chaos run was in {folder}", hint=(
            f"name {running[0]}, where one runs" if running else
            "name the folder that `elastic-rl chaos run` has said"))
    if is_running(folder):
        file, registry = folder / ABORT_FILE, UndoRegistry(folder)
        _opened(file, os.O_WRONLY | os.O_CREAT).close()
        try:
            wait_until(lambda: not (file.exists() or registry.pending()) or not is_running(folder), timeout_s=_REACTS_S,
                       what="the undo of what the run has done", poll_s=0.2)
        except DeadlineExceeded as e:
            if registry.pending():
                raise DeadlineExceeded(
                    f"the process of the run in {folder} has not undone what its faults did in {_REACTS_S:g} s: it is "
                    "stopped, or hangs",
                    hint="kill -9 that `chaos run`, and say `chaos abort` again, which undoes it then") from e
        if not registry.pending():
            return None
    return undo_all(folder)


def undo_of_killed_runs(results: Path) -> dict[str, Undone]:
    """Undoes what those of this user's runs whose folders are in ``results`` have left whose process was killed; what
    was done, by run."""
    found = {str(folder): undo_all(folder) for folder in _killed_runs(results)}
    return {folder: undone for folder, undone in found.items() if undone.done or undone.failed}


def left_by_killed_runs(results: Path) -> dict[str, list[str]]:
    """What ``undo_of_killed_runs`` is going to undo, by run, for people."""
    found = dict[str, list[str]]()
    for folder in _killed_runs(results):
        with suppress(OSError):  # it is said when it is undone
            if left := [shown(entry) for entry in reversed(UndoRegistry(folder).pending())]:
                found[str(folder)] = left
    return found


def _killed_runs(results: Path) -> Iterator[Path]:
    """Folders of this user's runs that go on no more and have noted what undoes their faults."""
    for file in sorted((*results.glob(f"*/{FILE}"), *results.glob(f"*/{TRIES}/{FILE}"))):
        try:
            require_own_folder(file.parent, hint="")
            if is_running(file.parent):
                continue
        except (ElasticRLError, OSError):
            continue  # another one's, or no run
        yield file.parent


def reason(phase: JobPhase | None, alerts: Sequence[tuple[Alert, float]], over: Sequence[Mapping[str, Any]],
           under_way: Collection[float]) -> str:
    """Why a run against a cluster that others use is to be aborted; "" for no reason. ``phase``: of the job; None: it
    is not known. ``alerts``: each with when the run saw it first: the clock of its leader may be wrong. ``over``:
    records of the faults that are over or were given up. ``under_way``: when each of the others has begun. Pure."""
    if phase is not None and phase is not JobPhase.RUNNING:
        return f"the job is {phase.value}"
    for fault in over:
        if fault["witness"] and fault["healed_at"] is None:
            return f"the job has not recovered from {fault['name']}: {fault['problem']}"
    for alert, seen_at in alerts:
        if alert.phase is Phase.FIRING and alert.severity is Severity.ERROR and not _of_a_fault(
                seen_at, over, under_way):
            return f"the alert {alert.kind} of {alert.subject} is of none of the faults: {alert.message}"
    return ""


def _of_a_fault(seen_at: float, over: Sequence[Mapping[str, Any]], under_way: Collection[float]) -> bool:
    """Whether an alert was seen first while a fault was under way, or soon after it."""
    return any(seen_at >= began for began in under_way) or any(
        fault["injected_at"] <= seen_at <= (fault["healed_at"] or fault["injected_at"]) + _AFTERWARDS_S
        for fault in over)
