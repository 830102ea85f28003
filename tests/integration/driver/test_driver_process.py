"""The driver's loop, and its trainer group on Ray, when etcd is away and when a newer driver has begun its epoch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.util.placement_group import placement_group, remove_placement_group
from support.etcd_server import EtcdServers
from support.stub_actors import HungTrainer, KilledTrainer, StubTrainer
from support.tiers import full
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.config.groups import ACTOR
from elastic_rl.driver import __main__ as driver
from elastic_rl.driver.restart_requests import open_requests
from elastic_rl.driver.trainer_group import GroupState, TrainerGroup, TrainerHost
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import JobStatus, Member, RestartRequest
from elastic_rl.etcd.run_context import RunContext


class StubPlane:
    """Takes the compute plane's place: each pass reads etcd, as a real one does."""

    passes = 0
    bugs = 0
    """Passes that are to fail."""
    unavailable = False
    """Whether passes find no etcd."""
    faults: dict[str, str] = {}
    waiting: dict[str, str] = {}

    def __init__(self, ctx: RunContext, etcd: EtcdClient, report_phase: object, pause: object) -> None:
        self._ctx, self._etcd = ctx, etcd

    def start(self) -> None:
        pass

    def reconcile(self) -> None:
        fencing.require_epoch(self._etcd, self._ctx.keys, self._ctx.epoch)
        if self.unavailable:
            raise EtcdUnavailable("no member answers")
        type(self).passes += 1
        if self.bugs:
            type(self).bugs -= 1
            raise KeyError("a bug")

    def close(self) -> None:
        pass


class RunningDriver:
    """A driver in a thread, with an etcd of its own and a stub for the compute plane."""

    def __init__(self, folder: Path, keys: Keys) -> None:
        self.keys, self.servers = keys, EtcdServers(folder, 1).start()
        cfg = config.parse({"job": keys.job, "run_dir": str(folder),
                            "etcd": {"call_timeout_s": 0.5, "retry_budget_s": 1.0}})
        self.ctx = RunContext(config=cfg, etcd_endpoints=self.servers.endpoints, job=keys.job, epoch=0, model_dir="")
        self.code: list[int] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(
            target=lambda: self.code.append(driver.drive(self.ctx, "driver-1", self.stop)), daemon=True)

    def outage(self, seconds: float = 4.0) -> None:
        """Etcd is stopped, for several times the retry budget of a call; the driver is still there after it."""
        self.servers.stop(0)
        if not self.thread.is_alive():
            self.thread.start()
        time.sleep(seconds)
        assert self.thread.is_alive() and not self.code
        self.servers.cont(0)

    def await_pass(self) -> None:
        passes = StubPlane.passes
        wait_until(lambda: StubPlane.passes > passes, what="a pass", alive=self.thread.is_alive)

    def finish(self) -> int:
        with self.servers.connect() as etcd:
            etcd.put(self.keys.job_status(), JobStatus(phase="finished").encode())
        self.thread.join(60)
        return self.code[0]

    def close(self) -> None:
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join(60)
        self.servers.close()


@pytest.fixture
def running(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDriver]:
    monkeypatch.setattr(driver, "ComputePlane", StubPlane)
    running = RunningDriver(tmp_path, keys)
    yield running
    running.close()


def test_driver_keeps_the_compute_plane_while_etcd_is_away(running: RunningDriver) -> None:
    running.thread.start()
    running.await_pass()
    running.outage()
    running.await_pass()
    assert running.finish() == 0


def test_driver_that_starts_while_etcd_is_away_waits_for_it(running: RunningDriver) -> None:
    """It has no epoch yet, and neither a member's entry."""
    running.outage()
    running.await_pass()
    with running.servers.connect() as etcd:
        assert [m.id for m in members(etcd, running.keys, "driver")] == ["driver-1"]
    assert running.finish() == 0


def test_driver_that_waits_for_etcd_ends_on_a_signal(running: RunningDriver) -> None:
    running.servers.stop(0)
    running.thread.start()
    running.stop.set()
    running.thread.join(60)
    assert running.code == [0]


def test_outage_of_etcd_does_not_look_like_a_hang_of_the_driver(running: RunningDriver,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat thread may reach etcd while its passes do not yet: what it writes then must show progress."""
    running.thread.start()
    running.await_pass()
    with running.servers.connect() as etcd:
        def entry() -> Member:
            [found] = members(etcd, running.keys, "driver")
            return found

        monkeypatch.setattr(StubPlane, "unavailable", True)
        began = entry().beat_at
        wait_until(lambda: entry().beat_at > began + 6.0, what="heartbeats")
        assert entry().progress_at > began + 3.0


def test_bug_in_a_pass_does_not_end_the_driver(running: RunningDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubPlane, "bugs", 3)
    running.thread.start()
    wait_until(lambda: not StubPlane.bugs, what="the bugs")
    running.await_pass()
    assert running.finish() == 0


def test_driver_reports_what_fails_and_what_waits(running: RunningDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubPlane, "faults", {"router": "it ended"})
    monkeypatch.setattr(StubPlane, "waiting", {"trainer": "no room"})
    running.thread.start()
    running.await_pass()
    running.await_pass()

    def info() -> object:
        with running.servers.connect() as etcd:
            return next((m.info for m in members(etcd, running.keys, "driver") if m.info), None)

    assert wait_until(info, what="the report") == {
        "faults": {"router": "it ended"}, "waiting": {"trainer": "no room"}}


# -- the trainer group -----------------------------------------------------------------------------------------------
MakeGroup = Callable[[type], TrainerGroup]


@pytest.fixture
def make_group(on_ray: None, etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path
               ) -> Iterator[MakeGroup]:
    made: list[TrainerGroup] = []

    def make(body: type) -> TrainerGroup:
        cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"}})
        ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job,
                         model_dir=str(tmp_path / "none"), epoch=fencing.raise_epoch(etcd, keys, holder="test").number)
        made.append(TrainerGroup(ctx, etcd, ctx.save(tmp_path / "context.json"), body))
        return made[-1]

    yield make
    for group in made:
        group.close()


@pytest.fixture
def group(make_group: MakeGroup) -> TrainerGroup:
    """A trainer group whose agent cannot start: its context names no model."""
    return make_group(TrainerHost)


def reports(etcd: EtcdClient, keys: Keys) -> list[str]:
    return [e.message for e in events.recent(etcd, keys) if e.kind == "trainer.agent_ended"]


def until(group: TrainerGroup, check: Callable[[], object], what: str, request: RestartRequest | None = None) -> None:
    wait_until(lambda: group.reconcile(request) or check(), what=what, poll_s=0.1)


def starts(group: TrainerGroup) -> list[str]:
    notes = group.context_file.with_name("trainers")
    return notes.read_text().split() if notes.exists() else []


def request_restart(etcd: EtcdClient, keys: Keys) -> RestartRequest:
    request = RestartRequest(target=ACTOR.name, generation=1, reason="a rank hangs")
    etcd.put(keys.restart(ACTOR.name), request.encode())
    return request


def test_end_of_the_agent_is_reported_and_it_is_started_again_without_end(group: TrainerGroup, etcd: EtcdClient,
                                                                          keys: Keys) -> None:
    until(group, lambda: len(reports(etcd, keys)) == 3, "three ends of the agent")
    assert all("exit code 2" in message for message in reports(etcd, keys))
    assert "after 3 that failed" in group.waiting


@full(proved_in="tests/unit/host/test_leftovers.py", why="the files of a real agent")
def test_temporary_files_of_a_killed_agent_are_removed(make_group: MakeGroup) -> None:
    group = make_group(KilledTrainer)
    until(group, lambda: len(starts(group)) == 2, "the next group")
    assert not Path(starts(group)[0]).exists()


def test_end_of_the_agent_after_a_global_restart_is_not_reported(group: TrainerGroup, etcd: EtcdClient, keys: Keys
                                                                 ) -> None:
    """The agent ends because the epoch is over; `trainer.dead` would be an alert about a restart on purpose."""
    group.reconcile()
    fencing.raise_epoch(etcd, keys, holder="global restart")
    with pytest.raises(Fenced):
        until(group, lambda: False, "the end of the agent")
    assert group.state is GroupState.ENDED, "the end of the agent was not seen"
    assert reports(etcd, keys) == []


def test_closed_group_deregisters_its_ranks_when_the_agent_was_killed(group: TrainerGroup, etcd: EtcdClient, keys: Keys
                                                                      ) -> None:
    """An agent that hangs is killed, and cannot deregister its ranks itself; their end would count as a death."""
    group.reconcile()
    rank = Membership(etcd, keys, "trainer", "rank-0", ttl_s=30, epoch=group.ctx.epoch).start()
    rank._stopping.set()  # as a killed process: no heartbeat any longer, and not deregistered
    other = Membership(etcd, keys, "trainer", "rank-1", ttl_s=30, epoch=group.ctx.epoch + 1).start()
    group.close()
    assert [m.id for m in members(etcd, keys, "trainer")] == ["rank-1"], "of a newer epoch"
    other.close()


@full(proved_in="tests/integration/coordinator/test_leader_decides.py",
      why="the restart of a real group")
def test_requested_restart_of_a_hung_group_is_carried_out_by_later_passes(make_group: MakeGroup, etcd: EtcdClient,
                                                                          keys: Keys) -> None:
    """No pass waits for it: the pass that asks it to stop returns while it still runs."""
    group = make_group(HungTrainer)
    until(group, lambda: starts(group), "the group")
    rank = Membership(etcd, keys, "trainer", "rank-0", ttl_s=30, epoch=group.ctx.epoch).start()
    rank._stopping.set()
    request = request_restart(etcd, keys)
    group.reconcile(request)
    assert group.state is GroupState.STOPPING and open_requests(etcd, keys), "it has not ended yet"
    until(group, lambda: len(starts(group)) == 2, "the next group", request)
    assert not open_requests(etcd, keys)
    assert members(etcd, keys, "trainer") == [], "its end must not count as a death"
    assert reports(etcd, keys) == []


@full(proved_in="tests/integration/driver/test_engine_pool.py", why="the same of a trainer group")
def test_group_without_room_waits_and_starts_when_there_is_room(make_group: MakeGroup, etcd: EtcdClient, keys: Keys
                                                                ) -> None:
    taken = placement_group([{"CPU": 3}])
    assert taken.wait(60)
    group = make_group(StubTrainer)
    until(group, lambda: "no room in the cluster: CPU 2" in group.waiting, "the report")
    assert group.state is GroupState.PLACING and not starts(group)

    # A request to restart it does not wait for the room either.
    request = request_restart(etcd, keys)
    until(group, lambda: not open_requests(etcd, keys), "the acknowledgement", request)

    remove_placement_group(taken)
    until(group, lambda: starts(group), "the group")
    assert group.state is GroupState.RUNNING and group.waiting == ""
    assert reports(etcd, keys) == [], "nothing has failed"
