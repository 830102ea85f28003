"""What a request with an Idempotency-Key creates, however often and through whichever replica it is sent: one thing,
which is there from then on."""

from __future__ import annotations

from chaos_tests.history import Operation

CREATE, READ = "create", "read"


class CreatedOnce:
    """``create``: the result is the id of what the key has created. ``read``: the argument is an id, the result whether
    it is there. The state is the id; "": nothing was created, or nobody was told its id."""

    initial: tuple[bool, str] = (False, "")

    def step(self, state: tuple[bool, str], operation: Operation) -> tuple[bool, str] | None:
        created, known = state
        if operation.call == READ:
            if operation.ended_s is None:
                return state
            there = created and known == operation.argument
            return state if there == operation.result else None
        if operation.ended_s is None:
            return (True, known)
        return (True, operation.result) if known in ("", operation.result) else None
