"""The exit codes of ``elastic-rl``: their meanings, and the code of each error."""

from __future__ import annotations

from enum import IntEnum

from elastic_rl.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    ElasticRLError,
    EtcdUnavailable,
    HostUnavailable,
    PreflightFailed,
)


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    PREFLIGHT = 4
    REFUSED = 5
    DEADLINE = 6
    INTERRUPTED = 130


MEANING = {
    Exit.OK: "ok",
    Exit.FAILED: "failed: the run, or the operation that was waited for",
    Exit.USAGE: "wrong usage or configuration",
    Exit.UNAVAILABLE: "etcd, the coordinators or a host do not answer",
    Exit.PREFLIGHT: "the machine does not meet the requirements",
    Exit.REFUSED: "refused by the API",
    Exit.DEADLINE: "a deadline passed; an operation that was waited for continues",
    Exit.INTERRUPTED: "interrupted; what was waited for, or followed, continues, but for a run that was stopped",
}


def describe() -> str:
    """All of them, for ``--help``; it does not wrap a paragraph that begins with a backspace."""
    return "\n".join(["\b", "exit codes:", *(f"  {code.value:>3}  {text}" for code, text in MEANING.items())])


def code_of(error: ElasticRLError) -> Exit:
    """The exit code of an error."""
    from elastic_rl.coordinator.client.admin_client import RequestRefused  # slow to import, and seldom needed
    match error:
        case ConfigError():
            return Exit.USAGE
        case EtcdUnavailable() | HostUnavailable():
            return Exit.UNAVAILABLE
        case PreflightFailed():
            return Exit.PREFLIGHT
        case RequestRefused() | AccessDenied():
            return Exit.REFUSED
        case DeadlineExceeded():
            return Exit.DEADLINE
        case _:
            return Exit.FAILED
