"""The sandbox of workers that check what a model writes: packages that do so may run it, as Python."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import elastic_rl
from elastic_rl.errors import ConfigError
from elastic_rl.rewards.sandbox import NOBODY, find_bubblewrap, isolated, memory_file, system_mounts
from elastic_rl.rewards.syscall_filter import syscall_filter
from elastic_rl.runtime.process import start_child

_TEMPORARY_MB = 64
_TEST_S = 60.0


class WorkerSandbox:
    """Starts this interpreter with this project and one more package, for as long as its owner wants: without a
    network, a process besides, an environment, or a file of the machine but ``/usr`` and the packages, read-only."""

    def __init__(self, package: str) -> None:
        """``package``: what the workers import, by its module. Raises ConfigError where they cannot run."""
        spec = importlib.util.find_spec(package)
        folders = [Path(sys.prefix), Path(elastic_rl.__file__).parent]
        if spec is not None and spec.origin is not None:
            folders.append(Path(spec.origin).parents[1])
        self._mounts = system_mounts(sys.executable) + [
            part for folder in folders if not folder.is_relative_to("/usr")
            for part in ("--ro-bind", str(folder), str(folder))]
        self._program = find_bubblewrap()
        fault = "bubblewrap (bwrap) is not on PATH"
        # What belongs to root only, such as an interpreter in its home, can be read by a sandbox that root starts.
        for user in ([NOBODY, {}] if os.geteuid() == 0 else [{}]) if self._program else []:
            self._user = user
            fault = self._fault(package)
            if not fault:
                return
        raise ConfigError(f"no sandbox can run {package}, whose checks may run what the model writes: {fault}",
                          hint="apt-get install bubblewrap, which needs user namespaces; or set unsandboxed: true in "
                               "the options of the reward, and what the model writes has the rights of the run")

    def start(self, arguments: Sequence[str], *descriptors: int, stderr: int = subprocess.DEVNULL
              ) -> subprocess.Popen[bytes]:
        """Starts the interpreter with these arguments; it inherits the descriptors. What is killed is the sandbox, and
        all that runs in it ends with that. Raises OSError."""
        with contextlib.ExitStack() as opened:
            rules = memory_file(opened, syscall_filter(processes=False))
            return start_child([
                *isolated(self._program, rules), "--setenv", "PYTHONPATH", os.pathsep.join(filter(None, sys.path)),
                "--perms", "1777", "--size", str(_TEMPORARY_MB << 20), "--tmpfs", "/tmp", *self._mounts,
                "--dev", "/dev", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--",
                sys.executable, "-s", "-B", *arguments], pass_fds=(rules, *descriptors), env={}, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, **self._user)

    def _fault(self, package: str) -> str:
        """Why the package is not found in it, by the last line of what it says; "" when it is."""
        try:
            process = self.start(["-P", "-c", "import importlib.util, sys, elastic_rl.plugins.worker\n"
                                  f"sys.exit(not importlib.util.find_spec({package!r}))"], stderr=subprocess.PIPE)
        except OSError as e:
            return str(e)
        try:
            said = process.communicate(timeout=_TEST_S)[1].decode("utf-8", "replace").splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"it took longer than {_TEST_S:g} s"
        return "" if process.returncode == 0 else (said or [f"it ended with {process.returncode}"])[-1]
