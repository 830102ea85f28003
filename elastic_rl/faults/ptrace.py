"""What only the kernel's ptrace can do to a process from outside, without its help: have it exit, or hold its GIL.

The kernel ends what is done here when the thread ends that has done it: one that was held goes on. It needs Linux on
x86-64, and the permission that a debugger needs (root, or ``kernel.yama.ptrace_scope=0``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from elastic_rl.errors import ConfigError, DeadlineExceeded

_PEEKTEXT, _POKETEXT, _CONT, _GETREGS, _SETREGS, _DETACH, _SEIZE, _INTERRUPT = 1, 4, 7, 12, 13, 17, 0x4206, 0x4207
_WALL, _EVENT_STOP = 0x40000000, 128
_STOP_S, _POLL_S = 30.0, 0.0002
"""Longest time until a thread that is to exit is stopped, and the pause between two looks at it, in seconds."""
_EXIT_GROUP = 231
_YAMA, _FORBIDDEN, _CAP_SYS_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope"), 3, 19
_SYSCALL = 0x050F
"""The instruction ``syscall``, as the processor reads it."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Registers(ctypes.Structure):
    """``user_regs_struct``."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in (
        "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
        "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs")]


def supported() -> bool:
    """Whether this machine can do it, permission aside."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def allowed() -> bool:
    """Whether this process may do it to others of its user: as root, or where Yama does not forbid it."""
    if not supported():
        return False
    try:
        scope = int(_YAMA.read_text(encoding="ascii"))
    except (OSError, ValueError):
        scope = 0  # a kernel without Yama
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    may_any = int(status.partition("\nCapEff:")[2].split(maxsplit=1)[0], 16) >> _CAP_SYS_PTRACE & 1
    return scope < _FORBIDDEN and (scope == 0 or bool(may_any))


def exit_process(pid: int, code: int = 0, *, striking: AbstractContextManager[None] | None = None,
                 stop_s: float = _STOP_S) -> None:
    """Has a process call ``exit_group`` in the middle of whatever it does: it ends at once with this code, as by
    ``os._exit`` in a library. ``striking``: what is done to it is done within it, once it is stopped, for which
    ``stop_s`` is the longest time. Raises ConfigError where that is not possible, ProcessLookupError, and with nothing
    done DeadlineExceeded, as ``_attach``, and what ``striking`` raises."""
    _require_supported()
    _attach(pid, time.monotonic() + stop_s)
    registers = _Registers()
    try:
        with striking or contextlib.nullcontext():
            _ptrace(_GETREGS, pid, data=ctypes.byref(registers))
            address = registers.rip
            text = _ptrace(_PEEKTEXT, pid, address=address)
            _ptrace(_POKETEXT, pid, address=address, data=_SYSCALL)  # in its private copy of the page
            registers.rax, registers.rdi = _EXIT_GROUP, code
            registers.orig_rax = 2 ** 64 - 1  # no system call that was interrupted is begun again
            try:
                _ptrace(_SETREGS, pid, data=ctypes.byref(registers))
            except BaseException:
                _ptrace(_POKETEXT, pid, address=address, data=text)  # it goes on with what it was doing
                raise
    finally:
        _ptrace(_DETACH, pid)


def hold_gil(pid: int, seconds: float, *, find_s: float, wait: Callable[[float], object] = time.sleep,
             pause: Callable[[float], object] = time.sleep) -> str:
    """Stops the thread of a Python process that has the GIL for a while: all other threads run until they need it.
    Returns what was seen. ``find_s``: longest time to find the process with its GIL taken. ``wait``: is called with
    ``seconds`` once the thread is stopped, ``pause`` between two looks for it. Raises as ``exit_process`` and as these,
    and DeadlineExceeded where nobody took it, as in a process that does nothing, or could not be seen to in time."""
    _require_supported()
    end = time.monotonic() + find_s
    while time.monotonic() < end:
        held = list[int]()
        try:
            for thread in sorted(int(name) for name in os.listdir(f"/proc/{pid}/task")):
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    _attach(thread, end)
                    held.append(thread)
            owner = _owner_of_gil(pid, end)
            for thread in [t for t in held if t != owner]:
                _release(thread)
                held.remove(thread)
            if held and _owner_of_gil(pid, end) == owner:
                wait(seconds)
                return f"thread {owner} of pid {pid} had its GIL, and was stopped for {seconds:g} s"
        finally:
            for thread in held:
                _release(thread)
        pause(0.02)
    raise DeadlineExceeded(f"no thread of pid {pid} was seen to have its GIL within {find_s:g} s")


def _owner_of_gil(pid: int, until: float) -> int:
    """Thread id, as py-spy reads it; 0 where no thread has the GIL. Raises ConfigError, and DeadlineExceeded where that
    is not known by ``until``, a second of the monotonic clock."""
    program = Path(sys.executable).with_name("py-spy")
    try:
        done = subprocess.run([str(program), "dump", "--nonblocking", "--json", "--pid", str(pid)], capture_output=True,
                              check=False, timeout=max(0.0, until - time.monotonic()), stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as e:
        raise DeadlineExceeded(f"no thread of pid {pid} was seen to have its GIL in time; py-spy was asked") from e
    if done.returncode:
        raise ConfigError(f"py-spy cannot read pid {pid}: {done.stderr.decode(errors='replace').strip()[:200]}")
    return next((int(thread["os_thread_id"]) for thread in json.loads(done.stdout) if thread["owns_gil"]), 0)


def _attach(thread: int, until: float) -> None:
    """Returns once the thread is stopped by this. A signal that comes first is delivered: else it would be lost. No
    SIGSTOP is sent, which could not be taken back. Raises ConfigError, ProcessLookupError, and DeadlineExceeded for a
    thread that is not stopped by ``until``, a second of the monotonic clock, as one that waits for a disk: the kernel
    detaches from that one when the thread ends that has called this, so that it goes on whenever it wakes."""
    _ptrace(_SEIZE, thread)
    _ptrace(_INTERRUPT, thread)
    while True:
        found, status = os.waitpid(thread, _WALL | os.WNOHANG)
        if not found:
            if time.monotonic() >= until:
                _release(thread)
                raise DeadlineExceeded(f"the thread {thread} was not seen to stop in time")
            time.sleep(_POLL_S)
            continue
        if not os.WIFSTOPPED(status):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        if status >> 16 == _EVENT_STOP:
            return
        _ptrace(_CONT, thread, data=os.WSTOPSIG(status))


def _release(thread: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        _ptrace(_DETACH, thread)


def _ptrace(request: int, thread: int, *, address: int = 0, data: object = 0) -> int:
    """Has to be called by the thread that has attached. Returns the word that ``_PEEKTEXT`` reads."""
    ctypes.set_errno(0)
    found = int(_libc.ptrace(request, thread, address, data))
    if found == -1 and (number := ctypes.get_errno()):  # a word may be -1 too
        if number == errno.ESRCH:
            raise ProcessLookupError(number, os.strerror(number))
        raise ConfigError(f"ptrace of pid {thread}: {os.strerror(number)}",
                          hint="run as root, or allow ptrace: sysctl kernel.yama.ptrace_scope=0")
    return found


def _require_supported() -> None:
    if not supported():
        raise ConfigError(f"this fault needs ptrace of Linux on x86_64, and this is {platform.machine()}")
