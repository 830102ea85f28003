"""The leader's comparison of the member registry with the live members: deaths, returns and replacements."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.hang_detection import MAX_STRETCH
from elastic_rl.coordinator.membership.registry import LastHeartbeat, LiveMember, Transition
from elastic_rl.coordinator.membership.suspicion import Suspicion, WitnessReports
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.etcd.records import Evidence, ProcessFinding, Witness

Incarnation = tuple[str, str, str]
LIMITS = Suspicion(suspicion_s=30.0, host_lost_s=3.0)
MACHINE = "m1"


def witness(pid: int = 99, load: float = 0.0, machine: str = MACHINE) -> Witness:
    return Witness(name=f"w{pid}", machine=machine, host="h", pid=pid, load_per_core=load)


class Leader:
    """Applies the changes as the leader does, on a store whose revision grows with each registration.

    ``registered``: incarnation → the revision at which its key was created. Witnesses say of each member that is not
    registered that it is gone, but for those that ``update`` is told are slow.
    """

    def __init__(self, *, sees_heartbeats: bool = True) -> None:
        self.now, self.revision, self.leader_s = 1_000.0, 0, 1_000.0  # in a record 0 means never
        self.witnesses = [witness()]
        self.registry: dict[tuple[str, str], LastSeen] = {}
        self.registered: dict[Incarnation, int] = {}
        self.heartbeats: dict[Incarnation, LastHeartbeat] = {}
        self.reported: list[tuple[Transition, str]] = []
        self.sees_heartbeats = sees_heartbeats

    def member(self, role: str, member_id: str, incarnation: str = "1", epoch: int = 0,
               machine: str = MACHINE) -> LiveMember:
        who = (role, member_id, incarnation)
        self.revision += 1
        self.registered.setdefault(who, self.revision)
        return LiveMember(role, member_id, incarnation, epoch, 1, "h", f"members/{role}/{member_id}",
                          self.registered[who], machine=machine)

    def update(self, *live: LiveMember, epoch: int = 0, run_over: bool = False, ended_epoch: int = 0,
               slow: Collection[str] = (), after_s: float = 1.0,
               finding: ProcessFinding = ProcessFinding.GONE) -> list[Transition]:
        self.now += after_s
        self.leader_s += after_s
        self.revision += 1
        if self.sees_heartbeats:
            self.heartbeats |= {(m.role, m.id, m.incarnation): LastHeartbeat(self.now, self.revision) for m in live}
        evidence = {name: Evidence(role=e.role, id=e.id, incarnation=e.incarnation, finding=finding, at=0.0, by="w")
                    for name, e in self.registry.items() if e.id not in slow and name not in {m.name for m in live}}
        changes = registry.compare(
            self.registry, {m.name: m for m in live}, now=self.now, revision=self.revision,
            last_heartbeats=self.heartbeats, epoch=epoch, run_over=run_over, coordinators=2, ended_epoch=ended_epoch,
            reports=WitnessReports(self.leader_s, self.witnesses, evidence), suspicion=LIMITS)
        self.why = {c.entry.id: c.why for c in changes}
        for c in changes:
            if c.change in (Transition.FORGOTTEN, Transition.REPLACED):
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
    assert leader.update(leader.member("dcs", "n0")) == [Transition.SEEN]
    assert leader.update() == [Transition.DIED]
    assert leader.update() == [] and leader.dead == ["n0"]
    assert leader.update(leader.member("dcs", "n0", "2")) == [Transition.RETURNED]
    assert not leader.dead


def test_restart_between_two_passes_is_a_death_and_then_a_return() -> None:
    leader = Leader()
    leader.update(leader.member("trainer", "rank-0"))
    assert leader.update(leader.member("trainer", "rank-0", "2")) == [Transition.DIED]
    assert leader.update(leader.member("trainer", "rank-0", "2")) == [Transition.RETURNED]


def test_member_is_late_then_hung_then_resumed_each_once() -> None:
    leader = Leader()
    rank = leader.member("trainer", "rank-0")
    late, hung = replace(rank, late="40 s without progress"), replace(rank, late="99 s without progress", hung=True)
    leader.update(rank)
    assert leader.update(late) == [Transition.LATE] and leader.why == {"rank-0": "40 s without progress"}
    assert leader.update(late) == []
    assert leader.update(hung) == [Transition.HUNG]
    assert leader.update(hung) == []
    assert leader.update(rank) == [Transition.RESUMED] and leader.update(rank) == [Transition.ON_TIME]
    assert leader.update(rank) == [] and not leader.dead
    assert [leader.update(found) for found in (late, rank)] == [[Transition.LATE], [Transition.ON_TIME]]
    assert leader.update(hung) == [Transition.HUNG], "no news that it is late once it is known to hang"
    assert leader.update(hung) == []


def test_replacement_ends_the_fault_of_a_role_but_not_of_a_node() -> None:
    leader = Leader()
    leader.update(leader.member("rollout", "r1"), leader.member("dcs", "n0"))
    leader.update()
    assert Transition.REPLACED in leader.update(leader.member("rollout", "r2"), leader.member("dcs", "n1"))
    assert leader.dead == ["n0"]


def test_replacement_that_registers_before_the_lease_of_the_dead_ends_replaces_it() -> None:
    leader = Leader()
    old = leader.member("rollout", "r1")
    leader.update(old)
    new = leader.member("rollout", "r2")
    leader.revision += 1
    # The dead member's lease has not ended, but it sends no heartbeat.
    leader.sees_heartbeats = False
    assert leader.update(old, new) == [Transition.SEEN]
    assert leader.update(new) == [Transition.DIED]
    assert leader.update(new) == [Transition.REPLACED]


def test_peer_that_was_there_before_the_death_is_no_replacement() -> None:
    for sees_heartbeats in (True, False):  # a leader that has just taken over has seen none
        leader = Leader(sees_heartbeats=sees_heartbeats)
        first, second = leader.member("rollout", "r1"), leader.member("rollout", "r2")
        leader.update(first, second)
        assert leader.update(second) == [Transition.DIED]
        assert leader.update(second) == []


def test_replacement_is_recognised_by_a_leader_whose_clock_is_far_behind() -> None:
    leader = Leader()
    leader.now = 1e6
    leader.update(leader.member("rollout", "r1"))
    leader.update()
    leader.now = -1e6
    assert Transition.REPLACED in leader.update(leader.member("rollout", "r2"))


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
    assert leader.update(node, epoch=2) == [Transition.FORGOTTEN]
    leader.update(leader.member("engine", "e2", epoch=2), node, epoch=2)
    assert leader.update(node, epoch=2, run_over=True) == [Transition.FORGOTTEN]


def test_driver_of_an_old_epoch_is_dead_without_a_global_restart() -> None:
    leader = Leader()
    leader.update(leader.member("driver", "d1", epoch=1), epoch=1)
    assert Transition.DIED in leader.update(leader.member("driver", "d2", epoch=2), epoch=2)
    leader = Leader()
    leader.update(leader.member("driver", "d1", epoch=1), epoch=1)
    assert leader.update(epoch=2, ended_epoch=1) == [Transition.FORGOTTEN]


def test_driver_that_was_taken_over_is_replaced_also_for_a_leader_that_came_later() -> None:
    for sees_heartbeats in (True, False):  # a leader that has just taken over has seen none
        leader = Leader(sees_heartbeats=sees_heartbeats)
        leader.update(leader.member("driver", "d1", epoch=1), epoch=1)
        new = leader.member("driver", "d2", epoch=1)
        assert set(leader.update(new, epoch=1)) == {Transition.DIED, Transition.SEEN}
        assert leader.update(new, epoch=1) == [Transition.REPLACED]


def test_newest_driver_is_not_replaced_by_an_older_one() -> None:
    leader = Leader()
    old, new = leader.member("driver", "d1", epoch=1), leader.member("driver", "d2", epoch=1)
    leader.update(old, new, epoch=1)
    assert leader.update(old, epoch=1) == [Transition.DIED]
    assert leader.update(old, epoch=1) == []


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
    assert leader.update(leader.member("coordinator", "a")) == [Transition.RETURNED]


# -- slow is not dead -----------------------------------------------------------------------------------------------
def test_silent_member_is_suspected_and_returns_without_a_death() -> None:
    leader = Leader()
    actor = leader.member("actor", "a")
    leader.update(actor)
    assert leader.update(slow=["a"]) == [Transition.SUSPECTED]
    assert leader.update(slow=["a"], after_s=20.0) == [] and not leader.dead
    assert leader.update(actor) == [Transition.ALIVE]
    assert leader.update(actor) == [] and not leader.registry["actor", "a"].suspected
    assert leader.update(slow=["a"]) == [Transition.SUSPECTED], "the next silence is counted from its own beginning"
    assert leader.update(slow=["a"], after_s=20.0) == []


@given(st.sampled_from(list(ProcessFinding)))
def test_suspected_member_has_died_once_there_is_evidence(finding: ProcessFinding) -> None:
    leader = Leader()
    leader.update(leader.member("actor", "a"))
    leader.update(slow=["a"])
    assert leader.update(finding=finding) == [Transition.DIED]
    assert finding in leader.why["a"]


def test_evidence_about_another_incarnation_says_nothing() -> None:
    entry = LastSeen(role="actor", id="a", incarnation="2", machine=MACHINE, pid=1, first_seen=1.0)
    old = Evidence(role="actor", id="a", incarnation="1", finding=ProcessFinding.GONE, at=0.0, by="w")
    assert not LIMITS.why_dead(entry, WitnessReports(9.0, [witness()], {entry.name: old}))


def test_member_whose_process_exists_and_stays_silent_has_died_in_the_end() -> None:
    leader = Leader()
    leader.update(leader.member("actor", "a"))
    leader.update(slow=["a"])
    assert leader.update(slow=["a"], after_s=29.0) == []
    assert leader.update(slow=["a"], after_s=1.0) == [Transition.DIED]
    assert "30 s" in leader.why["a"]


def test_overloaded_machine_has_more_time_but_not_for_ever() -> None:
    leader = Leader()
    leader.witnesses = [witness(load=0.2), witness(98, load=14.5)]
    leader.update(leader.member("actor", "a"))
    leader.update(slow=["a"])
    assert leader.update(slow=["a"], after_s=30.0 * MAX_STRETCH - 1.0) == []
    assert leader.update(slow=["a"], after_s=1.0) == [Transition.DIED]


def test_members_of_a_machine_that_is_not_heard_have_died_soon() -> None:
    for witnesses in ([], [witness(machine="m2")], [witness(pid=1)]):  # 1: the member itself is no witness of its own
        leader = Leader()
        leader.update(leader.member("actor", "a"))
        leader.witnesses = witnesses
        assert leader.update(slow=["a"]) == [Transition.SUSPECTED]
        assert leader.update(slow=["a"], after_s=2.0) == []
        assert leader.update(slow=["a"]) == [Transition.DIED]


def test_next_leader_goes_on_with_the_suspicion_of_the_last_one() -> None:
    leader, successor = Leader(), Leader(sees_heartbeats=False)
    leader.update(leader.member("actor", "a"))
    leader.update(slow=["a"])
    leader.update(slow=["a"], after_s=20.0)
    successor.registry, successor.leader_s = leader.registry, leader.leader_s - 3.0  # the clock was written 3 s ago
    successor.now = -1e6
    assert successor.update(slow=["a"], after_s=12.0) == []
    assert successor.update(slow=["a"], after_s=1.0) == [Transition.DIED]


def test_replacement_that_registers_during_the_suspicion_replaces_the_dead() -> None:
    leader = Leader(sees_heartbeats=False)
    leader.update(leader.member("rollout", "r1"))
    leader.update(slow=["r1"])
    new = leader.member("rollout", "r2")
    leader.update(new, slow=["r1"])
    assert leader.update(new) == [Transition.DIED]
    assert leader.update(new) == [Transition.REPLACED]


def test_end_of_the_run_is_no_death_of_a_suspected_member() -> None:
    leader = Leader()
    leader.update(leader.member("actor", "a"))
    leader.update(slow=["a"])
    assert leader.update(run_over=True) == [Transition.FORGOTTEN]


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 29.0)), max_size=40))
def test_process_that_exists_is_never_dead_while_each_silence_is_short(story: list[tuple[bool, float]]) -> None:
    leader = Leader()
    actor = leader.member("actor", "a")
    leader.update(actor)
    silent_s = 0.0
    for registered, after_s in story:
        silent_s = 0.0 if registered else silent_s + after_s
        if silent_s < LIMITS.suspicion_s:
            changes = leader.update(*([actor] if registered else []), slow=["a"], after_s=after_s)
            assert Transition.DIED not in changes and not leader.dead


NEXT = {Transition.SEEN: {Transition.DIED, Transition.SUSPECTED},
        Transition.SUSPECTED: {Transition.DIED, Transition.ALIVE},
        Transition.ALIVE: {Transition.DIED, Transition.SUSPECTED},
        Transition.DIED: {Transition.RETURNED, Transition.REPLACED},
        Transition.RETURNED: {Transition.DIED, Transition.SUSPECTED}, Transition.REPLACED: {Transition.SEEN}}


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from(["rank-0", "rank-1"]), st.integers(1, 3), max_size=2),
                          st.sets(st.sampled_from(["rank-0", "rank-1"])), st.floats(0.0, 40.0)), max_size=30))
def test_changes_of_a_member_follow_from_one_another(story: list[tuple[dict[str, int], set[str], float]]) -> None:
    leader = Leader()
    for live, slow, after_s in story:
        leader.update(*(leader.member("trainer", i, str(n)) for i, n in live.items()), slow=slow, after_s=after_s)
    for member in ("rank-0", "rank-1"):
        reported = [c for c, i in leader.reported if i == member]
        for before, after in zip(reported, reported[1:], strict=False):
            assert after in NEXT[before], (before, after)
