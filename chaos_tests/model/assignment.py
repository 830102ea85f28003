"""The assignment of a singleton to a host: a record that is replaced only by who knows its generation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from chaos_tests.history import Operation

CONFLICT = "conflict"
"""Result of a ``put`` that knew another generation than the present one."""


class Call(StrEnum):
    PUT = "put"
    """Argument: [holder, generation that the caller knows; 0 for none]. Result: the next generation, or CONFLICT."""
    READ = "read"
    """No argument; the result is [holder, generation]; ["", 0] before the first ``put``."""


@dataclass(frozen=True)
class State:
    holder: str = ""
    generation: int = 0


@dataclass(frozen=True)
class Assignment:
    """A compare-and-set register. Its generation counts the puts, and none is used twice."""

    initial: State = State()

    def step(self, state: State, operation: Operation) -> State | None:
        known, result = operation.ended_s is not None, operation.result
        if Call(operation.call) is Call.READ:
            return state if not known or [*result] == [state.holder, state.generation] else None
        holder, generation = operation.argument
        if known and result == CONFLICT:
            return state if generation != state.generation else None
        if generation != state.generation:
            return None if known else state
        after = State(holder, generation + 1)
        return after if not known or result == after.generation else None
