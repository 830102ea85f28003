"""What a process does for itself: dies with its parent, freezes its heap, finds free ports, waits for a condition."""

from __future__ import annotations

import ctypes
import gc
import signal
import socket
import time

from elastic_rl.errors import DeadlineExceeded, PreflightFailed

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # resolved at import: nothing may be imported between fork and exec


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends; call first thing in a Python child's main."""
    _libc.prctl(_PR_SET_PDEATHSIG, sig)


def freeze_heap() -> None:
    """Has the garbage collector never look again at what this process has loaded. A full collection stops a process
    that has imported torch for 100 ms otherwise, whenever it comes; call when a long-lived process is set up."""
    gc.collect()
    gc.freeze()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now and outside the ephemeral range of outgoing connections' most likely picks."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def require_port_free(host: str, port: int, *, setting: str) -> None:
    """Raises MachineUnfit, naming the setting, when something already listens on the port."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise PreflightFailed(f"port {port} on {host} cannot be bound ({setting}): {e.strerror}",
                               hint=f"stop what listens there (`ss -ltnp 'sport = :{port}'`) or set another {setting}"
                               ) from e


def wait_until(check, *, timeout_s: float, what: str, poll_s: float = 0.05, alive=None):
    """Polls ``check()`` until it returns something true and returns that. ``alive()`` false ends the wait early.

    Raises DeadlineExceeded, which names ``what``.
    """
    end = time.monotonic() + timeout_s
    while True:
        if value := check():
            return value
        if alive is not None and not alive():
            raise DeadlineExceeded(f"{what} ended before it was ready", hint="its log says why")
        if time.monotonic() > end:
            raise DeadlineExceeded(f"{what} was not ready within {timeout_s:g} s")
        time.sleep(poll_s)
