"""Processes of the product that are forked from one which has imported their module.

Imports are most of what a short process costs: two CPU seconds for a coordinator, one and a half for a DCS node. A test
process starts one *fork server* for each module it asks for. Each process forked from it is a child of the test process
as if that had started ``python -m MODULE`` (a session, an environment and files of its own; waited for, signalled and
killed with the test process in the same way) but for the interpreter's start, which tests of ``elastic_rl.host`` and
whole runs have.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, AnyStr

from elastic_rl.runtime.files import UMASK_ENV, user_umask
from elastic_rl.runtime.process import die_with_parent, freeze_heap, start_child
from elastic_rl.telemetry.log_files import open_log
from support.waiting import PATIENCE_S

_CLONE_PARENT = 0x8000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}
_MESSAGE_BYTES = 1 << 17
_MAX_FDS = 8
_UNUSED_FD = 512
"""Descriptors from here on are none that a process is given."""


# -- in the test process -----------------------------------------------------------------------------------------------
class ForkedProcess(subprocess.Popen[AnyStr]):
    """``ForkedProcess([module, *arguments], ...)`` runs ``module.main()``. Of Popen's options it knows ``stdin``,
    ``stdout``, ``stderr``, ``env`` and ``pass_fds``; others raise TypeError."""

    def __init__(self, args: Sequence[str], *, stdin: Any = None, stdout: Any = None, stderr: Any = None,
                 env: Mapping[str, str] | None = None, text: bool | None = None, pass_fds: Sequence[int] = ()) -> None:
        super().__init__(args, stdin=stdin, stdout=stdout, stderr=stderr, env=env, text=text, pass_fds=pass_fds)

    def _execute_child(self, args: Sequence[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
                       cwd: Any, env: Mapping[str, str] | None, startupinfo: Any, creationflags: Any, shell: Any,
                       p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
                       *_: Any) -> None:
        module, *arguments = args
        request = {"arguments": arguments, "env": dict(os.environ if env is None else env), "cwd": os.getcwd(),
                   "fds": [0, 1, 2, *pass_fds]}
        given = (p2cread, c2pwrite, errwrite)
        try:
            self.pid = _server(module).fork(
                request, [*(own if fd == -1 else fd for own, fd in enumerate(given)), *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def spawn(module: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Starts the module in a child of this process, as ``host.processes.spawn(python(module, *arguments))`` does."""
    with open_log(log) as out:
        return ForkedProcess([module, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                             env={**os.environ, UMASK_ENV: f"{user_umask():03o}", **(env or {})})


class _ForkServer:
    def __init__(self, module: str) -> None:
        self._requests, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(PATIENCE_S)
        self._lock = threading.Lock()
        with far:
            self._process = start_child(
                [sys.executable, __file__, module, str(far.fileno())], pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                # It finds modules where this process does. Threads that imports start would not survive a fork, and
                # the number of those that torch computes with is read when it is imported.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1",
                     "OMP_NUM_THREADS": "1"})
        self._receive()  # what it sends once it has imported the module

    @property
    def usable(self) -> bool:
        return self._process.poll() is None

    def fork(self, request: Mapping[str, object], fds: Sequence[int]) -> int:
        """The pid of the process. Raises ChildProcessError when there is none."""
        message = json.dumps(request).encode()
        assert len(message) < _MESSAGE_BYTES, f"arguments and environment of {len(message)} bytes"
        with self._lock:
            try:
                socket.send_fds(self._requests, [message], fds)
            except BrokenPipeError:
                raise self._ended() from None
            answer = self._receive()  # what the process sends once it has its session and files
        if "error" in answer:
            os.waitpid(answer["pid"], 0)
            raise ChildProcessError(answer["error"])
        return int(answer["pid"])

    def _receive(self) -> Any:
        """The next answer. A server that gives none in time is killed: what it sends later would be taken for the
        answer to the next request, and that process for another one."""
        try:
            answer = self._requests.recv(_MESSAGE_BYTES)
        except OSError:
            self._process.kill()
            raise
        if not answer:
            raise self._ended()
        return json.loads(answer)

    def _ended(self) -> ChildProcessError:
        return ChildProcessError(f"a fork server ended with {self._process.wait(60)}")


_servers: dict[str, _ForkServer] = {}
_servers_lock = threading.Lock()


def _server(module: str) -> _ForkServer:
    """The module's server; another one where that has ended."""
    with _servers_lock:
        if module not in _servers or not _servers[module].usable:
            _servers[module] = _ForkServer(module)
        return _servers[module]


# -- the fork server ---------------------------------------------------------------------------------------------------
def main() -> None:
    module_name, requests_fd = sys.argv[1:]
    del sys.path[0]  # the folder of this file, which python puts there
    before = dict(os.environ)
    module = importlib.import_module(module_name)
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert os.listdir("/proc/self/task") == [str(os.getpid())], f"imports of {module_name} start threads"
    freeze_heap()
    with socket.socket(fileno=_moved_out_of_the_way(int(requests_fd))) as requests:
        requests.send(b"{}")
        while True:
            message, fds, *_ = socket.recv_fds(requests, _MESSAGE_BYTES, _MAX_FDS)
            if not message:
                return
            if _fork_sibling() == 0:
                break
            for fd in fds:
                os.close(fd)
        request = json.loads(message)
        request["env"] = {**set_by_imports, **request["env"]}
        try:
            _become(request, fds)
        except BaseException:  # whatever it is, the caller waits for an answer
            requests.send(json.dumps({"pid": os.getpid(), "error": traceback.format_exc()}).encode())
            os._exit(1)
        requests.send(json.dumps({"pid": os.getpid()}).encode())
    sys.argv = [str(module.__file__), *request["arguments"]]
    sys.exit(module.main())


def _moved_out_of_the_way(fd: int) -> int:
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _UNUSED_FD)
    os.close(fd)
    return moved


def _fork_sibling() -> int:
    """Forks as ``os.fork`` does, but the new process is a child of this process's parent, which can wait for it."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = ctypes.PyDLL(None).syscall(_SYS_CLONE[platform.machine()], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    assert pid >= 0, "no process could be forked"
    return int(pid)


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Gives a forked process what the request says, and what ``start_child`` gives a child."""
    die_with_parent()
    os.setsid()
    for number, fd in zip(request["fds"], [_moved_out_of_the_way(fd) for fd in fds], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if failpoints := sys.modules.get("elastic_rl.runtime.failpoints"):
        importlib.reload(failpoints)  # it reads the environment when it is imported


if __name__ == "__main__":
    main()
