"""A counter of requests, such as the restarts of a target: each one that is accepted gets the next number."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_tests.history import Operation

ADD = "add"


@dataclass(frozen=True)
class State:
    number: int = 0
    given: frozenset[tuple[str, int]] = field(default=frozenset())
    """Idempotency key and number of each addition."""


@dataclass(frozen=True)
class Counter:
    """``add``: the argument is an idempotency key; the result is the number that it got, the same one each time."""

    initial: State = State()

    def step(self, state: State, operation: Operation) -> State | None:
        known, key = operation.ended_s is not None, str(operation.argument)
        before = next((number for used, number in state.given if used == key), None)
        if before is not None:
            return state if not known or operation.result == before else None
        after = State(state.number + 1, state.given | {(key, state.number + 1)})
        return after if not known or operation.result == after.number else None
