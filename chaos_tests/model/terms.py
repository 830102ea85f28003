"""Terms: who may write, one after the other, as the leaders of an election do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from chaos_tests.history import Operation

FENCED = "fenced"
"""Result of a ``write`` under a term that is over."""


class Call(StrEnum):
    ACQUIRE = "acquire"
    """No argument; the result is the number of the term that begins, and ends the one before."""
    WRITE = "write"
    """Argument: [term, value]. Result: None, or FENCED."""
    READ = "read"
    """No argument; the result is the value that was written last, None before the first."""


@dataclass(frozen=True)
class State:
    term: int = 0
    """The newest one whose number its holder was told."""
    held: bool = False
    """Whether that term may still write."""
    value: Any = None


@dataclass(frozen=True)
class Terms:
    """The numbers of terms rise, by one or by more: those of an election are revisions of etcd. Only the newest term
    writes. It is over when the next one begins, or before, since a lease may end at any time: who was refused once
    never writes again. What was written stays."""

    initial: State = State()

    def step(self, state: State, operation: Operation) -> State | None:
        known, result = operation.ended_s is not None, operation.result
        match Call(operation.call):
            case Call.READ:
                return state if not known or result == state.value else None
            case Call.ACQUIRE if not known:
                return state  # nobody writes under a number that nobody was told, and a term may end without a cause
            case Call.ACQUIRE:
                return State(result, True, state.value) if result > state.term else None
            case Call.WRITE:
                term, value = operation.argument
                if known and result == FENCED:
                    return replace(state, held=state.held and term != state.term) if term <= state.term else None
                return replace(state, value=value) if state.held and term == state.term else None
