"""Decides which side, engines or trainer, may have device memory where they share devices (``placement: colocated``).
Pure.

One record says whose phase it is, and only the actor writes it. It moves no memory: each side is level-triggered. A
side whose phase is over gives its memory up; a side whose phase has come takes memory once the other side has none.
What a process may have it writes down *before* it takes it, and clears *after* it has given it up:

    an engine         ``Engine.holds_device``, in its own record, which the driver deletes with a dead engine
    the trainer group ``DeviceHolder``, one record

Never both. Each change is a transaction with comparisons on what it was decided on, so that it cannot come too late:

    phase → trainer     always (engines then give their memory up)
    phase → engines     if no trainer group holds memory                       (compares the holder)
    an engine takes     if it is the engines' phase                            (compares the phase)
    the trainer takes   if it is the trainer's phase and no engine holds any   (compares the phase)

While it is the engines' phase no trainer can take, and the phase could only become theirs while none held. While it is
the trainer's phase no engine can take, so that engines that were seen to hold nothing hold nothing.

Progress. Nothing waits for a process that is gone: the record of a dead engine is deleted by its driver, which also
kills one that does not give up within a limit; a group that re-forms takes the place of the holder before it, whose
ranks have ended; a replaced actor begins a phase of the trainer, whatever phase it was. Without a record, and by one
of an earlier epoch, all of whose processes have ended, it is the trainer's phase. A phase that cannot be read is
nobody's: all stay as they are until the actor writes the next one. A holder that cannot be read counts as one, until
the trainer takes memory again, as the actor has it do before each of its phases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elastic_rl.etcd.decoding import decode_bytes
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.record import OpenEnum, Record
from elastic_rl.etcd.records import Engine
from elastic_rl.etcd.transaction import Compare, KeyValue, Op

Change = tuple[Sequence[Compare], Sequence[Op]]
"""Comparisons and writes of a transaction; the writer adds its fencing token."""


class Side(OpenEnum):
    TRAINER = "trainer"
    ENGINES = "engines"


class DevicePhase(Record):
    """Written by the actor of ``term`` in the run's ``epoch``; ``number`` counts phases within the epoch."""

    side: Side
    epoch: int
    term: int = 0
    number: int = 0


class DeviceHolder(Record):
    """The trainer group that may have device memory, by its formation; ``epoch``: the epoch of the run."""

    group: str
    epoch: int


@dataclass(frozen=True)
class SeenPhase:
    """The phase as it was read. ``side``: None if the record cannot be read."""

    side: Side | None
    number: int = 0
    revision: int = 0
    """Revision of the record's last change; 0 without one."""

    @classmethod
    def of(cls, kv: KeyValue | None, epoch: int) -> SeenPhase:
        if kv is None:
            return cls(Side.TRAINER)
        phase = decode_bytes(kv.value, DevicePhase)
        if phase is None or not phase.side.known:
            return cls(None, revision=kv.mod_revision)
        if phase.epoch != epoch:
            return cls(Side.TRAINER, revision=kv.mod_revision)
        return cls(phase.side, phase.number, kv.mod_revision)

    def unchanged(self, keys: Keys) -> Compare:
        """The condition that it is still this phase."""
        return Compare.mod(keys.device_phase(), "==", self.revision)


def holding(engines: Iterable[Engine], epoch: int) -> list[str]:
    """Engines of this epoch that may have device memory; those of an earlier one have ended with their driver."""
    return [e.id for e in engines if e.holds_device and e.epoch == epoch]


def held_by(kv: KeyValue | None, epoch: int) -> str:
    """The formation of the trainer group that may have device memory; "" for none, "?" for a record that cannot be
    read."""
    if kv is None:
        return ""
    holder = decode_bytes(kv.value, DeviceHolder)
    if holder is None:
        return "?"
    return holder.group if holder.epoch == epoch else ""


def begin_phase(keys: Keys, side: Side, seen: SeenPhase, holder: KeyValue | None, *, epoch: int, term: int
              ) -> Change | None:
    """What the actor writes to begin a phase; None while a trainer group holds memory, and the phase is to be the
    engines'."""
    put = Op.put(keys.device_phase(), DevicePhase(side=side, epoch=epoch, term=term, number=seen.number + 1).encode())
    if side is Side.TRAINER:
        return [], [put]
    if held_by(holder, epoch):
        return None
    return [Compare.mod(keys.device_holder(), "==", holder.mod_revision if holder else 0)], [put]


def take_for_engine(keys: Keys, seen: SeenPhase) -> Sequence[Compare] | None:
    """The conditions under which an engine writes that it holds memory; None while it may not."""
    return [seen.unchanged(keys)] if seen.side is Side.ENGINES else None


def take_for_trainer(keys: Keys, seen: SeenPhase, held: Collection[str], group: str, *, epoch: int) -> Change | None:
    """What a trainer group writes before it takes memory; None while it may not. ``held``: engines that may have
    memory, read after ``seen``."""
    if seen.side is not Side.TRAINER or held:
        return None
    return [seen.unchanged(keys)], [Op.put(keys.device_holder(), DeviceHolder(group=group, epoch=epoch).encode())]


def give_up_for_trainer(keys: Keys, holder: KeyValue | None, group: str, *, epoch: int) -> Change | None:
    """What a trainer group writes once it has no memory; None when there is nothing to write: another formation has
    taken its place, or none holds any."""
    if holder is None or held_by(holder, epoch) != group:
        return None
    return [Compare.mod(keys.device_holder(), "==", holder.mod_revision)], [Op.delete(keys.device_holder())]
