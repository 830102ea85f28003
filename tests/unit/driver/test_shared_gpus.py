"""GPUs that trainer and engines share: on which hosts they are, and what becomes of holders, hosts and drivers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_rl.config import TrainerConfig
from elastic_rl.driver.formation import NO_ROOM_S, Plan
from elastic_rl.driver.hosts_of_ray import HostNode, RayHosts
from elastic_rl.driver.shared_gpus import SharedGpus
from elastic_rl.errors import Fenced
from elastic_rl.etcd.records import SharedDevices

OWN, EPOCH = "a", 3


@dataclass(eq=False)
class Held:
    """A holder as Ray would run it."""

    host: str
    count: int
    answer: tuple[str, ...] = ()
    reason: str = ""
    removed: bool = False
    is_silent: bool = False
    """Whether its process, which has the GPUs, does not answer yet."""

    @property
    def room(self) -> str:
        return f"GPU {self.count}"

    @property
    def node(self) -> str:
        return f"node-{self.host}" if self.answer else ""

    @property
    def lives(self) -> bool:
        return not self.removed and not self.reason

    def is_placed(self) -> bool:
        return bool(self.answer)

    def ended(self) -> str:
        return self.reason

    def gpus(self) -> tuple[str, ...]:
        return () if self.is_silent else self.answer

    def remove(self) -> None:
        self.removed = True


@dataclass
class Machine:
    """A cluster and the driver of a run on it, at times of the test's own. It is ``Holding``, too."""

    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(data_parallel=2))
    free: dict[str, list[str]] = field(default_factory=dict)
    """GPUs of each host that nobody has; Ray gives them to holders where ``gives`` is set."""
    spreads: bool = True
    per_engine: int = 1
    gives: bool = True
    now: float = 0.0
    holders: list[Held] = field(default_factory=list)
    written: SharedDevices | None = None
    refuses: bool = False
    closed: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    joining: bool = False
    is_stale: bool = False
    are_silent: bool = False
    """Whether new holders do not answer."""
    without_cpus: str = ""
    """A host whose GPUs are free, and on which Ray places nothing for want of something else."""

    def __post_init__(self) -> None:
        self.next_driver()

    def next_driver(self) -> None:
        self.shared = SharedGpus(self.trainer, OWN, self, may_spread=self.spreads,  # type: ignore[arg-type]
                                 per_engine=self.per_engine, clock=lambda: self.now)

    # -- Holding --------------------------------------------------------------------------------------------------
    def adopt(self) -> list[tuple[str, Held]]:
        return [(held.host, held) for held in self.holders if held.lives]

    def require(self) -> None:
        if self.is_stale:
            raise Fenced("a newer driver has begun")

    def hold(self, host: str, count: int) -> Held:
        if self.refuses:
            raise RuntimeError("Ray is away")
        self.holders.append(Held(host, count, is_silent=self.are_silent))
        return self.holders[-1]

    def recorded(self) -> SharedDevices | None:
        return self.written

    def record(self, gpus: Mapping[str, Sequence[str]], data_parallel: int) -> None:
        assert self.written is None, "it is decided once"
        for host, ids in gpus.items():
            assert any(held.lives and held.host == host and set(ids) == set(held.answer) for held in self.holders)
        self.written = SharedDevices(epoch=EPOCH, gpus={host: list(ids) for host, ids in gpus.items()},
                                     data_parallel=data_parallel)

    def close(self, holders: Collection[Held]) -> None:
        for held in holders:
            held.removed = True

    # -- the cluster ----------------------------------------------------------------------------------------------
    def hosts(self) -> RayHosts:
        alive = self.free.keys() - self.lost
        return RayHosts(nodes={host: HostNode(f"node-{host}", "", len(self.free[host])) for host in alive},
                        open=frozenset(alive - self.closed), closed=frozenset(self.closed | self.lost),
                        lost=frozenset(self.lost), looked_at=self.now)

    def give(self) -> None:
        """Ray takes back what removed holders had, and places those that wait."""
        for held in self.holders:
            if held.answer and not held.lives:
                if held.host in self.free:
                    self.free[held.host] = sorted([*self.free[held.host], *held.answer])
                held.answer = ()
        for held in self.holders:
            ids = self.free.get(held.host, [])
            if held.lives and not held.answer and held.host not in {*self.lost, self.without_cpus} and (
                    len(ids) >= held.count):
                held.answer, self.free[held.host] = tuple(ids[:held.count]), ids[held.count:]

    def passes(self, seconds: int = 120) -> None:
        for _ in range(seconds):
            self.now += 1
            self.shared.reconcile(self.hosts(), holds=self.joining)
            if self.gives:
                self.give()

    def living(self) -> dict[str, Held]:
        found = [held for held in self.holders if held.lives]
        assert len({held.host for held in found}) == len(found), "one for each host"
        return {held.host: held for held in found}

    def kill(self, host: str) -> None:
        self.living()[host].reason = "killed"


def gpus_of(**counts: int) -> dict[str, list[str]]:
    return {host: [f"{i}" for i in range(count)] for host, count in counts.items()}


def one_host() -> Machine:
    """Whose holder gets no GPUs until the test says so."""
    return Machine(spreads=False, gives=False)


# -- one host --------------------------------------------------------------------------------------------------------
def holds(machine: Machine, *gpus: str) -> None:
    """The first holder gets its GPUs at once."""
    machine.passes(1)
    machine.holders[0].answer = gpus
    machine.passes(1)


def test_holder_that_ends_before_it_answers_is_replaced() -> None:
    machine = one_host()
    machine.passes()
    assert len(machine.holders) == 1 and "no room on the host of the run for GPU 2" in machine.shared.waiting
    assert machine.shared.plan is None
    machine.holders[0].reason = "killed"
    machine.passes()
    assert machine.holders[0].removed and len(machine.holders) == 2
    machine.holders[1].answer = ("4", "5")
    machine.passes(1)
    assert machine.shared.gpus() == {OWN: ("4", "5")} and not machine.shared.waiting
    assert machine.shared.plan == Plan({OWN: 2}, 2)


def test_holder_that_ends_later_is_replaced_and_the_gpus_stay() -> None:
    machine = one_host()
    holds(machine, "4", "5")
    machine.holders[0].reason = "killed"
    machine.passes(5)
    assert len(machine.holders) == 2 and machine.shared.gpus() == {} and "held again" in machine.shared.waiting
    machine.holders[1].answer = ("5", "4")
    machine.passes()
    assert machine.shared.gpus() == {OWN: ("4", "5")} and not machine.shared.lost


@pytest.mark.parametrize("by_the_next_driver", [False, True])
def test_other_gpus_than_those_in_use_are_reported(by_the_next_driver: bool) -> None:
    machine = one_host()
    holds(machine, "4", "5")
    machine.holders[0].reason = "killed"
    if by_the_next_driver:
        machine.next_driver()
        machine.passes(1)
        assert machine.shared.plan is None, "nothing more is started on them"
    machine.passes(5)
    machine.holders[1].answer = ("4", "6")
    machine.passes()
    assert "4,6 of a in place of 4,5" in machine.shared.lost


def test_holders_that_end_at_once_are_replaced_ever_more_slowly() -> None:
    machine = one_host()
    for _ in range(600):
        machine.passes(1)
        for held in machine.holders:
            held.reason = "killed"
    assert 6 <= len(machine.holders) <= 40


def test_holder_that_cannot_be_made_is_tried_again() -> None:
    machine = one_host()
    machine.refuses = True
    with pytest.raises(RuntimeError, match="Ray is away"):
        machine.passes(1)
    machine.refuses = False
    machine.passes()
    assert len(machine.holders) == 1


def test_run_that_may_not_spread_waits_on_its_host_though_others_have_room() -> None:
    machine = Machine(free=gpus_of(a=1, b=8), spreads=False)
    machine.passes()
    assert machine.living().keys() == {OWN} and "no room on the host of the run" in machine.shared.waiting
    assert not machine.shared.can_move(machine.hosts())


# -- several hosts ---------------------------------------------------------------------------------------------------
def trainer(**settings: Any) -> TrainerConfig:
    return TrainerConfig(**settings)


def test_gpus_are_on_as_many_hosts_as_the_trainer_needs_and_the_next_driver_has_the_same() -> None:
    machine = Machine(trainer(data_parallel=6), gpus_of(a=4, b=2, c=1))
    machine.passes(3)
    assert machine.shared.plan == Plan({"a": 4, "b": 2}, 6)
    assert machine.shared.gpus() == {"a": ("0", "1", "2", "3"), "b": ("0", "1")}
    before = machine.living()
    machine.free["c"] = ["7", "8", "9"]
    machine.kill("b")
    machine.next_driver()
    machine.passes()
    assert machine.shared.plan == Plan({"a": 4, "b": 2}, 6) and machine.living()["a"] is before["a"]
    assert machine.living().keys() == {"a", "b"} and not machine.shared.lost


def test_smaller_group_is_planned_once_no_host_is_joining() -> None:
    machine = Machine(trainer(data_parallel=4, min_data_parallel=1), gpus_of(a=1, b=1), joining=True)
    machine.passes(3)
    assert not machine.holders and "hosts that join" in machine.shared.waiting
    machine.joining = False
    machine.passes(3)
    assert machine.shared.plan == Plan({"a": 1, "b": 1}, 2)
    machine.free["c"] = ["0", "1"]
    machine.passes()
    assert machine.shared.plan == Plan({"a": 1, "b": 1}, 2), "a run grows in its next epoch"


def test_nothing_is_held_while_the_least_group_has_no_room() -> None:
    machine = Machine(trainer(tensor_parallel=2, data_parallel=2), gpus_of(a=3, b=1))
    machine.passes()
    assert not machine.holders and "room for 4 ranks" in machine.shared.waiting
    machine.free["b"] = ["0", "1"]
    machine.passes(3)
    assert machine.shared.plan == Plan({"a": 2, "b": 2}, 2)


@pytest.mark.parametrize(("free", "ranks"), [
    ({"a": 5, "b": 4}, {"a": 4, "b": 2}),  # the two on b have no engine, and would have none on a
    ({"a": 4, "b": 2}, {"a": 4, "b": 2}), ({"a": 3, "b": 3}, None), ({"a": 6}, {"a": 6}),
    ({"a": 3, "c": 4}, {"c": 4, "a": 2})])  # that of the run is not the first one then
def test_engine_has_all_its_gpus_on_one_host(free: dict[str, int], ranks: dict[str, int] | None) -> None:
    machine = Machine(trainer(data_parallel=6), gpus_of(**free), per_engine=4)
    machine.passes(3)
    assert (machine.shared.plan.ranks if machine.shared.plan else None) == ranks
    assert ranks or "room for 6 ranks, of these 4 on one host" in machine.shared.waiting


def test_plan_whose_host_is_lost_or_closed_before_anything_runs_is_made_anew() -> None:
    for gone in ("lost", "closed"):
        machine = Machine(gives=False, trainer=trainer(data_parallel=4), free=gpus_of(a=2, b=2, c=2))
        machine.passes(1)
        assert machine.living().keys() == {"a", "b"}
        getattr(machine, gone).add("b")
        machine.gives = True
        machine.passes(10)
        assert machine.shared.plan == Plan({"a": 2, "c": 2}, 4) and not machine.shared.lost


def test_plan_that_gets_no_room_is_dropped_and_leaves_the_full_host_out() -> None:
    machine = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2, c=2))
    machine.gives = False
    machine.passes(1)
    machine.free["b"], machine.gives = ["0"], True  # somebody was faster
    machine.passes(3)
    assert machine.shared.plan is None and "no room for GPU 2 on b" in machine.shared.waiting
    machine.passes(int(NO_ROOM_S) + 5)
    assert machine.shared.plan == Plan({"a": 2, "c": 2}, 4) and machine.living().keys() == {"a", "c"}


def test_host_with_free_gpus_that_gets_nothing_is_left_out_for_a_while_where_others_are_enough() -> None:
    machine = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2, c=2), without_cpus="b")
    machine.passes(100)
    assert machine.shared.plan == Plan({"a": 2, "c": 2}, 4)


def test_next_driver_keeps_what_fits_of_a_plan_that_was_not_finished() -> None:
    machine = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2, c=1), without_cpus="b")
    machine.passes(2)
    first = machine.living()
    assert first.keys() == {"a", "b"} and first["a"].is_placed()
    machine.next_driver()
    machine.without_cpus = ""
    machine.passes(5)
    assert machine.shared.plan == Plan({"a": 2, "b": 2}, 4) and machine.living() == first

    other = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2), without_cpus="b")
    other.passes(2)
    other.free["a"] = ["2", "3"]
    other.next_driver()
    other.passes(5)
    assert other.shared.plan == Plan({"a": 4}, 4) and other.shared.gpus() == {"a": ("0", "1", "2", "3")}
    assert other.living().keys() == {"a"}


def test_gpus_of_a_holder_that_ends_before_all_are_there_are_not_those_of_the_epoch() -> None:
    machine = Machine(trainer(data_parallel=4), gpus_of(a=3, b=2), gives=False)
    machine.passes(1)
    machine.holders[0].answer = ("0", "1")
    machine.passes(1)
    machine.kill("a")
    machine.passes(1)
    machine.holders[1].answer = ("0", "1")
    machine.passes(1)
    assert machine.shared.plan is None
    machine.passes(10)
    machine.living()["a"].answer = ("1", "2")
    machine.passes(1)
    assert machine.shared.gpus() == {"a": ("1", "2"), "b": ("0", "1")} and not machine.shared.lost


def test_holder_that_has_its_gpus_and_answers_late_has_room() -> None:
    machine = Machine(trainer(data_parallel=4, min_data_parallel=2), gpus_of(a=2, b=2, c=2), are_silent=True)
    machine.passes(3 * int(NO_ROOM_S))
    assert len(machine.holders) == 2 and machine.shared.plan is None
    for held in machine.holders:
        held.is_silent = False
    machine.passes(2)
    assert machine.shared.plan == Plan({"a": 2, "b": 2}, 4) and len(machine.holders) == 2


def test_nothing_is_started_on_gpus_that_nobody_holds_and_the_epoch_ends_where_they_do_not_come_back() -> None:
    machine = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2))
    machine.passes(3)
    assert machine.shared.plan is not None and not machine.shared.waiting
    machine.kill("b")
    machine.give()
    machine.free["b"] = ["0"]  # somebody was faster
    machine.passes(5)
    assert machine.shared.plan is None and machine.shared.gpus() == {} and not machine.shared.lost
    assert machine.shared.waiting == "the shared GPUs of b, to be held again"
    machine.free["b"] = ["0", "1"]
    machine.passes(3)
    assert machine.shared.plan == Plan({"a": 2, "b": 2}, 4) and not machine.shared.waiting

    machine.kill("b")
    machine.give()
    nodes = machine.free.pop("b")  # its node of Ray is away, which says nothing about its GPUs
    machine.passes(3 * int(NO_ROOM_S))
    assert not machine.shared.lost
    machine.free["b"] = nodes[:1]
    machine.passes(int(NO_ROOM_S) + 2)
    assert machine.shared.lost == "Ray does not give the GPUs of b back"


def test_stale_driver_removes_no_holder() -> None:
    machine = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2), gives=False)
    machine.passes(1)
    machine.is_stale = True
    with pytest.raises(Fenced):
        machine.passes(2 * int(NO_ROOM_S))
    assert all(held.lives for held in machine.holders)


def test_holders_of_a_plan_that_was_dropped_are_removed_by_the_next_driver() -> None:
    machine = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2, c=2))
    machine.passes(3)
    left, twice = machine.hold("c", 2), machine.hold("a", 1)
    machine.give()
    machine.next_driver()
    machine.passes(2)
    assert left.removed and twice.removed and machine.living().keys() == {"a", "b"}
    assert machine.shared.plan == Plan({"a": 2, "b": 2}, 4)


def test_plan_is_made_from_a_reading_of_the_hosts_alone() -> None:
    machine = Machine(trainer(data_parallel=2, min_data_parallel=1), gpus_of(a=2))
    machine.shared.reconcile(RayHosts())
    assert not machine.holders and "Ray to say" in machine.shared.waiting


def test_two_parts_that_each_hold_what_the_other_lacks_do_not_wait_for_ever() -> None:
    first = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2))
    first.gives = False
    first.passes(1)
    first.free["b"], first.gives = [], True
    first.passes(3)
    assert first.free["a"] == [], "it holds what the other one lacks"
    first.passes(int(NO_ROOM_S) + 1)
    assert first.free["a"] == ["0", "1"] and not first.living()


def test_loss_of_a_host_ends_the_epoch_and_that_of_the_runs_own_is_not_its_to_say() -> None:
    machine = Machine(trainer(data_parallel=4), gpus_of(a=2, b=2, c=2))
    machine.passes(3)
    machine.lost = {"a", "c"}
    machine.passes(1)
    assert not machine.shared.lost
    machine.lost = {"b"}
    machine.next_driver()
    machine.passes(1)
    assert "b is lost" in machine.shared.lost


def test_drained_host_is_left_where_another_has_room() -> None:
    machine = Machine(trainer(data_parallel=4, min_data_parallel=4), gpus_of(a=2, b=2, c=1))
    machine.passes(3)
    machine.closed.add("b")
    machine.passes(5)
    assert not machine.shared.can_move(machine.hosts())
    machine.kill("a")
    machine.passes(3)
    before = replace(machine.hosts(), nodes={host: HostNode("", "", 2) for host in "ac"}, looked_at=machine.now - 3)
    assert machine.living()["a"].is_placed() and not machine.shared.can_move(before), "a's two are free no more"
    machine.passes(5)
    machine.free["c"] = ["0", "1"]
    assert machine.shared.can_move(machine.hosts()) and not machine.shared.lost
    machine.shared.leave("b is drained")
    machine.passes(1)
    assert machine.shared.lost == "b is drained"


# -- any order -------------------------------------------------------------------------------------------------------
class Epoch(RuleBasedStateMachine):
    """Whatever becomes of hosts, holders, drivers and the GPUs of others: GPUs that were once in use are those of the
    epoch to its end, no holder is left over, and with room and time there is a plan."""

    @initialize(counts=st.lists(st.integers(0, 4), min_size=1, max_size=4), least=st.integers(1, 4),
                tp=st.integers(1, 2), per_engine=st.integers(1, 2))
    def begin(self, counts: list[int], least: int, tp: int, per_engine: int) -> None:
        self.machine = Machine(trainer(data_parallel=4, min_data_parallel=least, tensor_parallel=tp),
                               gpus_of(**dict(zip("abcd", counts, strict=False))), per_engine=per_engine)
        self.first: SharedDevices | None = None
        self.others: list[tuple[str, str]] = []

    @rule(seconds=st.integers(1, 40))
    def passes(self, seconds: int) -> None:
        self.machine.passes(seconds)

    @rule(gives=st.booleans())
    def ray_gives(self, gives: bool) -> None:
        self.machine.gives = gives

    @rule()
    def next_driver(self) -> None:
        self.machine.next_driver()

    @precondition(lambda self: any(self.machine.free.values()))
    @rule(data=st.data())
    def another_takes_a_gpu(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(host for host, ids in self.machine.free.items() if ids)))
        self.others.append((host, self.machine.free[host].pop(0)))

    @precondition(lambda self: self.others)
    @rule()
    def another_gives_a_gpu(self) -> None:
        host, gpu = self.others.pop()
        self.machine.free[host] = sorted([*self.machine.free[host], gpu])

    @precondition(lambda self: self.machine.living())
    @rule(data=st.data())
    def holder_is_killed(self, data: st.DataObject) -> None:
        self.machine.kill(data.draw(st.sampled_from(sorted(self.machine.living()))))

    @rule(host=st.sampled_from("bcd"), closed=st.booleans())
    def host_is_closed_or_opened(self, host: str, closed: bool) -> None:
        (self.machine.closed.add if closed else self.machine.closed.discard)(host)

    @precondition(lambda self: not self.machine.lost)
    @rule(host=st.sampled_from("bcd"))
    def host_is_lost(self, host: str) -> None:
        self.machine.lost.add(host)
        for held in self.machine.holders:
            if held.host == host and held.lives:
                held.reason = "its node has died"

    @invariant()
    def what_is_in_use_stays(self) -> None:
        if not hasattr(self, "machine"):
            return
        machine = self.machine
        self.first = self.first or machine.written
        assert machine.written == self.first
        if self.first is None:
            assert machine.shared.gpus() == {} and not machine.shared.lost
            return
        counts = {host: len(ids) for host, ids in self.first.gpus.items()}
        sizes = machine.trainer
        assert sum(counts.values()) == self.first.data_parallel * sizes.tensor_parallel
        assert (sizes.min_data_parallel or 4) <= self.first.data_parallel <= 4
        assert all(count % sizes.tensor_parallel == 0 for count in counts.values())
        assert max(counts.values()) >= machine.per_engine
        if machine.shared.plan is not None:  # else a new driver has not looked
            assert machine.shared.plan == Plan(counts, self.first.data_parallel)
            assert {host: list(ids) for host, ids in machine.shared.gpus().items()} == self.first.gpus
        assert machine.living().keys() <= counts.keys()
        if machine.shared.lost:
            assert machine.lost & counts.keys() or "in place of" in machine.shared.lost or (
                "does not give the GPUs" in machine.shared.lost)

    def teardown(self) -> None:
        """With rest there is a plan where there is room, and it is held."""
        if not hasattr(self, "machine"):
            return
        machine = self.machine
        machine.gives, machine.closed = True, set()
        if machine.written is None:
            machine.free["a"] = [*machine.free["a"], *(f"new-{i}" for i in range(8))]
            machine.passes(300)
            assert machine.written is not None and machine.shared.waiting == ""
        elif not machine.shared.lost and not machine.lost & machine.written.gpus.keys():
            for host, gpu in self.others:
                machine.free[host].append(gpu)
            machine.passes(300)
            assert machine.living().keys() == machine.written.gpus.keys()


TestEpoch = Epoch.TestCase
