"""Sets the wall clock of one running process, from outside of it.

Linux has no namespace of the wall clock. Programs read it without a system call, from the vDSO, a library that the
kernel maps into each process and of which each has its own copy once it is written to, as debuggers do. The function
``clock_gettime`` of one process is overwritten: it asks the kernel instead, and adds a number of seconds to the wall
clock. All other clocks, and all other processes, stay as they are. So do the times that the kernel itself writes or
waits for (of files, of a timer that is set to a moment of the wall clock), and what few programs read by
``gettimeofday`` and ``time``. A child that is forked meanwhile, and executes no other program, keeps the wrong clock.

It needs Linux on x86-64 and the permission of a debugger (``ptrace.allowed``).
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path

from elastic_rl.errors import ConfigError
from elastic_rl.faults import ptrace
from elastic_rl.runtime.waiting import wait_until

_STOP_S = 30.0
"""Longest time until the process is stopped with no thread at the code that is written to, in seconds."""
_FUNCTION = b"__vdso_clock_gettime"
_BEFORE, _AFTER = bytes.fromhex(
    "b8e4000000"  # mov eax, SYS_clock_gettime
    "0f05"        # syscall, of the clock edi into the timespec at rsi
    "85ff7511"    # test edi, edi; jne ret: not CLOCK_REALTIME
    "85c0750d"    # test eax, eax; jne ret: it has failed
    "48b9"        # mov rcx, the seconds that follow
), bytes.fromhex(
    "48010e"      # add [rsi], rcx
    "c3")         # ret
_ENDED = frozenset("ZX")
_STILL = frozenset("Tt") | _ENDED
_ALLOW = "run as root, or allow ptrace: sysctl kernel.yama.ptrace_scope=0"
_NBYTES = len(_BEFORE) + 8 + len(_AFTER)
# The places of an ELF file of 64 bits that lead to a function (elf(5)).
_PT_LOAD, _PT_DYNAMIC, _DT_HASH, _DT_STRTAB, _DT_SYMTAB = 1, 2, 4, 5, 6


def possible() -> bool:
    """Whether this process may set the clocks of others of its user, on this kernel."""
    try:
        return ptrace.allowed() and bool(_function())
    except ConfigError:
        return False


def set_by(pid: int, seconds: int, striking: AbstractContextManager[None] | None = None) -> str:
    """The wall clock of a process is so many seconds ahead of the machine's, or behind it, until ``reset``. Returns
    what was done. ``striking``: the clock is set within it, once the process is stopped. Raises ConfigError where that
    is not possible, DeadlineExceeded for a process that cannot be stopped, ProcessLookupError for one that has ended,
    and what ``striking`` raises, with nothing done."""
    address, own = _place(pid)
    with _stopped(pid, address), _memory(pid) as memory, striking or nullcontext():
        found = os.pread(memory, _NBYTES, address)
        if found != own and not _is_set(found):
            raise ConfigError(f"the vDSO of pid {pid} is not the one of this process")
        _write(memory, _BEFORE + struct.pack("<q", seconds) + _AFTER, address)
    return f"the wall clock of pid {pid} was set {'back' if seconds < 0 else 'ahead'} by {abs(seconds)} s"


def reset(pid: int) -> bool:
    """The process has the wall clock of the machine again, and goes on where ``set_by`` was killed while it was
    stopped. Returns whether there was anything to do. Raises as ``set_by``."""
    address, own = _place(pid)
    with _stopped(pid, address), _memory(pid) as memory:
        was_set = _is_set(os.pread(memory, _NBYTES, address))
        if was_set:
            _write(memory, own, address)
    return was_set


def offset_of(pid: int) -> int:
    """Seconds by which the wall clock of a process is ahead. Raises as ``set_by``."""
    address, _ = _place(pid)
    with _memory(pid) as memory:
        found = os.pread(memory, _NBYTES, address)
    return int(struct.unpack_from("<q", found, len(_BEFORE))[0]) if _is_set(found) else 0


def _write(memory: int, code: bytes, address: int) -> None:
    try:
        written = os.pwrite(memory, code, address)
    except OSError as e:
        raise ConfigError(f"the kernel does not let the vDSO of a process be written to: {e.strerror}") from e
    if written != len(code):
        raise ConfigError("the kernel has written a part of the code only")


def _is_set(code: bytes) -> bool:
    return code.startswith(_BEFORE) and code.endswith(_AFTER)


@contextmanager
def _stopped(pid: int, address: int) -> Iterator[None]:
    """In the block the process is stopped, and none of its threads is at the code that is written to."""
    def is_clear() -> bool:
        os.kill(pid, signal.SIGSTOP)
        found = _counters(pid)
        if any(address < at < address + _NBYTES for at in found or ()):
            os.kill(pid, signal.SIGCONT)
            return False
        return found is not None

    try:
        wait_until(is_clear, timeout_s=_STOP_S, what=f"the stop of pid {pid}", poll_s=0.001)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _counters(pid: int) -> list[int] | None:
    """The address at which each thread of a stopped process is; None while one is not stopped yet: one that is in the
    middle of a system call of the kernel's alone stops after it."""
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
        states = {thread: _state(thread) for thread in threads}
        if not _STILL.issuperset(states.values()):
            return None
        return [_counter(thread) for thread, state in states.items() if state not in _ENDED]
    except (FileNotFoundError, ProcessLookupError):
        if not Path(f"/proc/{pid}").exists():
            raise ProcessLookupError(f"pid {pid} has ended") from None
        return None  # a thread has ended since
    except PermissionError as e:
        raise ConfigError(f"the threads of pid {pid} cannot be looked at: {e.strerror}", hint=_ALLOW) from e


def _state(thread: Path) -> str:
    return (thread / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]  # proc(5)


def _counter(thread: Path) -> int:
    return int((thread / "syscall").read_text(encoding="ascii").split()[-1], 16)  # proc(5)


@contextmanager
def _memory(pid: int) -> Iterator[int]:
    try:
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    except FileNotFoundError as e:
        raise ProcessLookupError(f"pid {pid} has ended") from e
    except PermissionError as e:
        raise ConfigError(f"the memory of pid {pid} cannot be written to: {e.strerror}",
                          hint=_ALLOW) from e
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _place(pid: int) -> tuple[int, bytes]:
    """Where the function is in the memory of a process, and its code in this one."""
    offset, code = _function()
    return _mapped(pid)[0] + offset, code


def _mapped(pid: int) -> tuple[int, int]:
    """First address and number of bytes of a process's vDSO."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError as e:
        raise ProcessLookupError(f"pid {pid} has ended") from e
    for line in lines:
        if line.endswith("[vdso]"):
            first, end = (int(word, 16) for word in line.split()[0].split("-"))
            return first, end - first
    raise ConfigError(f"pid {pid} has no vDSO, from which it would read its clock")


@cache
def _function() -> tuple[int, bytes]:
    """Where ``clock_gettime`` is in the vDSO, and the code that is overwritten. The kernel maps the same one into each
    process of 64 bits."""
    if not ptrace.supported():
        raise ConfigError("the clock of a process can be set on Linux on x86-64 alone")
    first, nbytes = _mapped(os.getpid())
    with _memory(os.getpid()) as memory:
        image = os.pread(memory, nbytes, first)
    offset, length = _symbol(image)
    if length < _NBYTES:
        raise ConfigError(f"the vDSO of this kernel has {length} bytes of {_FUNCTION.decode()}, fewer than {_NBYTES}")
    code = image[offset:offset + _NBYTES]
    if _is_set(code):
        raise ConfigError("the clock of this process itself was set")
    return offset, code


def _symbol(image: bytes) -> tuple[int, int]:
    """Offset and length of the function. Raises ConfigError for a vDSO of another form."""
    try:
        [at_headers], [headers] = struct.unpack_from("<Q", image, 32), struct.unpack_from("<H", image, 56)
        segments = [struct.unpack_from("<IIQQQQ", image, at_headers + 56 * i) for i in range(headers)]
        loaded = next(address - offset for kind, _, offset, address, _, _ in segments if kind == _PT_LOAD)
        at, nbytes = next((offset, size) for kind, _, offset, _, _, size in segments if kind == _PT_DYNAMIC)
        tags = dict(reversed([*struct.iter_unpack("<QQ", image[at:at + nbytes // 16 * 16])]))
        names, symbols = tags[_DT_STRTAB] - loaded, tags[_DT_SYMTAB] - loaded
        [number] = struct.unpack_from("<I", image, tags[_DT_HASH] - loaded + 4)
        for i in range(number):
            name, _, _, _, address, length = struct.unpack_from("<IBBHQQ", image, symbols + 24 * i)
            if image[names + name:].startswith(_FUNCTION + b"\0"):
                return address - loaded, length
    except (struct.error, StopIteration, LookupError, OverflowError) as e:
        raise ConfigError(f"the vDSO of this kernel is of another form: {type(e).__name__} {e}") from e
    raise ConfigError(f"the vDSO of this kernel has no {_FUNCTION.decode()}")
