"""Sets the wall clock of one running process, as seen from outside the process a step of NTP or a person would do it.

Linux has no namespace of the wall clock. Programs read it without a system call, from the vDSO, a library that the
kernel maps into each process and of which each has its own copy once it is written to, as debuggers do. The function
``clock_gettime`` of one process is overwritten: it asks the kernel instead, and adds a number of seconds to the wall
clock. All other clocks, and all other processes, stay as they are. So do the times that the kernel itself writes, such
as those of files, and what few programs read by ``gettimeofday`` and ``time``.

It needs Linux on x86-64 and the permission of a debugger (``ptrace.allowed``).
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from elastic_rl.errors import ConfigError
from elastic_rl.faults import ptrace
from elastic_rl.runtime.waiting import wait_until

_STOP_S = 60.0
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
_NBYTES = len(_BEFORE) + 8 + len(_AFTER)
# The places of an ELF file of 64 bits that lead to a function (elf(5)).
_PT_LOAD, _PT_DYNAMIC, _DT_HASH, _DT_STRTAB, _DT_SYMTAB = 1, 2, 4, 5, 6


def set_by(pid: int, seconds: int) -> str:
    """The wall clock of a process is so many seconds ahead of the machine's, or behind it, until ``put_right``. Returns
    what was done. Raises ConfigError where that is not possible, and ProcessLookupError for a process that has ended.
    """
    address, own = _place(pid)
    with _stopped(pid, address), _memory(pid) as memory:
        found = os.pread(memory, _NBYTES, address)
        if found != own and not _is_set(found):
            raise ConfigError(f"the vDSO of pid {pid} is not the one of this process")
        os.pwrite(memory, _BEFORE + struct.pack("<q", seconds) + _AFTER, address)
    return f"the wall clock of pid {pid} was set {'back' if seconds < 0 else 'ahead'} by {abs(seconds)} s"


def put_right(pid: int) -> bool:
    """The process has the wall clock of the machine again, and goes on where ``set_by`` was killed while it was
    stopped. Returns whether there was anything to do. Raises as ``set_by``."""
    address, own = _place(pid)
    with _stopped(pid, address), _memory(pid) as memory:
        was_set = _is_set(os.pread(memory, _NBYTES, address))
        if was_set:
            os.pwrite(memory, own, address)
    return was_set


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
    """The address at which each thread of a stopped process is; None while one is not stopped yet."""
    found = list[int]()
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError as e:
        raise ProcessLookupError(f"pid {pid} has ended") from e
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            words = (thread / "syscall").read_text(encoding="ascii").split()  # proc(5)
            if len(words) < 2:
                return None  # "running"
            found.append(int(words[-1], 16))
    return found


@contextmanager
def _memory(pid: int) -> Iterator[int]:
    try:
        descriptor = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    except FileNotFoundError as e:
        raise ProcessLookupError(f"pid {pid} has ended") from e
    except PermissionError as e:
        raise ConfigError(f"the memory of pid {pid} cannot be written to: {e.strerror}",
                          hint="run as root, or allow ptrace: sysctl kernel.yama.ptrace_scope=0") from e
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
