"""What a request with an Idempotency-Key creates, however often and through whichever replica it is sent: one thing,
which is there until it is deleted, and never again."""

from __future__ import annotations

from enum import StrEnum

from chaos_tests.history import Operation

CREATE, READ, DELETE = "create", "read", "delete"


class Phase(StrEnum):
    NEVER = "never"
    THERE = "there"
    DELETED = "deleted"


class CreatedOnce:
    """``create``: the result is the id of what the key has created. ``read``: the argument is an id, the result whether
    it is there. ``delete``: the argument is an id, the result None. The state is the phase and the id; "": nothing was
    created, or nobody was told its id."""

    initial: tuple[Phase, str] = (Phase.NEVER, "")

    def step(self, state: tuple[Phase, str], operation: Operation) -> tuple[Phase, str] | None:
        phase, known = state
        created = Phase.THERE if phase is Phase.NEVER else phase
        if operation.call == CREATE:
            if operation.ended_s is None:
                return (created, known)
            return (created, operation.result) if known in ("", operation.result) else None
        is_it = phase is Phase.THERE and known == operation.argument
        if operation.call == DELETE:
            return (Phase.DELETED, known) if is_it else state if operation.ended_s is None else None
        return state if operation.ended_s is None or is_it == operation.result else None
