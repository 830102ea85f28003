"""Which versions are copied to the durable store, and in which order. Pure.

Streams follow each other in rotation: copying may take longer than a version is the newest, and by importance the first
stream would keep the others from being copied at all.

Two streams whose versions belong together in pairs (``catalog/pairs.py``) are one of them. Of two streams of which
always the newest versions were copied, the store would hold versions that never belong together, and nothing could be
resumed from it. So a pair is chosen as a whole, and no newer version of either stream before both halves are copied.
The caller pins both when the first is begun: the second is needed long after newer ones are there.

A version whose reference policy (``catalog/references.py``) is not in the store yet is copied after that one, in the
same place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_rl.dcs.catalog.pairs import newest_pair

Copies = list[tuple[str, int]]
"""Stream and number of versions, in the order in which they are copied."""
_Unit = tuple[str, ...]


@dataclass(frozen=True)
class Copyable:
    """What the order follows from, of one stream."""

    committed: Collection[int] = ()
    """Numbers of the committed versions."""
    pairs: Mapping[int, str] = field(default_factory=dict)
    """Number → name of its pair, of versions in any state that have one."""
    durable: int = 0
    """The newest version that is in the store; 0 for none."""

    def named(self) -> dict[int, str]:
        """The pairs of the committed versions."""
        return {n: name for n, name in self.pairs.items() if n in self.committed}


class CopyOrder:
    """The rotation of the streams."""

    def __init__(self, streams: Sequence[str], paired: Sequence[tuple[str, str]]) -> None:
        """``streams``: those to be copied; ``paired``: which of them belong together, if both are copied."""
        together = [pair for pair in paired if set(pair) <= set(streams)]
        of_pair = {stream: pair for pair in together for stream in pair}
        self._units: list[_Unit] = list(dict.fromkeys(of_pair.get(str(s), (str(s),)) for s in streams))
        self._open: dict[_Unit, Copies] = {}
        """What is still to be copied of a pair that was begun."""

    def candidates(self, read: Callable[[str], Copyable]) -> Iterator[Copies]:
        """What may be copied next, in order of the rotation: one version, or both of a pair. ``read``: the reading of a
        stream."""
        for unit in list(self._units):
            copies = self._open.get(unit) or _to_copy(unit, [read(stream) for stream in unit])
            if copies:
                yield copies

    def begin(self, copies: Copies) -> None:
        """The first of them is copied now; then the others come first. ``copies``: the copies of ``candidates``, after
        what the first one needs of another stream."""
        unit = self._unit(copies)
        self._open[unit] = copies[1:]
        self._units.remove(unit)
        self._units.append(unit)

    def give_up(self, copies: Copies) -> None:
        """They cannot be copied; other versions of the streams are chosen."""
        self._open.pop(self._unit(copies), None)

    def forget(self) -> None:
        """No version is pinned any more: what was begun may be gone."""
        self._open.clear()

    def with_stream(self, stream: str) -> Sequence[str]:
        """The stream, and the one that it is paired with."""
        return next((unit for unit in self._units if stream in unit), (stream,))

    def _unit(self, copies: Copies) -> _Unit:
        return next(unit for unit in self._units if copies[-1][0] in unit)


def _to_copy(unit: _Unit, of: Sequence[Copyable]) -> Copies:
    if len(unit) == 1 or not of[0].named():  # a job of which only one group has a state
        numbers = [max(one.committed, default=0) for one in of]
    else:
        numbers = list(_half_begun(of[0], of[1]) or newest_pair(of[0].named(), of[1].named()) or (0, 0))
    return [(stream, number) for stream, number, one in zip(unit, numbers, of, strict=True) if number > one.durable]


def _half_begun(first: Copyable, second: Copyable) -> tuple[int, int] | None:
    """The other half of a pair of which one is the newest in the store, as another leader left it."""
    def other(of: Copyable, lacking: Copyable) -> int:
        name = of.pairs.get(of.durable)
        return max((n for n, its in lacking.named().items() if its == name and n > lacking.durable), default=0)

    found = other(second, first), other(first, second)
    return found if any(found) else None
