"""Runs programs that nobody has read, with bubblewrap: in namespaces of their own, with an empty environment, nothing
of the machine but ``/usr``, read-only, and limits on time, memory, processes and output."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.rewards.syscall_filter import syscall_filter
from elastic_rl.runtime.files import count_temporary_files
from elastic_rl.runtime.process import start_child

FOLDER = "/sandbox"
"""The folder of a run's files, read-only."""
_NOBODY = 65534
NOBODY: dict[str, Any] = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
"""Arguments of ``Popen``: the user that a sandbox of root is started as."""
_POLL_S = 0.05
_START_S = 10.0
"""Time for namespaces and mounts, besides the program's own time."""
_TEST_S = 60.0
_PIECE = 1 << 16
_SOCKET_BYTES = 208 << 10
"""What a socket keeps of what was sent over it, at most, by the system's usual settings (``net.core.wmem_default``)."""
_FILE_BYTES = 1 << 10
"""What the kernel holds for a file of a tmpfs, empty or not: inode and name."""
_LIMITS = """
import os, resource as r, sys
cpu, memory, files, processes, begun = map(int, sys.argv[1:6])
r.setrlimit(r.RLIMIT_CPU, (cpu, cpu + 1)); r.setrlimit(r.RLIMIT_AS, (memory, memory))
r.setrlimit(r.RLIMIT_FSIZE, (files, files)); r.setrlimit(r.RLIMIT_NPROC, (processes, processes))
r.setrlimit(r.RLIMIT_CORE, (0, 0)); r.setrlimit(r.RLIMIT_NOFILE, (64, 64))
os.write(begun, b"b"); os.close(begun)
os.execv(sys.argv[6], sys.argv[6:])
"""
"""Runs inside, and says when the program is begun: what ends before is the sandbox. The kernel counts processes by user
and user namespace, so a limit set outside would count all that the user has there."""


@dataclass(frozen=True)
class Limits:
    """The limits of one run."""

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_mb: int = 512
    """Address space of each process; and resident memory of all together, with what the kernel holds for their sockets
    and for the files in ``/tmp`` beside the content; in MiB."""
    processes: int = 16
    """Processes and threads at once."""
    file_mb: int = 16
    """Size of ``/tmp``, and of each file there, in MiB."""
    output_bytes: int = 65_536
    """Most bytes of standard output; what is written after that ends the run. Standard error goes nowhere."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``ended``: "" by itself, else the limit that ended it: ``time``, ``memory`` or ``output``."""

    output: bytes
    returncode: int
    ended: str = ""


class Sandbox:
    """Starts runs. Safe to share between threads."""

    def __init__(self, *, program: str = "", python: str = "", limits: Limits | None = None) -> None:
        """``program``: bubblewrap's path; else it is looked for. ``python``: the interpreter of the programs; else this
        one where the sandbox can see it, else the system's. ``limits``: those of the runs to come. Raises
        ConfigError where no program can be run within them."""
        self._program = program or find_bubblewrap()
        if not self._program:
            raise ConfigError("a sandbox needs bubblewrap (bwrap), which is not on PATH",
                              hint="apt-get install bubblewrap, or dnf install bubblewrap")
        candidates = [python] if python else [os.path.realpath(sys.executable), "/usr/bin/python3"]
        faults = []
        for candidate in candidates:
            self._python, self._mounts = candidate, system_mounts(candidate)
            fault = self._fault(limits or Limits())
            if not fault:
                return
            faults.append(f"{candidate}: {fault}")
        raise ConfigError(f"the sandbox {self._program} cannot run Python: {'; '.join(faults)}",
                          hint="it needs user namespaces (in a container: --security-opt seccomp=unconfined, or a "
                               "seccomp profile that allows them), an interpreter outside of home folders, and limits "
                               "within which that starts")

    def run(self, files: Mapping[str, bytes], main: str, stdin: bytes, limits: Limits) -> Outcome:
        """Runs the Python program ``main``, one of ``files``, which are in ``FOLDER``. Everything that it started has
        ended when this returns. Raises PluginFailed when the sandbox ends before it has begun the program."""
        with contextlib.ExitStack() as opened:
            begun, begins = os.pipe()
            opened.callback(os.close, begun)
            ends_here = opened.enter_context(contextlib.ExitStack())
            ends_here.callback(os.close, begins)
            contents = {name: memory_file(opened, body) for name, body in files.items()}
            given, rules = memory_file(opened, stdin), memory_file(opened, syscall_filter())
            binds = [part for name, fd in contents.items()
                     for part in ("--perms", "0444", "--ro-bind-data", str(fd), f"{FOLDER}/{name}")]
            size = limits.file_mb << 20
            command = [
                *isolated(self._program, rules), *self._mounts, "--proc", "/proc", "--dev", "/dev",
                "--perms", "0755", "--dir", FOLDER, *binds, "--perms", "1777", "--size", str(size), "--tmpfs", "/tmp",
                "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--",
                self._python, "-I", "-S", "-c", _LIMITS, str(limits.cpu_s), str(limits.memory_mb << 20), str(size),
                str(limits.processes), str(begins), self._python, "-s", "-B", f"{FOLDER}/{main}"]
            # As root it would keep root's right to start any number of processes.
            user = NOBODY if os.geteuid() == 0 else {}
            try:
                process = start_child(command, pass_fds=(*contents.values(), rules, begins), stdin=given,
                                      stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={}, cwd="/", **user)
            except OSError as e:
                raise PluginFailed(f"the sandbox {self._program} cannot be started: {e}") from e
            ends_here.close()
            outcome = _supervise(process, limits, begun)
            if outcome is None:
                raise PluginFailed(f"the sandbox {self._program} ended before it began the program "
                                   f"(exit status {process.returncode})")
            return outcome

    def _fault(self, limits: Limits) -> str:
        """Why no program runs within the limits, but for that of time; "" when one does."""
        if not os.access(self._python, os.X_OK):
            return "there is no such program"
        try:
            outcome = self.run({"main.py": b"print('ready')"}, "main.py", b"", replace(limits, wall_s=_TEST_S))
        except PluginFailed as e:
            return str(e)
        return "" if outcome.output == b"ready\n" else f"it ended with {outcome.returncode} {outcome.ended}".strip()


def find_bubblewrap() -> str:
    """Path of bubblewrap: on PATH, or unpacked beside this environment; "" where it is missing."""
    beside = Path(sys.prefix) / "bubblewrap" / "usr" / "bin" / "bwrap"
    return shutil.which("bwrap") or (str(beside) if os.access(beside, os.X_OK) else "")


def isolated(program: str, rules: int) -> list[str]:
    """bubblewrap's command up to the mounts: namespaces of its own, no rights, an empty environment, and the filter of
    system calls in the descriptor ``rules``."""
    return [program, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
            "--unshare-cgroup-try", "--disable-userns", "--die-with-parent", "--new-session", "--clearenv",
            "--cap-drop", "ALL", "--seccomp", str(rules), "--uid", str(_NOBODY), "--gid", str(_NOBODY),
            "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8",
            "--setenv", "PYTHONHASHSEED", "0", "--setenv", "OPENBLAS_NUM_THREADS", "1"]


def system_mounts(python: str) -> list[str]:
    """What programs see of the machine: the system's programs and libraries, and the interpreter's own. Neither /etc
    nor a home folder."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(path):
            mounts += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            mounts += ["--ro-bind", path, path]
    mounts += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    prefix = Path(python).resolve().parents[1]
    if not prefix.is_relative_to("/usr") and prefix != Path("/"):
        mounts += ["--ro-bind", str(prefix), str(prefix)]
    return mounts


def memory_file(opened: contextlib.ExitStack, body: bytes) -> int:
    """A descriptor of a file in memory with this content, at its beginning."""
    fd = os.memfd_create("sandbox")
    opened.callback(os.close, fd)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(body)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _supervise(process: subprocess.Popen[bytes], limits: Limits, begun: int) -> Outcome | None:
    """Reads the output and enforces what the kernel does not. The sandbox's first process is the init of its pid
    namespace: when that ends, or bubblewrap is killed, the kernel kills all others in it. ``begun``: descriptor of a
    pipe that has a byte once the program is begun; None if it never was."""
    assert process.stdout is not None
    output, ended = bytearray(), ""
    end = time.monotonic() + limits.wall_s + _START_S
    started = False
    look_at = 0.0
    with process.stdout as pipe, selectors.DefaultSelector() as ready:
        os.set_blocking(pipe.fileno(), False)
        ready.register(pipe, selectors.EVENT_READ)
        reading = True
        while not ended and (reading or process.poll() is None):
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _POLL_S
                if not started and _has_byte(begun):
                    started, end = True, now + limits.wall_s
                if held_memory(process.pid, started) > limits.memory_mb << 20:
                    ended = "memory"
                    break
            if now >= end:
                ended = "time"
                break
            if not reading:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S / 5)
                continue
            gone = process.poll() is not None  # asked before the wait, which so finds all that was written by then
            if ready.select(_POLL_S):
                piece = pipe.read(_PIECE)
                if piece == b"":
                    ready.unregister(pipe)
                    reading = False
                elif piece:
                    output += piece
                    if len(output) > limits.output_bytes:
                        ended = "output"
            elif gone:
                reading = False  # what it started holds the pipe, and is being killed with its namespace
    if process.returncode is None:
        _kill(process)
    if not started and not _has_byte(begun):
        return None
    return Outcome(bytes(output[:limits.output_bytes]), process.returncode or 0, ended)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends bubblewrap, and with it by --die-with-parent the init of its namespace, and so everything in that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        children = psutil.Process(process.pid).children() if psutil.pid_exists(process.pid) else []
        for child in children:  # the init first: its end is the end of all others, and is waited for below
            with contextlib.suppress(psutil.Error, OSError):
                child.kill()
        os.killpg(process.pid, signal.SIGKILL)
        psutil.wait_procs(children, timeout=_START_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_START_S)


def _has_byte(pipe: int) -> bool:
    """Takes it. Does not wait for one, nor for its writers to end."""
    poll = select.poll()  # ``select.select`` takes no descriptor from 1024 on, of which an actor has many
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(0)) and os.read(pipe, 1) != b""


def held_memory(pid: int, started: bool) -> int:
    """Bytes that the processes below this one hold: resident ones, and those of the kernel for their sockets and files;
    0 when it is gone. ``started``: whether the program is begun, and so sees the sandbox's own ``/tmp``."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return 0
    total, sockets, files = 0, set[str](), 0
    for child in children:
        with contextlib.suppress(psutil.Error, OSError):
            total += child.memory_info().rss
        sockets |= _sockets(child.pid)
        files = max(files, count_temporary_files(child.pid) if started else 0)
    return total + len(sockets) * _SOCKET_BYTES + files * _FILE_BYTES


def _sockets(pid: int) -> set[str]:
    """The sockets that a process has open; empty when it is gone."""
    found = set[str]()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if (link := os.readlink(f"/proc/{pid}/fd/{fd}")).startswith("socket:"):
                    found.add(link)
    return found
