"""Stacks of the Python threads of processes on this host, as py-spy reads them from outside.

A process is neither stopped nor asked for anything (``--nonblocking``), so one that hangs can be read, and one that
works goes on; of a process that runs its stack may then be mixed of two moments. py-spy must be allowed to read the
memory of other processes of this user (``ptrace``): root, or a kernel that allows it.

Names of functions, files and lines are read, and no values. Of a command line only what names the program is kept: the
rest may have secrets.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil

from elastic_rl.config import JOB_NAME, Config
from elastic_rl.errors import ConfigError, PreflightFailed
from elastic_rl.etcd import process_state
from elastic_rl.etcd.cluster_records import job_of_driver
from elastic_rl.etcd.process_state import ProcessState
from elastic_rl.etcd.record import Record
from elastic_rl.host import processes
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.service_files import ServiceFiles, job_of_service
from elastic_rl.runtime.abandonable import AbandonableCalls
from elastic_rl.runtime.files import delete_oldest, replace_file

log = logging.getLogger(__name__)

MAX_PROCESSES = 512
"""So many processes of a job are looked at on a host."""
MAX_TEXT = 32 << 10
"""Longest text of one process, in characters."""
PROCESS_S = 5.0
"""Longest time for the stacks of one process; most take 0.2 s."""
ALL_S = 30.0
"""Once the stacks of a host have taken so long, no further process is begun."""
HANG_S = 4.0
"""Longest time for the stacks of what hangs, which is ended after that; processes not begun by then are left out."""
_HANG_LIMIT_S = HANG_S + 2.0
"""Longest time until the file of what hangs is written. It is ended then."""
MAX_FILES = 20
"""So many of the files that are written when something hangs are kept; the oldest are deleted."""
_AT_ONCE = 4
_MAX_FRAMES, _MAX_THREADS = 100, 200
_NAME_CHARS, _ERROR_CHARS = 100, 200
_DENIED = ("permission denied", "operation not permitted")

NOT_PERMITTED = "py-spy may not read the process (ptrace)"
HOW_TO_PERMIT = ("run the cluster and this command as root, or allow ptrace: `sysctl kernel.yama.ptrace_scope=0` on "
                 "the host; in a container the capability SYS_PTRACE (docker run --cap-add=SYS_PTRACE; Kubernetes: "
                 "securityContext.capabilities.add)")
_NOT_PYTHON = "no Python process: it has no stacks that py-spy can read"


class ProcessStacks(Record):
    """The stacks of one process, or why there are none."""

    pid: int
    name: str
    """What the process is in the cluster, such as ``trainer/0`` or ``coordinator-0``; empty where that is not known."""
    program: str
    """The program that it runs, without its arguments."""
    text: str = ""
    error: str = ""

    @property
    def is_denied(self) -> bool:
        """Whether py-spy was not permitted to read it."""
        return self.error == NOT_PERMITTED


# -- which processes ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Named:
    """A process and what it is called."""

    pid: int
    name: str = ""


def of_job(cfg: Config, job: str) -> list[Named]:
    """The processes of a job on this host, with those that the host runs for its cluster, by name. ``cfg``: the
    cluster, as it is on this host. What nothing names is a process of the compute plane, such as Ray's. Raises
    ConfigError."""
    if not re.fullmatch(JOB_NAME, job):
        raise ConfigError(f"{job!r} is no name of a job", hint="`elastic-rl jobs` lists them")
    cluster, paths = ClusterPaths.of(cfg), JobPaths.of(cfg.model_copy(update={"job": job}))
    agents = {record.pid: record.name for record in ServiceFiles(cluster.agents).running()}
    names = dict[int, str]()
    for folder in (cluster.services, paths.compute_services):
        names |= {record.pid: record.name for record in ServiceFiles(folder).running()
                  if job_of_service(record.name) in ("", job)}
    names |= {record.pid: service for record in ServiceFiles(cluster.singletons).running()
              if job_of_driver(service := unquote(record.name)) == job}
    with contextlib.suppress(OSError):
        names |= {file.pid: f"{file.beat.role}/{file.beat.id}"
                  for file in heartbeats_here(cfg.model_copy(update={"job": job})).contents().files
                  if process_state.look_at(file.pid, file.started).state is not ProcessState.GONE}
    roots = {*names, *(process.pid for process in processes.marked(str(paths.private.resolve())))} - {0}
    names |= agents  # without what descends from them, which are the parts of all jobs
    found = [Named(pid, names.get(pid, "")) for pid in _with_descendants(roots) | (agents.keys() - {0})]
    return sorted(found, key=lambda process: (not process.name, process.name, process.pid))


def tree(pids: Iterable[int], name: str) -> list[Named]:
    """Some processes of a part and all that descend from them."""
    return [Named(pid, name) for pid in sorted(_with_descendants(pids))]


def _with_descendants(pids: Iterable[int]) -> set[int]:
    """Also those whose environment cannot be read, since they have set their title."""
    found, mine = set(pids), set[int]()
    for pid in list(found):
        with contextlib.suppress(psutil.Error):
            found.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    for pid in found:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and process.name() != _PY_SPY:
                mine.add(pid)
    return mine


def program_of(command: Sequence[str]) -> str:
    """What of a command line names the program: the first word without its folder and, for ``python -m``, the module.
    Everything else may have secrets, and is left out. Pure."""
    words = [*command]
    if not words or not words[0].strip():
        return "unknown"
    first = words[0].split()[0]  # one that has set its title has the whole of it here
    name = first.rpartition("/")[2] or first
    if name.startswith("python"):
        for option, module in zip(words[1:], words[2:], strict=False):
            if option == "-m" and module.replace(".", "").replace("_", "").isalnum():
                return f"{name} -m {module}"[:_NAME_CHARS]
            if not option.startswith("-") or option == "-c":
                break
    return name[:_NAME_CHARS]


# -- their stacks ------------------------------------------------------------------------------------------------------
_PY_SPY = "py-spy"


def read_all(found: Sequence[Named], *, limit_s: float = ALL_S) -> list[ProcessStacks]:
    """The stacks of processes, in their order, within about ``limit_s`` + ``PROCESS_S`` seconds; of those that have
    ended meanwhile there are none. One entry stands for all beyond ``MAX_PROCESSES``. Raises PreflightFailed where
    py-spy is not installed."""
    program, end = _py_spy(), time.monotonic() + limit_s

    def read(process: Named) -> ProcessStacks | None:
        left_s = end - time.monotonic()
        return _read(program, process, min(left_s, PROCESS_S) if left_s > 0 else 0.0)

    left = len(found) - MAX_PROCESSES
    more = [ProcessStacks(pid=0, name="", program="further processes", error=f"{left} are not read")] * (left > 0)
    with ThreadPoolExecutor(_AT_ONCE, "stacks") as pool:
        return [*(stacks for stacks in pool.map(read, found[:MAX_PROCESSES]) if stacks is not None), *more]


def _py_spy() -> str:
    beside = Path(sys.executable).with_name(_PY_SPY)
    program = str(beside) if beside.exists() else shutil.which(_PY_SPY)
    if program is None:
        raise PreflightFailed("py-spy is not installed", hint="pip install py-spy, in the environment of elastic-rl")
    return program


def _read(program: str, named: Named, limit_s: float) -> ProcessStacks | None:
    """None for a process that has ended."""
    try:
        process = psutil.Process(named.pid)
        command, is_python = process.cmdline(), "python" in Path(process.exe()).name
    except psutil.AccessDenied:
        return ProcessStacks(pid=named.pid, name=named.name, program="unknown", error=NOT_PERMITTED)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return None
    stacks = ProcessStacks(pid=named.pid, name=named.name, program=program_of(command))
    if not is_python:
        return stacks.replace(error=_NOT_PYTHON)
    if limit_s <= 0:
        return stacks.replace(error="not read: other processes took too long")
    try:
        done = subprocess.run([program, "dump", "--nonblocking", "--json", "--pid", str(named.pid)],
                              capture_output=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return stacks.replace(error=f"py-spy did not end within {limit_s:.1f} s")
    except OSError as e:
        return stacks.replace(error=f"py-spy cannot be run: {e.strerror}")
    if done.returncode == 0:
        try:
            return stacks.replace(text=text_of(json.loads(done.stdout)))
        except (ValueError, TypeError, KeyError, AttributeError):
            return stacks.replace(error="py-spy has written what is no JSON of stacks")
    if not process.is_running():
        return None
    return stacks.replace(error=error_of(done.stderr.decode(errors="replace"), done.returncode))


def error_of(said: str, code: int) -> str:
    """Why there are no stacks. ``said``: what py-spy has written to stderr, before its exit with ``code``. Pure."""
    if any(words in said.lower() for words in _DENIED):
        return NOT_PERMITTED
    return f"py-spy: {said.strip().partition(chr(10))[0][:_ERROR_CHARS] or f'exit code {code}'}"


def text_of(threads: list[dict[str, Any]]) -> str:
    """The text of py-spy's JSON: each thread with its frames, the innermost first. At most ``MAX_TEXT`` characters.
    Pure. Raises what follows from another form."""
    lines = list[str]()
    for thread in threads[:_MAX_THREADS]:
        state = ("active" if thread["active"] else "idle") + (", has the GIL" if thread["owns_gil"] else "")
        number = thread["os_thread_id"] or thread["thread_id"]
        lines.append(f"thread {number} ({state}){f': {name}' if (name := thread['thread_name']) else ''}")
        frames = thread["frames"]
        lines += [f"    {frame['name']} ({frame['short_filename'] or frame['filename']}:{frame['line']})"
                  for frame in frames[:_MAX_FRAMES]]
        if len(frames) > _MAX_FRAMES:
            lines.append(f"    … and {len(frames) - _MAX_FRAMES} more frames")
    if len(threads) > _MAX_THREADS:
        lines.append(f"… and {len(threads) - _MAX_THREADS} more threads")
    text = "\n".join(lines)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT - 2] + "\n…"


def shown(stacks: ProcessStacks, host: str = "") -> str:
    """A process for a person. ``host``: where it is, if that is to be said."""
    at = f" on {host}" if host else ""
    head = f"== {stacks.name or stacks.program} (pid {stacks.pid}{at}{f', {stacks.program}' if stacks.name else ''})"
    return f"{head}\n{stacks.text or stacks.error}\n"


# -- when something hangs ----------------------------------------------------------------------------------------------
def write_of_hang(folder: Path, part: str, pids: Iterable[int], why: str) -> Path | None:
    """Writes the stacks of what hangs, with all that descends from it, to a file in the folder and returns it, within
    a few seconds; None where that could not be done: what hangs is to be ended in any case. Call it before it is ended.
    """
    try:
        return _HANG_CALLS.begin(lambda: _write_of_hang(folder, part, pids, why)).result(
            every_s=_HANG_LIMIT_S, limit_s=_HANG_LIMIT_S)
    except Exception as e:  # whatever it is, the caller has to end what hangs
        log.warning("the stacks of %s, which hangs, are not written: %s", part, e)
        return None


_HANG_CALLS = AbandonableCalls("stacks-of-hang", 4)
"""Reads of /proc and py-spy itself wait without a limit for a process that waits for a device."""


def _write_of_hang(folder: Path, part: str, pids: Iterable[int], why: str) -> Path:
    found = read_all(tree(pids, part), limit_s=HANG_S)
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in part)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    path = folder / f"{stamp}.{int(now * 1000) % 1000:03d}-{name}.txt"
    head = f"{why}\n{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(now))} UTC\n"
    denied = f"{HOW_TO_PERMIT}\n" if any(stacks.is_denied for stacks in found) else ""
    replace_file(path, "\n".join([head + denied, *map(shown, found)]).encode(errors="replace"), private=True)
    delete_oldest(folder, "*.txt", MAX_FILES)
    return path
