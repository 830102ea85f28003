"""The election protocol without I/O and without a clock of its own: what a candidate asks etcd, and what it concludes.

``Election`` executes the steps on etcd; the tests execute them on a model of it, under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.etcd.transaction import Compare, KeyValue

_UNANSWERED_PAUSE_S = 0.1


@dataclass(frozen=True)
class Campaign:
    """Create the candidate's key under its lease, if it does not exist. Answer: the revision, 0 if it exists."""


@dataclass(frozen=True)
class ReadCandidates:
    """Read all candidates. Answer: their keys, None when etcd does not answer."""


@dataclass(frozen=True)
class Wait:
    """Wait until the candidates change, for at most so many seconds."""

    max_s: float


Step = Campaign | ReadCandidates | Wait


def leading(candidates: Sequence[KeyValue]) -> KeyValue | None:
    """The candidate that leads: the one created first."""
    return min(candidates, key=lambda kv: kv.create_revision, default=None)


class ElectionProtocol:
    """One candidacy, under one lease: waiting, then, once its key is the first, the leader's term.

    The term lasts until the lease ends, since later keys have higher create revisions. There is no transition from
    leading back to waiting: a replica that lost the lead starts another candidacy, under another lease.
    """

    def __init__(self, key: str, ttl_s: float, alive: Callable[[], bool]) -> None:
        """``alive``: whether the lease still holds by this process's clock."""
        self.key, self.revision, self._ttl_s, self._alive, self._first = key, 0, ttl_s, alive, False

    @property
    def leads(self) -> bool:
        """Whether the candidate leads, as far as this process can know."""
        return self._first and self._alive()

    @property
    def guard(self) -> Compare:
        """The fencing token: holds from when the key is first until it is gone, whatever this process believes."""
        return Compare.create(self.key, "==", self.revision)

    def steps(self) -> Generator[Step, Any, None]:
        """Yields steps and is sent their answers; ends when the candidacy is over."""
        self.revision = yield Campaign()
        if not self.revision:
            # An earlier process of this name died and its key has not expired yet, or another one is alive.
            yield Wait(self._ttl_s / 4)
            return
        while self._alive():
            candidates = yield ReadCandidates()
            if candidates is None:  # the lease alone bounds how long a leader may assume that it leads
                yield Wait(_UNANSWERED_PAUSE_S)
                continue
            mine = next((kv for kv in candidates if kv.key == self.key), None)
            if mine is None or mine.create_revision != self.revision:
                self._first = False
                return
            self._first = self._first or leading(candidates) is mine
            yield Wait(self._ttl_s)  # bounded: the watch only makes the next reading prompt
