"""A long-running operation of the admin API that is created with an Idempotency-Key: one key of a history each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from chaos_tests.history import Operation

RUNNING = "running"
FINAL = frozenset({"succeeded", "failed", "cancelled"})
ABSENT = "absent"
"""Result of ``list`` without the operation, and of ``get`` and ``cancel`` where there is none."""
LATE = "late"
"""Result of ``cancel`` when it is too late to cancel it."""


class Call(StrEnum):
    CREATE = "create"
    """No argument; the result is the operation's id."""
    GET = "get"
    """Argument: the id. Result: the operation's state, or ABSENT."""
    LIST = "list"
    """Argument: the id. Result: the state that the listing has, or ABSENT."""
    CANCEL = "cancel"
    """Argument: the id. Result: the state then, LATE or ABSENT."""


@dataclass(frozen=True)
class State:
    id: str = ""
    state: str = ""
    """"" before it was created, and while the id is unknown."""


@dataclass(frozen=True)
class LongRunningOperation:
    """However often it is created, there is one operation, with one id. It runs until the leader or a client ends it;
    an end is final, and only what has ended may be deleted."""

    initial: State = State()

    def step(self, state: State, operation: Operation) -> State | None:
        known, result = operation.ended_s is not None, operation.result
        call = Call(operation.call)
        if call is Call.CREATE:
            if not state.state:
                return State(str(result) if known else "", RUNNING)
            if not known or result == state.id:
                return state
            return replace(state, id=str(result)) if not state.id else None  # its creator was not told the id
        if not known:
            # A cancellation may have ended it; whatever ends it shows in what is read next.
            return state
        if not state.state:
            return state if result == ABSENT else None
        if state.id and operation.argument != state.id:
            return None
        return self._seen(replace(state, id=operation.argument), call, str(result))

    @staticmethod
    def _seen(state: State, call: Call, result: str) -> State | None:
        if result == ABSENT:
            return replace(state, state=ABSENT) if state.state != RUNNING else None
        if state.state == ABSENT:
            return None
        if result == LATE:
            return state
        if result == RUNNING:
            return state if state.state == RUNNING and call is not Call.CANCEL else None
        if result not in FINAL or state.state in FINAL and result != state.state:
            return None
        return replace(state, state=result)
