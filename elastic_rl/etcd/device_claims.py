"""The transactions of ``device_phase`` on etcd, for the actor and the trainer group."""

from __future__ import annotations

from collections.abc import Callable

from elastic_rl.etcd import device_phase
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.device_phase import SeenPhase, Side
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.etcd.records import Engine

_NAMED = 8
"""Engines that a text names."""


class DeviceClaims:
    """The claims on devices in one epoch. Every method raises EtcdUnavailable, and those that write Fenced."""

    def __init__(self, etcd: EtcdClient, keys: Keys, pool: str, *, epoch: int) -> None:
        """``pool``: whose engines share devices with the trainer."""
        self._etcd, self._keys, self._pool, self._epoch = etcd, keys, pool, epoch
        self._engines = Mirror[tuple[str, Engine | None]](etcd, keys.engines_of_pool(pool), lambda kv: (
            kv.key.removeprefix(keys.engines_prefix()), readable_one(kv, Engine)))
        """The pool's engines, kept up to date while some hold memory: with 10,000 engines, each look at all records
        would take seconds."""

    def close(self) -> None:
        """Ends what ``holding`` keeps for the next time."""
        self._engines.close()

    def phase(self) -> SeenPhase:
        return SeenPhase.of(self._etcd.get(self._keys.device_phase()), self._epoch)

    def holding(self) -> list[str]:
        """Engines that may have device memory. What a record says that cannot be read is not known: it counts. Made to
        be asked again and again until there are none: that is never said by changes alone, which may come late."""
        was_watched = self._engines.is_watched
        found = self._holding()
        if not found and was_watched:
            self.close()
            found = self._holding()
        if not found:
            self.close()
        return found

    def _holding(self) -> list[str]:
        found = self._engines.read_current(0.0).values()  # else they may have released it long since
        return [*device_phase.holding((e for _, e in found if e is not None and e.pool == self._pool), self._epoch),
                *(name for name, e in found if e is None)]

    def begin_phase(self, side: Side, writer: FencedWriter, term: int) -> bool:
        """Makes it a side's phase, as the actor of ``term``; nothing is written when it is. False when a trainer group
        holds memory, or took it just now, and it is to be the engines' phase."""
        seen = self.phase()
        if seen.side is side and seen.number:
            writer.require()
            return True
        change = device_phase.begin_phase(self._keys, side, seen, self._etcd.get(self._keys.device_holder()),
                                       epoch=self._epoch, term=term)
        return change is not None and writer(*change)

    def take_for_trainer(self, group: str) -> str:
        """Writes that a formation of the trainer group holds memory; "" once it may take it, else what is missing."""
        seen = self.phase()
        if seen.side is not Side.TRAINER:
            self.close()
        held = self.holding() if seen.side is Side.TRAINER else []
        change = device_phase.take_for_trainer(self._keys, seen, held, group, epoch=self._epoch)
        if change is None:
            return f"{named(held)} to release memory" if seen.side is Side.TRAINER else "the engines' phase to end"
        writer = FencedWriter.of_epoch(self._etcd, self._keys, self._epoch)
        return "" if writer(*change) else "the devices: the phase has just changed"

    def give_up_for_trainer(self, group: str) -> None:
        """Writes that a formation of the trainer group holds no memory, unless another has taken its place."""
        writer = FencedWriter.of_epoch(self._etcd, self._keys, self._epoch)

        def read() -> device_phase.Change | None:
            return device_phase.give_up_for_trainer(self._keys, self._etcd.get(self._keys.device_holder()), group,
                                                   epoch=self._epoch)

        _until_written(writer, read)


def _until_written(writer: FencedWriter, read: Callable[[], device_phase.Change | None]) -> None:
    """Writes the change; one that was based on an outdated reading is made again. Ends: what it is based on is changed
    by no one but another formation, of which there are few."""
    while (change := read()) is not None and not writer(*change):
        pass


def named(engines: list[str]) -> str:
    """Engines for a text, a few by name."""
    more = f" and {len(engines) - _NAMED} more" if len(engines) > _NAMED else ""
    return f"engine {', '.join(sorted(engines)[:_NAMED])}{more}"
