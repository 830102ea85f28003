"""What a process does for itself and its children: it ends with its parent, starts children, freezes its heap."""

from __future__ import annotations

import ctypes
import gc
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from elastic_rl.runtime.files import PRIVATE_UMASK

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
RAY_PRIORITY = {"RAY_worker_niceness": "0"}
"""Environment of what starts Ray, whose workers have a lower priority by default, and so would all below them: ranks,
whose collectives wait for the slowest one, and actors, which beside busy processes would get no time to import."""
SOME_CPU = 0.01
"""CPUs of an actor of Ray that needs none: what asks for none Ray may put beside its head, with which it would be lost.
"""
_forker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forker")
"""PR_SET_PDEATHSIG fires when the *thread* that forked ends, so every child is forked by this one."""
_libc = ctypes.CDLL(None, use_errno=True)  # resolved at import: nothing may be imported between fork and exec


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Has the kernel signal this process when the thread that forked it ends. Call it first thing in a child."""
    _libc.prctl(_PR_SET_PDEATHSIG, sig)


def adopt_orphans() -> None:
    """Makes this process the parent of each descendant whose own parent has ended. It has to reap them."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def start_process(cmd: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, with ``files.PRIVATE_UMASK``, which all that it starts inherits. Every
    process of the project is started here. ``popen``: further arguments of ``subprocess.Popen``. Raises OSError when
    the program cannot be started."""
    return subprocess.Popen(list(cmd), start_new_session=True, umask=PRIVATE_UMASK, **popen)


def start_child(cmd: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
    """Starts a process that the kernel kills when this one ends, also after kill -9. Otherwise as ``start_process``."""
    return _forker.submit(lambda: start_process(cmd, preexec_fn=die_with_parent, **popen)).result()


def freeze_heap() -> None:
    """Excludes what this process has loaded from garbage collection; call once a long-lived process is set up. A full
    collection otherwise stops a process that has imported torch for 100 ms."""
    gc.collect()
    gc.freeze()


def collect_garbage_rarely() -> None:
    """Makes collections of garbage, and full ones above all, rarer. For a process that holds, and replaces, hundreds of
    thousands of objects that have no cycles: Python would stop it every few seconds for a quarter of a second, in which
    nobody is answered. Cyclic garbage stays until 40 million further objects have been made."""
    gc.set_threshold(20_000, 20, 100)


def runs(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not, nor another process that has its number now."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False
