"""The exit codes of ``elastic-rl``: what they mean, and which error ends with which."""

from __future__ import annotations

from enum import IntEnum

from elastic_rl.errors import (
    AccessDenied,
    ConfigError,
    DeadlineExceeded,
    ElasticRLError,
    EtcdUnavailable,
    PreflightFailed,
)


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    STORE = 3
    MACHINE = 4
    REFUSED = 5
    DEADLINE = 6
    INTERRUPTED = 130


MEANING = {
    Exit.OK: "ok",
    Exit.FAILED: "failed: the run, or the operation that was waited for",
    Exit.USAGE: "wrong usage or configuration",
    Exit.STORE: "the store or the coordinators do not answer",
    Exit.MACHINE: "the machine is unfit",
    Exit.REFUSED: "refused by the API",
    Exit.DEADLINE: "a deadline passed; an operation that was waited for goes on",
    Exit.INTERRUPTED: "interrupted; an operation that was waited for goes on",
}


def describe() -> str:
    """All of them, for ``--help``, which leaves a paragraph that begins with a backspace as it is."""
    return "\n".join(["\b", "exit codes:", *(f"  {code.value:>3}  {text}" for code, text in MEANING.items())])


def code_of(error: ElasticRLError) -> Exit:
    """The exit code of an error."""
    from elastic_rl.coordinator.client.admin_client import (
        RequestRefused,  # heavy, and only needed when something went wrong
    )
    match error:
        case ConfigError():
            return Exit.USAGE
        case EtcdUnavailable():
            return Exit.STORE
        case PreflightFailed():
            return Exit.MACHINE
        case RequestRefused() | AccessDenied():
            return Exit.REFUSED
        case DeadlineExceeded():
            return Exit.DEADLINE
        case _:
            return Exit.FAILED
