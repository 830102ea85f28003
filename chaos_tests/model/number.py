"""A number with a revision that clients read and change: the desired engines of a pool, as the admin API shows them, or
what the head of a stream was made of, whose revision is the number of its version."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos_tests.history import Operation

READ, WRITE = "read", "write"


@dataclass(frozen=True)
class State:
    """``revision`` is that of the last change whose revision a client was told."""

    value: int
    revision: int
    exact: bool = True
    """False: the number has changed since then, by a write whose answer was lost."""
    keys: frozenset[str] = field(default=frozenset())
    """Idempotency keys of the writes that were carried out."""
    seen: bool = True
    """False: no client was told the number yet, whatever it is."""


UNSEEN = State(0, -1, exact=False, seen=False)
"""Its revision may be 0: of what nobody has written yet."""
NONE = State(0, 0)
"""Nobody has written it yet."""


@dataclass(frozen=True)
class VersionedNumber:
    """``read``: no argument. ``write``: the argument is the number, or [number, idempotency key]. The result of both is
    [number, revision]. Revisions grow; a write of the number that is there changes nothing; nor does one whose
    idempotency key was there already."""

    initial: State = UNSEEN
    rewritten: bool = False
    """Whether others write the number that is there again, which changes its revision: a driver that takes over does
    so with the spec of a pool."""

    def step(self, state: State, operation: Operation) -> State | None:
        if operation.call == READ:
            return state if operation.ended_s is None else self._seen(state, *operation.result)
        if not state.seen:
            return self._first_write(state, operation)
        value, key = operation.argument if isinstance(operation.argument, (list, tuple)) else (operation.argument, "")
        if key and key in state.keys:  # it was repeated: its answer is the number as it is by then
            return state if operation.ended_s is None else self._seen(state, *operation.result)
        keys = state.keys | {key} if key else state.keys
        if operation.ended_s is None:
            same = value == state.value
            return State(value, state.revision, exact=state.exact and same, keys=keys)
        told, revision = operation.result
        if told != value:
            return None
        if value == state.value:
            seen = self._seen(state, told, revision)
            return State(seen.value, seen.revision, seen.exact, keys) if seen is not None else None
        return State(value, revision, keys=keys) if revision > state.revision else None

    @staticmethod
    def _first_write(state: State, operation: Operation) -> State | None:
        """It may be of the number that was there. The revision that a client is told is known from then on."""
        value, key = operation.argument if isinstance(operation.argument, (list, tuple)) else (operation.argument, "")
        keys = state.keys | {key} if key else state.keys
        if operation.ended_s is None:
            return State(value, 0, exact=False, keys=keys)
        told, revision = operation.result
        return State(value, revision, keys=keys) if told == value else None

    def _seen(self, state: State, value: int, revision: int) -> State | None:
        if state.seen and value != state.value:
            return None
        if state.exact and self.rewritten and revision > state.revision:
            return State(value, revision, keys=state.keys)
        if state.exact:
            return state if revision == state.revision else None
        return State(value, revision, keys=state.keys) if revision > state.revision else None
