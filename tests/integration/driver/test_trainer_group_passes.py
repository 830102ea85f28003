"""What a trainer group does in each pass of the driver, on a real etcd: a stand-in takes the place of its Ray actor."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from support.etcd_server import EtcdServers
from support.placed_actors import StandInActor, stand_in_for_ray

from elastic_rl import config
from elastic_rl.config.groups import ACTOR
from elastic_rl.driver import trainer_group
from elastic_rl.driver.restart_requests import open_requests
from elastic_rl.driver.trainer_group import GroupState, TrainerGroup
from elastic_rl.driver.trainer_host import TrainerHost
from elastic_rl.errors import Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import FAILURE_POLICY, RestartRequest
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.stacks import HANG_S
from elastic_rl.net.addresses import LOOPBACK


@pytest.fixture
def group(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
          ) -> TrainerGroup:
    stand_in_for_ray(monkeypatch, trainer_group)
    ctx = RunContext(config=config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"}}),
                     etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                     epoch=fencing.raise_epoch(etcd, keys, holder="test").number, host=LOOPBACK)
    return TrainerGroup(ctx, etcd)


@pytest.fixture
def request_(etcd: EtcdClient, keys: Keys) -> RestartRequest:
    """An open request to restart the group."""
    made = RestartRequest(target=ACTOR.name, generation=1, reason="a rank hangs")
    etcd.put(keys.restart(ACTOR.name), made.encode())
    return made


def reports(group: TrainerGroup) -> list[str]:
    return [e.message for e in events.recent(group.etcd, group.ctx.keys) if e.kind == "trainer.agent_ended"]


def test_requested_restart_of_a_hung_group_is_carried_out_once_it_was_killed(group: TrainerGroup,
                                                                             request_: RestartRequest) -> None:
    etcd, keys = group.etcd, group.ctx.keys
    group.reconcile()
    [hung] = StandInActor.made
    rank = Membership(etcd, keys, "trainer", "rank-0", ttl_s=30, epoch=group.ctx.epoch).start()
    rank._stopping.set()  # as a killed process: no heartbeat any longer, and not deregistered
    for _ in range(3):
        group.reconcile(request_)
        assert group.state is GroupState.STOPPING and open_requests(etcd, keys) and StandInActor.made == [hung]
    assert hung.grace_s == trainer_group._STOP_TIMEOUT_S
    hung.grace_is_over = True
    group.reconcile(request_)
    assert hung.is_removed and len(StandInActor.made) == 2 and group.state is GroupState.RUNNING
    assert not open_requests(etcd, keys)
    assert members(etcd, keys, "trainer") == [], "its end must not count as a death"
    assert reports(group) == []


@pytest.mark.parametrize(("by", "ended_by", "more_s"), [(FAILURE_POLICY, "stop_hung", HANG_S), ("ann", "stop", 0.0)])
def test_ranks_that_the_failure_policy_ends_are_to_write_their_stacks_first(
        group: TrainerGroup, request_: RestartRequest, by: str, ended_by: str, more_s: float) -> None:
    group.reconcile()
    [hung] = StandInActor.made
    group.reconcile(request_.replace(by=by))
    assert hung.ended_by == ended_by and hung.grace_s == trainer_group._STOP_TIMEOUT_S + more_s


def test_stacks_of_a_group_are_reported_as_its_own(group: TrainerGroup, tmp_path: Path) -> None:
    TrainerHost._report_stacks(group.ctx, tmp_path / "stacks.txt")
    [said] = events.recent(group.etcd, group.ctx.keys)
    assert (said.kind, said.subject, said.data["file"]) == ("trainer.stacks", "trainer", str(tmp_path / "stacks.txt"))


def test_keys_that_killed_agents_leave_go_with_the_next_formation_and_with_the_group(
        group: TrainerGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd, keys = group.etcd, group.ctx.keys
    group.reconcile()
    first, kept = (f"{keys.rendezvous_prefix()}{run}/state" for run in ("trainer-1-1", "critic-1-1"))
    for key in (first, kept):
        etcd.put(key, b"met")
    StandInActor.made[0].is_over = True
    group.reconcile()
    assert etcd.get(first) is not None, "no other agents are to meet yet"
    group._budget = type(group._budget)()
    group.reconcile()
    assert len(StandInActor.made) == 2 and etcd.get(first) is None
    etcd.put(second := f"{keys.rendezvous_of_group(ACTOR.name)}1-2/state", b"met")
    monkeypatch.setattr(trainer_group, "stop_all", lambda actors, *, timeout_s: None)
    group.close()
    assert etcd.get(second) is None and etcd.get(kept) is not None


def test_files_that_a_killed_agent_leaves_are_removed_and_its_end_is_reported(group: TrainerGroup) -> None:
    group.reconcile()
    tag = JobPaths.of(group.ctx.config).file_tag(ACTOR.name)
    left, of_another = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in (tag, f"another-{ACTOR.name}"))
    StandInActor.made[0].is_over = True
    group.reconcile()
    assert not left.exists() and of_another.exists()
    assert StandInActor.made[0].is_removed and len(reports(group)) == 1 and "was killed" in reports(group)[0]
    of_another.rmdir()


@pytest.mark.parametrize("requested", [False, True])
def test_group_of_a_replaced_driver_leaves_what_the_newer_one_has_started(
        group: TrainerGroup, request_: RestartRequest, requested: bool) -> None:
    """The older driver was suspended; meanwhile its agent has ended and the newer one has started another, which has
    the same tag of files and the same names of ranks."""
    etcd, keys = group.etcd, group.ctx.keys
    group.reconcile(request_ if requested else None)
    if requested:
        group.reconcile(request_)
    [ended] = StandInActor.made
    fencing.begin_driver(etcd, keys, group.ctx.epoch, holder="newer")
    ended.is_over = True
    files = Path(tempfile.mkdtemp(prefix=JobPaths.of(group.ctx.config).file_tag(ACTOR.name)))
    with Membership(etcd, keys, "trainer", "rank-0", ttl_s=30, epoch=group.ctx.epoch).start():
        with pytest.raises(Fenced):
            group.reconcile()
        assert files.exists() and members(etcd, keys, "trainer") and StandInActor.made == [ended]
    files.rmdir()


def test_group_without_room_waits_and_a_request_does_not_wait_for_the_room(
        group: TrainerGroup, request_: RestartRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInActor, "has_room", False)
    group.reconcile()
    assert group.state is GroupState.PLACING and "no room in the cluster: CPU" in group.waiting
    group.reconcile(request_)
    assert not open_requests(group.etcd, group.ctx.keys) and group.state is GroupState.PLACING
    monkeypatch.setattr(StandInActor, "has_room", True)
    group.reconcile()
    assert group.state is GroupState.RUNNING and group.waiting == ""
    assert reports(group) == [], "nothing has failed"
