"""The registration of an external engine: at most one for each server at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from chaos_tests.history import Operation

CONFLICT = "conflict"
"""Result of ``register`` for a server that is registered already."""
ABSENT = "absent"
"""Result of ``deregister`` for an engine that is not registered."""


class Call(StrEnum):
    REGISTER = "register"
    """No argument; the result is the id of its engine, or CONFLICT."""
    DEREGISTER = "deregister"
    """Argument: the id of the engine. Result: None, or ABSENT."""
    READ = "read"
    """No argument; the result is the id of its engine, "" for none."""


UNKNOWN_ID = "?"


@dataclass(frozen=True)
class State:
    engine: str = ""
    used: frozenset[str] = field(default=frozenset())
    """Ids of engines that it had before."""


@dataclass(frozen=True)
class Registration:
    """Each registration has an id of its own, which no other one had before."""

    initial: State = State()

    def step(self, state: State, operation: Operation) -> State | None:
        known, result = operation.ended_s is not None, operation.result
        match Call(operation.call):
            case Call.REGISTER:
                if known and result == CONFLICT:
                    return state if state.engine else None
                if state.engine:
                    return None if known else state
                engine = str(result) if known else UNKNOWN_ID
                return State(engine, state.used) if engine not in state.used else None
            case Call.READ:
                return self._named(state, str(result)) if known else state
            case Call.DEREGISTER:
                if known and result == ABSENT:
                    return state if state.engine != operation.argument else None
                named = self._named(state, operation.argument)
                if named is None or not named.engine:
                    return None if known else state
                return State("", named.used | {named.engine})

    @staticmethod
    def _named(state: State, engine: str) -> State | None:
        """The state, which has this engine. One whose registration had no answer is known by its first name."""
        if state.engine == UNKNOWN_ID and engine and engine not in state.used:
            return State(engine, state.used)
        return state if state.engine == engine else None
