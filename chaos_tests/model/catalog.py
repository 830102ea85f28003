"""The catalog of one stream, as its publishers, its readers and the garbage collector see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from chaos_tests.history import Operation

FENCED = "fenced"
"""Result of ``begin`` and ``commit`` when the epoch of the caller is over."""
GONE = "gone"
"""Result of ``pull`` and ``pin`` when there is no such committed version."""


class Call(StrEnum):
    RAISE_EPOCH = "raise_epoch"
    """No argument; the result is the number of the next epoch."""
    BEGIN = "begin"
    """Argument: the epoch. Result: the version's number, or FENCED."""
    SEAL = "seal"
    """Argument: the version, all parts of which are stored and sealed. Result: None."""
    COMMIT = "commit"
    """Argument: the version. Result: None, or FENCED."""
    ABORT = "abort"
    """Argument: the version. Result: None."""
    HEAD = "head"
    """No argument; the result is the newest committed version, 0 for none."""
    PULL = "pull"
    """Argument: the version. Result: None, or GONE. The version is not kept afterwards."""
    PIN = "pin"
    """Argument: the version. Result: None, or GONE. The version is kept until the client unpins it."""
    UNPIN = "unpin"
    """Argument: the version. Result: None."""
    RELEASE = "release"
    """Argument: the version, which the garbage collector has released. Result: None."""


class Phase(StrEnum):
    STAGING = "staging"
    SEALED = "sealed"
    COMMITTED = "committed"
    ABORTED = "aborted"
    RELEASED = "released"


@dataclass(frozen=True)
class State:
    epoch: int = 0
    head: int = 0
    versions: tuple[tuple[Phase, int], ...] = ()
    """Phase and epoch of each version; version n is at n - 1."""
    pins: frozenset[tuple[str, int]] = field(default=frozenset())
    """Client and version of each pin."""

    def phase(self, number: int) -> Phase | None:
        return self.versions[number - 1][0] if 0 < number <= len(self.versions) else None

    def to(self, number: int, phase: Phase, *of: Phase) -> State | None:
        """The state in which a version has another phase; None unless its phase is one of ``of``."""
        if self.phase(number) not in of:
            return None
        versions = list(self.versions)
        versions[number - 1] = (phase, versions[number - 1][1])
        return replace(self, versions=tuple(versions))


@dataclass(frozen=True)
class Catalog:
    """The numbers of a stream count up from 1, one for each ``begin``. The head is the newest committed version. A
    version is committed once it is sealed, in the epoch in which it was begun, and while no newer one is committed; it
    is released at most once, and not while somebody pins it."""

    initial: State = State()

    def step(self, state: State, operation: Operation) -> State | None:
        known, result, n = operation.ended_s is not None, operation.result, operation.argument
        match Call(operation.call):
            case Call.RAISE_EPOCH:
                return replace(state, epoch=state.epoch + 1) if not known or result == state.epoch + 1 else None
            case Call.BEGIN:
                if known and result == FENCED:
                    return state if n < state.epoch else None
                if n != state.epoch:
                    return None if known else state
                begun = replace(state, versions=(*state.versions, (Phase.STAGING, n)))
                return begun if not known or result == len(begun.versions) else None
            case Call.SEAL:
                # A version that was aborted meanwhile is sealed in vain.
                after = state.to(n, Phase.SEALED, Phase.STAGING)
                return after or (state if state.phase(n) is Phase.ABORTED or not known else None)
            case Call.COMMIT:
                return self._commit(state, n, known, result)
            case Call.ABORT:
                after = state.to(n, Phase.ABORTED, Phase.STAGING, Phase.SEALED)
                return after or (None if known else state)
            case Call.HEAD:
                return state if not known or result == state.head else None
            case Call.PULL | Call.PIN:
                if known and (result == GONE) == (state.phase(n) is Phase.COMMITTED):
                    return None
                if operation.call == Call.PULL or state.phase(n) is not Phase.COMMITTED:
                    return state
                return replace(state, pins=state.pins | {(operation.client, n)})
            case Call.UNPIN:
                return replace(state, pins=state.pins - {(operation.client, n)})
            case Call.RELEASE:
                if any(number == n for _, number in state.pins):
                    return None if known else state
                after = state.to(n, Phase.RELEASED, Phase.COMMITTED)
                return after or (None if known else state)

    @staticmethod
    def _commit(state: State, n: int, known: bool, result: object) -> State | None:
        of_epoch = state.versions[n - 1][1] if state.phase(n) is not None else 0
        if known and result == FENCED:
            return state if of_epoch < state.epoch else None
        after = state.to(n, Phase.COMMITTED, Phase.SEALED)
        if after is None or of_epoch != state.epoch or n <= state.head:
            return None if known else state
        return replace(after, head=n)


def of_sweep(lines: Sequence[str], stream: str) -> list[tuple[Call, int]]:
    """What a sweep of the garbage collector has done to the versions of a stream, by the lines that it returns."""
    done = list[tuple[Call, int]]()
    for line in lines:
        for call, begins in ((Call.RELEASE, f"released {stream} version "), (Call.ABORT, f"aborted {stream} version ")):
            if line.startswith(begins):
                done.append((call, int(line.removeprefix(begins).partition(":")[0])))
    return done
