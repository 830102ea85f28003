"""Whether a delta is worth requesting, learned from the durations of transfers. Pure.

A delta saves bytes and costs work: the sender encodes it, the receiver decodes it and checks the result. Whether that
pays depends on the link and on how the stream changes from version to version (bf16 weights of an RL step: a few
percent; fp32 optimizer state: everything). So both ways are timed from request to sealed chunk, and the cheaper one is
used; the other one is tried now and then, since links and streams change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

_WEIGHT = 0.2
"""Weight of the newest sample in a moving average."""
_TRIALS = 8
"""Deltas of a stream that are requested before their cost counts."""
_PROBE_EVERY = 64
"""While deltas do not pay, one of so many chunks is requested as one."""
_STREAMS = 64
_MOSTLY = 0.9


class Outcome(Enum):
    """What came of a transfer."""

    DENSE = "the whole chunk, as requested"
    DELTA = "a delta"
    REFUSED = "the whole chunk, though a delta was requested: the sender found none that is worth it"


@dataclass
class _Stream:
    trials: int = 0
    delta_s: float = 0.0
    """Seconds a byte of the whole chunk, of transfers by delta."""
    refused: float = 0.0
    """Fraction of requests that the sender refused."""
    skipped: int = 0


class DeltaPolicy:
    """What one node has learned about deltas. Not thread-safe."""

    def __init__(self) -> None:
        self._streams: OrderedDict[str, _Stream] = OrderedDict()  # least recently used first
        self._dense_s = 0.0  # seconds a byte, of whole chunks of any stream; 0: unknown

    def use(self, stream: str) -> bool:
        """Whether to request the next chunk of the stream as a delta."""
        known = self._stream(stream)
        if known.trials < _TRIALS or known.refused < _MOSTLY and known.delta_s <= (self._dense_s or known.delta_s):
            return True
        known.skipped += 1
        return known.skipped % _PROBE_EVERY == 0

    def record(self, stream: str, outcome: Outcome, nbytes: int, seconds: float) -> None:
        """A chunk of ``nbytes`` took so long from its request until it was sealed."""
        known, cost = self._stream(stream), seconds / max(nbytes, 1)
        if outcome is not Outcome.DENSE:
            known.refused = _average(known.refused, float(outcome is Outcome.REFUSED), known.trials)
            known.trials += 1
        if outcome is Outcome.DELTA:
            known.delta_s = _average(known.delta_s, cost, known.delta_s)
        else:
            self._dense_s = _average(self._dense_s, cost, self._dense_s)

    def _stream(self, stream: str) -> _Stream:
        known = self._streams.setdefault(stream, _Stream())
        self._streams.move_to_end(stream)
        while len(self._streams) > _STREAMS:
            self._streams.popitem(last=False)
        return known


def _average(old: float, new: float, known: float) -> float:
    return old + _WEIGHT * (new - old) if known else new
