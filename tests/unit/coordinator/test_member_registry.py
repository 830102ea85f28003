"""Who died, who closed, who came back: the leader's comparison of the roster with the members."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.registry import Change, LastSeen, LiveMember


def living(role: str, member_id: str, incarnation: str = "1", epoch: int = 0, closed: bool = False) -> LiveMember:
    return LiveMember(role, member_id, incarnation, epoch, 1, "h", f"members/{role}/{member_id}", 5, closed)


class ApiCluster:
    """Applies the steps as the leader does."""

    def __init__(self) -> None:
        self.now = 0.0
        self.roster: dict[tuple[str, str], LastSeen] = {}
        self.told: list[tuple[Change, str]] = []

    def look(self, *there: LiveMember, epoch: int = 0, run_over: bool = False) -> list[Change]:
        self.now += 1.0
        steps = registry.step(self.now, self.roster, {m.name: m for m in there}, epoch=epoch, run_over=run_over,
                            coordinators=2)
        for s in steps:
            if s.change in (Change.FORGET, Change.REPLACED):
                del self.roster[s.sighting.name]
            else:
                self.roster[s.sighting.name] = s.sighting
            self.told.append((s.change, s.sighting.id))
        return [s.change for s in steps]


def test_a_member_whose_key_vanished_has_died_and_is_told_once() -> None:
    h = ApiCluster()
    assert h.look(living("dcs", "n0")) == [Change.SEEN]
    assert h.look() == [Change.DIED]
    assert h.look() == [] and registry.missing(h.roster.values())
    assert h.look(living("dcs", "n0", "2")) == [Change.RETURNED]
    assert not registry.missing(h.roster.values())


def test_a_member_that_died_and_returned_between_two_looks_is_told_dead_and_then_back() -> None:
    h = ApiCluster()
    h.look(living("trainer", "rank-0"))
    assert h.look(living("trainer", "rank-0", "2")) == [Change.DIED]
    assert h.look(living("trainer", "rank-0", "2")) == [Change.RETURNED]


def test_a_member_that_says_goodbye_is_forgotten_without_a_word() -> None:
    h = ApiCluster()
    h.look(living("actor", "a"))
    assert h.look(living("actor", "a", closed=True)) == [Change.FORGET]
    assert h.look() == []


def test_a_replacement_under_another_name_ends_the_search_for_a_role_but_not_for_a_dcs_node() -> None:
    h = ApiCluster()
    h.look(living("rollout", "r1"), living("dcs", "n0"))
    h.look()
    h.look(living("rollout", "r2"), living("dcs", "n1"))
    assert h.look(living("rollout", "r2"), living("dcs", "n1")) == [Change.REPLACED]
    assert [s.id for s in registry.missing(h.roster.values())] == ["n0"]


def test_a_dead_replica_is_missed_until_enough_are_alive() -> None:
    h = ApiCluster()
    a, b, c = (living("coordinator", x) for x in "abc")
    h.look(a, b)
    h.look(b)
    assert [s.id for s in registry.missing(h.roster.values())] == ["a"]
    h.look(b, c)
    h.look(b, c)
    assert not registry.missing(h.roster.values())


def test_the_end_of_a_run_or_of_an_old_epoch_is_no_death() -> None:
    h = ApiCluster()
    h.look(living("engine", "e1", epoch=1), living("dcs", "n0"))
    assert h.look(living("dcs", "n0"), epoch=2) == [Change.FORGET]
    h.look(living("engine", "e2", epoch=2), living("dcs", "n0"), epoch=2)
    assert h.look(living("dcs", "n0"), epoch=2, run_over=True) == [Change.FORGET]


def test_the_driver_of_an_old_epoch_is_missed_because_it_died() -> None:
    h = ApiCluster()
    h.look(living("driver", "d1", epoch=1), epoch=1)
    assert Change.DIED in h.look(living("driver", "d2", epoch=2), epoch=2)


def test_a_death_that_was_reported_is_no_return_while_its_process_says_goodbye() -> None:
    h = ApiCluster()
    h.look(living("engine", "e1"))
    h.roster[("engine", "e1")] = h.roster[("engine", "e1")].replace(dead_at=h.now, reported=True)
    assert h.look(living("engine", "e1")) == []


def test_a_lease_that_was_lost_and_regained_by_the_same_process_is_a_return() -> None:
    h = ApiCluster()
    h.look(living("coordinator", "a"))
    h.look()
    assert h.look(living("coordinator", "a")) == [Change.RETURNED]


@given(st.lists(st.dictionaries(st.sampled_from(["rank-0", "rank-1"]), st.integers(1, 3), max_size=2), max_size=30))
def test_deaths_and_returns_of_a_member_alternate(story) -> None:
    h = ApiCluster()
    for there in story:
        h.look(*(living("trainer", i, str(n)) for i, n in there.items()))
    for member in ("rank-0", "rank-1"):
        told = [c for c, i in h.told if i == member]
        for before, after in zip(told, told[1:], strict=False):
            assert (before, after) in {
                (Change.SEEN, Change.DIED), (Change.DIED, Change.RETURNED), (Change.RETURNED, Change.DIED),
                (Change.DIED, Change.REPLACED), (Change.REPLACED, Change.SEEN)}
