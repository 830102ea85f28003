"""The election's protocol without I/O and without a clock of its own: what a candidate asks, and what it concludes.

``Election`` carries the questions to etcd; the tests carry them to a model of it, under a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.etcd.transaction import Compare, KeyValue

_UNANSWERED_S = 0.1


@dataclass(frozen=True)
class Enter:
    """Put the candidate's key under its lease, if there is none. Answer: the revision, 0 where there is one."""


@dataclass(frozen=True)
class Look:
    """Read all candidates. Answer: their keys, None when the store does not answer."""


@dataclass(frozen=True)
class Wait:
    """Wait until the candidates change, and no longer than so many seconds."""

    longest_s: float


Step = Enter | Look | Wait


def leading(candidates: Sequence[KeyValue]) -> KeyValue | None:
    """The candidate that leads: the one created first."""
    return min(candidates, key=lambda kv: kv.create_revision, default=None)


class ElectionProtocol:
    """One stay in the queue, under one lease.

    It leads once it was seen to be first, and then until its lease ends, since later keys have higher create
    revisions. There is no way back from leading to waiting: who lost the lead stands in the queue anew.
    """

    def __init__(self, key: str, ttl_s: float, alive: Callable[[], bool]) -> None:
        """``alive``: whether the lease still holds by this process's clock."""
        self.key, self.revision, self._ttl_s, self._alive, self._first = key, 0, ttl_s, alive, False

    @property
    def leads(self) -> bool:
        """As far as this process can know."""
        return self._first and self._alive()

    @property
    def guard(self) -> Compare:
        """The fence: holds from when the key came first until it is gone, whatever this process believes."""
        return Compare.create(self.key, "==", self.revision)

    def steps(self) -> Generator[Step, Any, None]:
        """The questions, each of which is sent its answer; ends when the stay is over."""
        self.revision = yield Enter()
        if not self.revision:
            # An earlier process of this name died a moment ago and its key still has to run out, or it is alive.
            yield Wait(self._ttl_s / 4)
            return
        while self._alive():
            candidates = yield Look()
            if candidates is None:  # the lease says how long we may go on believing
                yield Wait(_UNANSWERED_S)
                continue
            mine = next((kv for kv in candidates if kv.key == self.key), None)
            if mine is None or mine.create_revision != self.revision:
                self._first = False
                return
            self._first = self._first or leading(candidates) is mine
            yield Wait(self._ttl_s / 3)  # also without a change we look again: hearing of it only makes it quick
