"""What an agent does with the processes of singletons, on files and processes of a model: whatever happens, one process
of a singleton at a time, of its newest generation, and none that has done its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.budget import seeds
from support.clock import Clock

from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.errors import PreflightFailed
from elastic_rl.etcd.cluster_records import Assignment, HostStatus, RunState
from elastic_rl.host.agent import singletons
from elastic_rl.host.agent.duties import AgentLease, KnownOrders, Order
from elastic_rl.host.agent.host_session import HostView
from elastic_rl.host.agent.restart_policy import RestartLimits
from elastic_rl.host.agent.singletons import Singletons
from elastic_rl.host.service_files import ServiceRecord

HOST, BOOT, NAME = "h", "boot", "driver/j"
FILE = "driver%2Fj"
TIMES = HostTimes()
LIMITS = RestartLimits(backoff_initial_s=1.0, backoff_max_s=4.0, stable_s=1000.0, budget=50)


class Files:
    """``ServiceFiles`` without files. ``left``: singletons whose processes have left something behind."""

    def __init__(self) -> None:
        self.records: dict[str, ServiceRecord] = {}
        self.left: set[str] = set()
        self.started: list[tuple[str, int]] = []
        self.cannot_start = False
        self.on_start: Callable[[], None] = lambda: None
        self.wrong: list[str] = []
        """What must not have been asked for."""

    def all(self) -> list[ServiceRecord]:
        return [self.records[name] for name in sorted(self.records)]

    def start(self, name: str, cmd: Sequence[str], *, log: Path, env: Mapping[str, str], generation: int,
              lock_s: float) -> int:
        before = self.records.get(name) or ServiceRecord(name)
        if before.running or name in self.left or before.completed and before.generation == generation:
            self.wrong.append(f"generation {generation} of {name} was started after {before}, left: {self.left}")
        if self.cannot_start:
            raise PreflightFailed("no such program")
        self.on_start()
        self.started.append((name, generation))
        self.records[name] = ServiceRecord(name, "", 1000 + len(self.started), running=True, generation=generation)
        self.left.add(name)
        return self.records[name].pid

    def end(self, name: str, *, completed: bool = False) -> None:
        now = self.records[name]
        self.records[name] = ServiceRecord(name, generation=now.generation, completed=completed or now.completed)

    def forget(self, name: str) -> None:
        if self.records[name].running or name in self.left:
            self.wrong.append(f"{name} was forgotten too early")
        del self.records[name]

    def end_leftovers(self, name: str) -> None:
        pass

    def mark(self, name: str) -> str:
        return name


class Executor:
    """Does what it is given when ``run`` is called: an end takes time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[None], Callable[..., None], tuple[Any, ...]]] = []

    def submit(self, work: Callable[..., None], *args: Any) -> Future[None]:
        future: Future[None] = Future()
        self._waiting.append((future, work, args))
        return future

    def run(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future, work, args in waiting:
            work(*args)
            future.set_result(None)


class World:
    """A host with one agent at a time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.files, self.clock = Files(), Clock(100.0)
        self.known, self.generation = KnownOrders(), 0
        self.lost_at: float | None = None
        self.swept: list[str] = []
        """Singletons of which what they have started was ended, because this host is not to run them."""
        patch.setattr(singletons.processes, "stop", self._stop)
        patch.setattr(singletons.processes, "sweep", lambda mark, variable, grace_s: self.files.left.discard(mark))
        patch.setattr(singletons, "ThreadPoolExecutor", lambda *_, **__: Executor())
        self.restart_agent()

    def restart_agent(self) -> None:
        self.granted_at = self.clock.now
        self.agent = Singletons(HOST, BOOT, self.files, Path, lambda *_: ["x"], TIMES,  # type: ignore[arg-type]
                                on_released=self.swept.append, limits=LIMITS, clock=self.clock)

    def _stop(self, pid: int, grace_s: float, descendants: bool) -> None:
        for name, record in list(self.files.records.items()):
            if record.pid == pid:
                self.files.end(name)

    def assign(self, host: str) -> None:
        self.generation += 1
        order = Order(Assignment(host=host, incarnation=BOOT), self.generation)
        self.known = self.known.updated(self.clock.now, self.generation, {NAME: order})

    @property
    def lease(self) -> AgentLease:
        return AgentLease(self.clock.now, self.granted_at) if self.lost_at is None else AgentLease(self.lost_at)

    def look(self) -> HostStatus:
        self.known = KnownOrders(self.clock.now, self.known.revision, self.known.orders)
        status = self.agent.look(HostView(self.lease, self.known, 7))
        assert not self.files.wrong
        return status

    def end_processes(self) -> None:
        self.agent._executor.run()  # type: ignore[attr-defined]

    def settle(self) -> HostStatus:
        """Looks until nothing is left to be done, with time for each restart."""
        for _ in range(8):
            self.look()
            self.end_processes()
            self.clock.now += LIMITS.backoff_max_s
        return self.look()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_singleton_that_has_said_that_its_work_is_done_is_not_restarted_by_any_agent(world: World) -> None:
    world.assign(HOST)
    world.settle()
    world.files.end(FILE, completed=True)
    for _ in range(2):
        assert world.settle().services[NAME].state is RunState.COMPLETED
        world.restart_agent()
    assert world.files.started == [(FILE, 1)]


def test_generation_after_one_that_has_done_its_work_is_started(world: World) -> None:
    """The job was resumed."""
    world.assign(HOST)
    world.settle()
    world.files.end(FILE, completed=True)
    world.assign(HOST)
    status = world.look().services[NAME]
    assert (status.state, status.generation, status.reason) == (RunState.ENDED, 2, "waits for the end of generation 1")
    assert world.settle().services[NAME].state is RunState.RUNNING and world.files.started == [(FILE, 1), (FILE, 2)]


def test_end_without_that_word_is_a_failure_that_is_counted(world: World) -> None:
    world.assign(HOST)
    for restarts in range(4):
        assert world.settle().services[NAME].restarts == restarts
        world.files.end(FILE)
        ended = world.look().services[NAME]
        assert (ended.state, ended.restarts, ended.pid) == (RunState.ENDED, restarts, 0)


def test_restart_after_several_ends_waits_for_its_backoff(world: World) -> None:
    world.assign(HOST)
    world.settle()
    for _ in range(2):
        world.files.end(FILE)
        for _ in range(3):
            status = world.look().services[NAME]
            world.end_processes()
    assert len(world.files.started) == 2 and "has ended 2 times in a row" in status.reason
    world.clock.now += LIMITS.backoff_initial_s
    world.look()
    assert len(world.files.started) == 3


def test_process_that_is_slow_to_end_is_not_ended_twice_at_once(world: World) -> None:
    world.assign(HOST)
    world.settle()
    world.assign("other")
    for _ in range(3):
        world.look()
    assert len(world.agent._executor._waiting) == 1  # type: ignore[attr-defined]


def test_end_by_the_self_fence_is_no_failure_of_the_singleton(world: World) -> None:
    world.assign(HOST)
    world.settle()
    world.lost_at = world.clock.now
    world.clock.now += TIMES.lease_ttl_s
    world.look()
    world.end_processes()
    assert world.look().services[NAME].state is RunState.ENDED
    world.lost_at, world.granted_at = None, world.clock.now
    world.look()
    assert world.look().services[NAME].restarts == 0 and world.files.started == [(FILE, 1)] * 2


def test_singleton_that_cannot_be_started_is_reported_and_tried_again_later(world: World) -> None:
    world.files.cannot_start = True
    world.assign(HOST)
    status = world.look().services[NAME]
    assert (status.state, status.generation) == (RunState.ENDED, 1) and "no such program" in status.reason
    world.files.cannot_start = False
    status = world.settle().services[NAME]
    assert status.state is RunState.RUNNING and not status.reason


def test_starts_that_take_long_are_left_to_the_passes_after_with_the_lease_of_then(world: World) -> None:
    orders = {f"driver/{n}": Order(Assignment(host=HOST, incarnation=BOOT), n + 1) for n in range(3)}
    world.known = world.known.updated(world.clock.now, 3, orders)
    world.files.on_start = lambda: setattr(world.clock, "now", world.clock.now + TIMES.agent_pass_s)
    status = world.look()
    assert len(world.files.started) == 1
    assert [s.reason for s in status.services.values()][1:] == ["is started in the next pass"] * 2
    world.lost_at = world.clock.now - TIMES.lease_ttl_s + TIMES.start_margin_s
    world.look()
    assert len(world.files.started) == 1, "its lease ends soon"
    world.lost_at = None
    for _ in range(2):
        world.look()
    assert len(world.files.started) == 3


def test_files_that_are_slow_to_read_keep_no_singleton_down_but_the_end_of_the_lease_does(world: World) -> None:
    def slowly(seconds: float) -> Callable[[], list[ServiceRecord]]:
        def read() -> list[ServiceRecord]:
            world.clock.now += seconds
            return Files.all(world.files)
        return read

    world.assign(HOST)
    world.lost_at = None
    world.files.all = slowly(TIMES.lease_ttl_s)  # type: ignore[method-assign]
    lease = world.lease
    world.agent.look(HostView(lease, KnownOrders(world.clock.now, 1, world.known.orders), 7))
    assert world.files.started == [], "the lease is over by the time of the start"
    world.files.all = slowly(TIMES.agent_pass_s)  # type: ignore[method-assign]
    world.look()
    assert len(world.files.started) == 1


def test_released_singleton_is_ended_and_then_no_longer_reported(world: World) -> None:
    world.assign(HOST)
    world.settle()
    world.assign("")
    status = world.look()
    assert status.services[NAME].state is RunState.RUNNING and "generation 1" in status.not_ready
    assert world.settle().services == {} and not world.files.records
    assert world.swept == [NAME]


@pytest.mark.parametrize("elsewhere", ["", "other"])
def test_what_a_singleton_has_started_is_ended_when_this_host_is_not_to_run_it(world: World, elsewhere: str) -> None:
    world.assign(HOST)
    world.settle()
    world.files.end(FILE)  # killed: it is restarted
    world.settle()
    world.assign(HOST)  # a later generation, which takes over
    world.settle()
    assert world.swept == []
    world.files.end(FILE, completed=True)
    world.settle()
    assert world.swept == [], "that it has ended by itself is no release"
    world.assign(elsewhere)
    assert world.look().services[NAME].state is RunState.COMPLETED, "it is not gone before"
    world.settle()
    assert world.swept == [NAME] and not world.files.records


def test_no_process_is_started_while_what_one_has_left_is_being_ended(world: World) -> None:
    world.assign(HOST)
    world.settle()
    world.files.end(FILE, completed=True)
    world.settle()
    world.assign("")
    world.look()  # the end begins
    world.assign(HOST)
    assert world.look().services[NAME].state is RunState.ENDED and len(world.files.started) == 1
    world.settle()
    assert len(world.files.started) == 2 and world.swept == [NAME]


class SingletonMachine(RuleBasedStateMachine):
    """``Files`` finds what is started beside something else."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.world = World(self.patch)
        self.completed: set[int] = set()

    def teardown(self) -> None:
        self.patch.undo()

    @rule(host=st.sampled_from([HOST, HOST, "other", ""]))
    def assign(self, host: str) -> None:
        self.world.assign(host)

    @rule()
    def look(self) -> None:
        held, status = self.world.lost_at is None, self.world.look()
        service, record = status.services.get(NAME), self.world.files.records.get(FILE)
        assert (record is not None and record.running) == (service is not None and service.state is RunState.RUNNING)
        if service is not None and service.state is RunState.RUNNING:
            assert record is not None and (service.pid, service.generation) == (record.pid, record.generation)
        if service is not None and service.state is RunState.COMPLETED:
            assert service.generation in self.completed
        if held and record is not None and record.running and record.generation < self.world.generation:
            assert status.not_ready

    @rule()
    def end_processes(self) -> None:
        self.world.end_processes()

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @rule(completed=st.booleans())
    def process_ends(self, completed: bool) -> None:
        record = self.world.files.records.get(FILE)
        if record is not None and record.running:
            self.completed |= {record.generation} if completed else set()
            self.world.files.end(FILE, completed=completed)

    @rule()
    def agent_is_killed(self) -> None:
        self.world.restart_agent()

    @precondition(lambda self: self.world.lost_at is None)
    @rule()
    def lease_is_lost(self) -> None:
        self.world.lost_at = self.world.clock.now

    @precondition(lambda self: self.world.lost_at is not None)
    @rule()
    def registered_again(self) -> None:
        self.world.lost_at, self.world.granted_at = None, self.world.clock.now

    @invariant()
    def generations_only_grow(self) -> None:
        assert self.world.files.started == sorted(self.world.files.started)

    @rule()
    def comes_to_rest(self) -> None:
        """Undisturbed and registered, it is as it was assigned."""
        self.world.lost_at, self.world.granted_at = None, self.world.clock.now
        status, order = self.world.settle(), self.world.known.orders.get(NAME)
        if order is None or order.assignment.host != HOST:
            assert status.services == {} and not status.not_ready
        else:
            done = order.generation in self.completed
            assert status.services[NAME].state is (RunState.COMPLETED if done else RunState.RUNNING)
            assert status.services[NAME].generation == order.generation


SingletonMachine.TestCase.settings = settings(max_examples=seeds(40), stateful_step_count=30)
TestSingletons = SingletonMachine.TestCase
