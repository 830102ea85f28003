"""The leader's comparison of the member registry with the live members: deaths, returns and replacements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.registry import Change, Heartbeat, LiveMember
from elastic_rl.coordinator.records import LastSeen

Incarnation = tuple[str, str, str]


class Leader:
    """Applies the changes as the leader does, on a store whose revision grows with each registration.

    ``registered``: incarnation → the revision at which its key was created.
    """

    def __init__(self, *, sees_heartbeats: bool = True) -> None:
        self.now, self.revision = 0.0, 0
        self.registry: dict[tuple[str, str], LastSeen] = {}
        self.registered: dict[Incarnation, int] = {}
        self.heartbeats: dict[Incarnation, Heartbeat] = {}
        self.reported: list[tuple[Change, str]] = []
        self.sees_heartbeats = sees_heartbeats

    def member(self, role: str, member_id: str, incarnation: str = "1", epoch: int = 0) -> LiveMember:
        who = (role, member_id, incarnation)
        self.revision += 1
        self.registered.setdefault(who, self.revision)
        return LiveMember(role, member_id, incarnation, epoch, 1, "h", f"members/{role}/{member_id}",
                          self.registered[who])

    def update(self, *live: LiveMember, epoch: int = 0, run_over: bool = False, ended_epoch: int = 0) -> list[Change]:
        self.now += 1.0
        self.revision += 1
        if self.sees_heartbeats:
            self.heartbeats |= {(m.role, m.id, m.incarnation): Heartbeat(self.now, self.revision) for m in live}
        changes = registry.compare(
            self.registry, {m.name: m for m in live}, now=self.now, revision=self.revision,
            last_heartbeats=self.heartbeats, epoch=epoch, run_over=run_over, coordinators=2, ended_epoch=ended_epoch)
        for c in changes:
            if c.change in (Change.FORGOTTEN, Change.REPLACED):
                del self.registry[c.entry.name]
            else:
                self.registry[c.entry.name] = c.entry
            self.reported.append((c.change, c.entry.id))
        return [c.change for c in changes]

    @property
    def dead(self) -> list[str]:
        return [entry.id for entry in self.registry.values() if entry.dead]


def test_vanished_member_is_reported_dead_once() -> None:
    leader = Leader()
    assert leader.update(leader.member("dcs", "n0")) == [Change.SEEN]
    assert leader.update() == [Change.DIED]
    assert leader.update() == [] and leader.dead == ["n0"]
    assert leader.update(leader.member("dcs", "n0", "2")) == [Change.RETURNED]
    assert not leader.dead


def test_restart_between_two_passes_is_a_death_and_then_a_return() -> None:
    leader = Leader()
    leader.update(leader.member("trainer", "rank-0"))
    assert leader.update(leader.member("trainer", "rank-0", "2")) == [Change.DIED]
    assert leader.update(leader.member("trainer", "rank-0", "2")) == [Change.RETURNED]


def test_replacement_under_another_id_ends_the_fault_of_a_role_but_not_of_a_dcs_node() -> None:
    leader = Leader()
    leader.update(leader.member("rollout", "r1"), leader.member("dcs", "n0"))
    leader.update()
    assert Change.REPLACED in leader.update(leader.member("rollout", "r2"), leader.member("dcs", "n1"))
    assert leader.dead == ["n0"]


def test_replacement_that_registers_before_the_lease_of_the_dead_ends_replaces_it() -> None:
    leader = Leader()
    old = leader.member("rollout", "r1")
    leader.update(old)
    new = leader.member("rollout", "r2")
    leader.revision += 1
    # The dead member's lease has not ended, but it sends no heartbeat.
    leader.sees_heartbeats = False
    assert leader.update(old, new) == [Change.SEEN]
    assert leader.update(new) == [Change.DIED]
    assert leader.update(new) == [Change.REPLACED]


def test_peer_that_was_there_before_the_death_is_no_replacement() -> None:
    for sees_heartbeats in (True, False):  # a leader that has just taken over has seen none
        leader = Leader(sees_heartbeats=sees_heartbeats)
        first, second = leader.member("rollout", "r1"), leader.member("rollout", "r2")
        leader.update(first, second)
        assert leader.update(second) == [Change.DIED]
        assert leader.update(second) == []


def test_replacement_is_recognised_by_a_leader_whose_clock_is_far_behind() -> None:
    leader = Leader()
    leader.now = 1e6
    leader.update(leader.member("rollout", "r1"))
    leader.update()
    leader.now = -1e6
    assert Change.REPLACED in leader.update(leader.member("rollout", "r2"))


def test_dead_replica_counts_as_replaced_once_enough_replicas_live() -> None:
    leader = Leader()
    a, b = leader.member("coordinator", "a"), leader.member("coordinator", "b")
    leader.update(a, b)
    leader.update(b)
    assert leader.dead == ["a"]
    leader.update(b, leader.member("coordinator", "c"))
    assert not leader.dead


def test_end_of_a_run_or_of_an_old_epoch_is_no_death() -> None:
    leader = Leader()
    node = leader.member("dcs", "n0")
    leader.update(leader.member("engine", "e1", epoch=1), node)
    assert leader.update(node, epoch=2) == [Change.FORGOTTEN]
    leader.update(leader.member("engine", "e2", epoch=2), node, epoch=2)
    assert leader.update(node, epoch=2, run_over=True) == [Change.FORGOTTEN]


def test_driver_of_an_old_epoch_has_died_unless_a_global_restart_ended_it() -> None:
    leader = Leader()
    leader.update(leader.member("driver", "d1", epoch=1), epoch=1)
    assert Change.DIED in leader.update(leader.member("driver", "d2", epoch=2), epoch=2)
    leader = Leader()
    leader.update(leader.member("driver", "d1", epoch=1), epoch=1)
    assert leader.update(epoch=2, ended_epoch=1) == [Change.FORGOTTEN]


def test_reported_death_is_no_return_while_its_process_signs_off() -> None:
    leader = Leader()
    engine = leader.member("engine", "e1")
    leader.update(engine)
    leader.registry[engine.name] = leader.registry[engine.name].replace(dead_at=leader.now, reported=True)
    assert leader.update(engine) == []


def test_lease_lost_and_regained_by_the_same_process_is_a_return() -> None:
    leader = Leader()
    leader.update(leader.member("coordinator", "a"))
    leader.update()
    assert leader.update(leader.member("coordinator", "a")) == [Change.RETURNED]


@given(st.lists(st.dictionaries(st.sampled_from(["rank-0", "rank-1"]), st.integers(1, 3), max_size=2), max_size=30))
def test_deaths_and_returns_of_a_member_alternate(story: list[dict[str, int]]) -> None:
    leader = Leader()
    for live in story:
        leader.update(*(leader.member("trainer", i, str(n)) for i, n in live.items()))
    for member in ("rank-0", "rank-1"):
        reported = [c for c, i in leader.reported if i == member]
        for before, after in zip(reported, reported[1:], strict=False):
            assert (before, after) in {
                (Change.SEEN, Change.DIED), (Change.DIED, Change.RETURNED), (Change.RETURNED, Change.DIED),
                (Change.DIED, Change.REPLACED), (Change.REPLACED, Change.SEEN)}
