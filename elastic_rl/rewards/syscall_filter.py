"""The system calls that a sandbox refuses, as a seccomp filter: memory that no limit of a process counts, and parts of
the kernel that a program which computes something has no use for. Pure."""

from __future__ import annotations

import errno
import platform
import struct

from elastic_rl.errors import ConfigError

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of linux/audit.h."""
_REFUSED = {
    # name: (x86_64, aarch64), of the kernel's tables. First: memory outside of RLIMIT_AS and of what a process has
    # mapped.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
    # Attributes of files: 64 KiB each, which the kernel holds and no size of a file system counts.
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    # What has let programs out of sandboxes.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "kexec_load": (246, 104),
}
_SOCKET, _SOCKETPAIR, _SETSOCKOPT = (41, 198), (53, 199), (54, 208)
_FAMILY = 1
"""AF_UNIX, of which a pair of sockets is made. There is no network that other families would lead to; over loopback TCP
grows its buffers to megabytes a socket; no namespace confines AF_VSOCK; and behind the others is much of the kernel
that no program needs."""
_BUFFERS = (7, 8, 32, 33)
"""SO_SNDBUF and SO_RCVBUF, and the same by force: a socket keeps the system's usual size, of some 200 KiB."""
_FORK, _VFORK, _CLONE, _CLONE3 = (57, None), (58, None), (56, 220), (435, 435)
_CLONE_THREAD = 0x10000
_X32 = 0x40000000
"""Set in the numbers of x86-64's second table of system calls, which would pass by the numbers above."""
# Classic BPF: LD|W|ABS, JMP|JEQ|K, JMP|JGE|K, JMP|JSET|K, RET|K.
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT, _THIRD_AT = 0, 4, 16, 32
"""Offsets in struct seccomp_data; of the first and third argument their lower halves."""
_Instruction = tuple[int, int, int, int]
_REFUSE = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
_PASS = (_RETURN, 0, 0, _ALLOW)


def syscall_filter(machine: str = "", *, processes: bool = True) -> bytes:
    """The filter as an array of ``struct sock_filter``: refused calls fail with EPERM, and a call of another
    architecture ends the process. ``machine``: as ``platform.machine()``. ``processes``: whether new ones may be
    started; else threads only. Raises ConfigError for a machine without a table."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ConfigError(f"there is no sandbox for programs on {machine}",
                          hint=f"run it on one of {', '.join(sorted(_ARCHITECTURES))}, or use the reward 'remote'")
    column = list(_ARCHITECTURES).index(machine)
    rules: list[tuple[tuple[int | None, ...], list[_Instruction]]] = [(row, [_REFUSE]) for row in _REFUSED.values()]
    rules += [(row, [(_LOAD, 0, 0, _ARGUMENT_AT), (_JUMP_EQ, 1, 0, _FAMILY), _REFUSE, _PASS])
              for row in (_SOCKET, _SOCKETPAIR)]
    buffers = [(_JUMP_EQ, len(_BUFFERS) - i, 0, option) for i, option in enumerate(_BUFFERS)]
    rules += [(_SETSOCKOPT, [(_LOAD, 0, 0, _THIRD_AT), *buffers, _PASS, _REFUSE])]
    if not processes:
        # The C library starts a thread with clone() where there is no clone3(), whose arguments cannot be looked at.
        rules += [(_FORK, [_REFUSE]), (_VFORK, [_REFUSE]), (_CLONE3, [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]),
                  (_CLONE, [(_LOAD, 0, 0, _ARGUMENT_AT), (_JUMP_SET, 1, 0, _CLONE_THREAD), _REFUSE, _PASS])]
    program = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_JUMP_EQ, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL),
               (_LOAD, 0, 0, _NUMBER_AT), (_JUMP_GE, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for numbers, then in rules:
        number = numbers[column]
        if number is not None:
            program += [(_JUMP_EQ, 0, len(then), number), *then]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in [*program, _PASS])
