"""Phases of colocated engines and trainer: no order of readings, writes and crashes gives both sides device memory, and
whatever happened, the side whose phase it is gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.budget import seeds

from elastic_rl.etcd import device_phase
from elastic_rl.etcd.device_phase import Change, DeviceHolder, DevicePhase, SeenPhase, Side
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.etcd.transaction import Compare, KeyValue, Op

KEYS = Keys("t")
ENGINES = ("rollout-a", "rollout-b")


class Store:
    """Keys of etcd, and its transactions."""

    def __init__(self) -> None:
        self.revision, self.kvs = 0, dict[str, KeyValue]()

    def get(self, key: str) -> KeyValue | None:
        return self.kvs.get(key)

    def txn(self, compares: Sequence[Compare], ops: Sequence[Op]) -> bool:
        if not all(c.holds(self.get(c.key)) for c in compares):
            return False
        self.revision += 1
        for op in ops:
            before = self.kvs.pop(op.key, None)
            if op.kind == "put":
                self.kvs[op.key] = KeyValue(op.key, op.data, before.create_revision if before else self.revision,
                                            self.revision, before.version + 1 if before else 1, 0)
        return True


class PhaseMachine(RuleBasedStateMachine):
    """Readings and writes are steps of their own, so that anything may come between them. ``memory``: what processes
    really have, by the name of an engine or of a formation of the trainer."""

    @initialize()
    def begin(self) -> None:
        self.store, self.memory = Store(), set[str]()
        self.epoch, self.wanted, self.group, self.formed = 1, Side.TRAINER, "", 0
        self.decided: dict[str, Change] = {}
        self.running: set[str] = set()

    # -- what processes read and write
    def seen(self) -> SeenPhase:
        return SeenPhase.of(self.store.get(KEYS.device_phase()), self.epoch)

    def records(self) -> list[Engine]:
        return [Engine.decode(kv.value) for e in ENGINES if (kv := self.store.get(KEYS.engine(e)))]

    def record(self, engine: str, *, holds: bool) -> Op:
        return Op.put(KEYS.engine(engine), Engine(
            id=engine, pool="rollout", state=EngineState.STARTING, epoch=self.epoch, holds_device=holds).encode())

    def write(self, process: str) -> bool:
        return process in self.decided and self.store.txn(*self.decided.pop(process))

    # -- the actor
    @rule(side=st.sampled_from(Side))
    def actor_reads(self, side: Side) -> None:
        change = device_phase.begin_phase(KEYS, side, self.seen(), self.store.get(KEYS.device_holder()),
                                       epoch=self.epoch, term=1)
        self.decided.pop("actor", None)  # of a predecessor: its term is over
        if change is not None:
            self.decided["actor"] = change

    @rule()
    def actor_writes(self) -> None:
        self.write("actor")

    @rule()
    def phase_becomes_unreadable(self) -> None:
        self.store.txn([], [Op.put(KEYS.device_phase(), b"?")])

    # -- engines
    @rule(engine=st.sampled_from(ENGINES))
    def engine_starts(self, engine: str) -> None:
        if engine not in self.running:
            self.running.add(engine)
            self.store.txn([], [self.record(engine, holds=False)])

    @rule(engine=st.sampled_from(ENGINES))
    def engine_reads(self, engine: str) -> None:
        guards = device_phase.take_for_engine(KEYS, self.seen())
        if engine in self.running and engine not in self.memory and guards is not None:
            self.decided[engine] = guards, [self.record(engine, holds=True)]

    @rule(engine=st.sampled_from(ENGINES))
    def engine_takes(self, engine: str) -> None:
        if self.write(engine):
            self.memory.add(engine)

    @rule(engine=st.sampled_from(ENGINES))
    def engine_gives_up(self, engine: str) -> None:
        if engine in self.memory and self.seen().side is Side.TRAINER:
            self.memory.discard(engine)
            self.store.txn([], [self.record(engine, holds=False)])

    @rule(engine=st.sampled_from(ENGINES))
    def engine_dies(self, engine: str) -> None:
        self.running.discard(engine)
        self.memory.discard(engine)
        self.decided.pop(engine, None)

    @rule(engine=st.sampled_from(ENGINES))
    def driver_deletes_the_record_of_a_dead_engine(self, engine: str) -> None:
        if engine not in self.running:
            self.store.txn([], [Op.delete(KEYS.engine(engine))])

    # -- the trainer group
    @rule()
    def group_forms_in_the_place_of_another(self) -> None:
        self.memory.discard(self.group)
        self.decided.pop("trainer", None)
        self.formed += 1
        self.group = f"group-{self.formed}"

    @precondition(lambda self: self.group)
    @rule()
    def group_reads(self) -> None:
        """Also one that has memory: it is told to take it before each of the trainer's phases."""
        seen = self.seen()
        change = device_phase.take_for_trainer(KEYS, seen, device_phase.holding(self.records(), self.epoch), self.group,
                                              epoch=self.epoch)
        if change is not None:
            self.decided["trainer"] = change

    @precondition(lambda self: self.group)
    @rule()
    def group_takes(self) -> None:
        if self.write("trainer"):
            self.memory.add(self.group)

    @precondition(lambda self: self.group in self.memory)
    @rule(late=st.booleans())
    def group_gives_up(self, late: bool) -> None:
        """As the actor's command, at any time. ``late``: it is lost before it is written."""
        self.memory.discard(self.group)
        change = device_phase.give_up_for_trainer(KEYS, self.store.get(KEYS.device_holder()), self.group,
                                                 epoch=self.epoch)
        if change is not None and not late:
            assert self.store.txn(*change)

    # -- all of it
    @rule()
    def driver_is_replaced(self) -> None:
        """All of the compute plane dies with it, and a new epoch begins."""
        self.memory.clear()
        self.running.clear()
        self.decided.clear()
        self.group = ""
        self.epoch += 1
        for engine in ENGINES:
            self.store.txn([], [Op.delete(KEYS.engine(engine))])

    @invariant()
    def never_both(self) -> None:
        if hasattr(self, "memory"):
            assert not (self.memory & set(ENGINES) and self.memory - set(ENGINES)), self.memory

    @invariant()
    def who_has_memory_is_on_record(self) -> None:
        if hasattr(self, "memory"):
            held = set(device_phase.holding(self.records(), self.epoch))
            assert self.memory & set(ENGINES) <= held
            group = device_phase.held_by(self.store.get(KEYS.device_holder()), self.epoch)
            assert self.memory - set(ENGINES) <= {group}

    @rule(side=st.sampled_from(Side))
    def side_whose_phase_it_is_gets_memory_when_all_do_their_part(self, side: Side) -> None:
        """From wherever it is: the actor wants this side, and every process does what it is there for."""
        self.decided.clear()
        if not self.group:
            self.group_forms_in_the_place_of_another()
        for engine in ENGINES:
            self.driver_deletes_the_record_of_a_dead_engine(engine)
            self.engine_starts(engine)
        if side is Side.ENGINES:
            if device_phase.held_by(self.store.get(KEYS.device_holder()), self.epoch) not in ("", self.group):
                self.actor_reads(Side.TRAINER)  # it holds for a formation that has ended: the next one takes its place
                self.actor_writes()
                for engine in ENGINES:
                    self.engine_gives_up(engine)
                self.group_reads()
                self.group_takes()
            self.memory.discard(self.group)
            change = device_phase.give_up_for_trainer(KEYS, self.store.get(KEYS.device_holder()), self.group,
                                                     epoch=self.epoch)
            assert change is None or self.store.txn(*change)
            self.actor_reads(Side.ENGINES)
            self.actor_writes()
            for engine in ENGINES:
                self.engine_reads(engine)
                self.engine_takes(engine)
            assert self.memory == set(ENGINES)
        else:
            self.actor_reads(Side.TRAINER)
            self.actor_writes()
            for engine in ENGINES:
                self.engine_gives_up(engine)
                if engine not in self.memory:
                    self.store.txn([], [self.record(engine, holds=False)])
            self.group_reads()
            self.group_takes()
            assert self.memory == {self.group}


PhaseMachine.TestCase.settings = settings(max_examples=seeds(40), stateful_step_count=40, deadline=None)
TestPhases = PhaseMachine.TestCase
Step = Callable[[PhaseMachine], None]


ACTORS = ((Side.TRAINER,), (Side.ENGINES,), (Side.TRAINER, Side.ENGINES), (Side.ENGINES, Side.TRAINER))


def interleavings(*programs: Sequence[Step]) -> Iterator[list[Step]]:
    """Every order of the steps of some programs that keeps the order of each."""
    if not any(programs):
        yield []
    for i, program in enumerate(programs):
        if program:
            for rest in interleavings(*programs[:i], program[1:], *programs[i + 1:]):
                yield [program[0], *rest]


@pytest.mark.parametrize("phases", ACTORS, ids=lambda phases: " then ".join(phases))
@pytest.mark.parametrize("start", Side)
@pytest.mark.parametrize("holds", [False, True])
def test_no_order_of_readings_and_writes_gives_both_sides_memory(phases: Sequence[Side], start: Side, holds: bool
                                                                ) -> None:
    """All orders of an actor that begins phases, an engine and a group that each take memory; ``holds``: the side whose
    phase it is at the start has taken it."""
    engine = ENGINES[0]
    actor: list[Step] = []
    for side in phases:
        actor += [partial(PhaseMachine.actor_reads, side=side), PhaseMachine.actor_writes]
    takes = partial(PhaseMachine.engine_reads, engine=engine), partial(PhaseMachine.engine_takes, engine=engine)
    outcomes = set()
    for order in interleavings(actor, takes, (PhaseMachine.group_reads, PhaseMachine.group_takes)):
        world = PhaseMachine()
        world.begin()
        world.engine_starts(engine)
        world.group_forms_in_the_place_of_another()
        world.actor_reads(start)
        world.actor_writes()
        if holds and start is Side.ENGINES:
            world.engine_reads(engine)
            world.engine_takes(engine)
        elif holds:
            world.group_reads()
            world.group_takes()
        for step in order:
            step(world)
            world.never_both()
            world.who_has_memory_is_on_record()
        outcomes.add(frozenset(world.memory))
    assert outcomes - {frozenset()}, "nobody ever took memory"


def kv(key: str, value: bytes, revision: int = 7) -> KeyValue:
    return KeyValue(key, value, 1, revision, 1, 0)


def test_trainer_has_the_phase_without_a_record_of_this_epoch() -> None:
    phase = DevicePhase(side=Side.ENGINES, epoch=3, term=1, number=4)
    assert SeenPhase.of(None, 3) == SeenPhase(Side.TRAINER)
    assert SeenPhase.of(kv("k", phase.encode()), 4) == SeenPhase(Side.TRAINER, revision=7)
    assert SeenPhase.of(kv("k", phase.encode()), 3) == SeenPhase(Side.ENGINES, 4, 7)


def test_phase_of_an_unreadable_record_or_unknown_side_is_nobodys() -> None:
    newer = DevicePhase(side=Side("critic"), epoch=3, number=4).encode()
    for raw in (b"?", newer):
        seen = SeenPhase.of(kv("k", raw), 3)
        assert seen == SeenPhase(None, revision=7)
        assert device_phase.take_for_engine(KEYS, seen) is None
        assert device_phase.take_for_trainer(KEYS, seen, (), "g", epoch=3) is None
        begun = device_phase.begin_phase(KEYS, Side.TRAINER, seen, None, epoch=3, term=2)
        assert begun is not None, "only it may write"


def test_holder_that_cannot_be_read_keeps_the_phase_from_the_engines() -> None:
    seen = SeenPhase(Side.TRAINER, 1, 5)
    assert device_phase.begin_phase(KEYS, Side.ENGINES, seen, kv("h", b"?"), epoch=3, term=2) is None
    old = DeviceHolder(group="g", epoch=2).encode()
    assert device_phase.begin_phase(KEYS, Side.ENGINES, seen, kv("h", old), epoch=3, term=2) is not None


def test_formation_clears_its_own_memory_from_the_record_only() -> None:
    mine = kv("h", DeviceHolder(group="g", epoch=3).encode())
    assert device_phase.give_up_for_trainer(KEYS, mine, "g", epoch=3) is not None
    assert device_phase.give_up_for_trainer(KEYS, mine, "other", epoch=3) is None
    assert device_phase.give_up_for_trainer(KEYS, None, "g", epoch=3) is None
