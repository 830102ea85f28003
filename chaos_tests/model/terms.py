"""Terms: who may write, one after the other (leaders of an election, epochs, generations of a driver)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from chaos_tests.history import Operation

FENCED = "fenced"
"""Result of a call under a term that is over."""


class Call(StrEnum):
    ACQUIRE = "acquire"
    """No argument; the result is the number of the term that begins, and ends the one before."""
    RENEW = "renew"
    """Argument: the term. Result: None, or FENCED."""
    RESIGN = "resign"
    """Argument: the term, which ends. Result: None, or FENCED."""
    WRITE = "write"
    """Argument: [term, value]. Result: None, or FENCED."""
    READ = "read"
    """No argument; the result is the value that was written last, None before the first."""


@dataclass(frozen=True)
class State:
    term: int = 0
    held: bool = False
    """Whether the holder of that term has not resigned."""
    value: Any = None


@dataclass(frozen=True)
class Terms:
    """Terms count up by one. Only the newest one writes, until its holder resigns or the next one begins, which may be
    at any time: leases end. What was written stays."""

    initial: State = State()

    def step(self, state: State, operation: Operation) -> State | None:
        known, result = operation.ended_s is not None, operation.result
        call = Call(operation.call)
        if call is Call.READ:
            return state if not known or result == state.value else None
        if call is Call.ACQUIRE:
            return State(state.term + 1, True, state.value) if not known or result == state.term + 1 else None
        term = operation.argument[0] if call is Call.WRITE else operation.argument
        holds = state.held and term == state.term
        if not known and not holds or known and result == FENCED and not holds:
            return state
        if not holds or known and result == FENCED:
            return None
        if call is Call.WRITE:
            return replace(state, value=operation.argument[1])
        return replace(state, held=False) if call is Call.RESIGN else state
