"""When a part counts as back, and the arithmetic of the rows of recovery. Nothing here is timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_rl.bench import recovery
from elastic_rl.bench.loop.outages import Outage
from elastic_rl.bench.recovery import engine_hosts, overhead, run_parts, services, trainer_hosts, trials
from elastic_rl.bench.recovery.host_runs import NEXT_STEP, REDONE, Watched
from elastic_rl.errors import DeadlineExceeded, EtcdUnavailable


class World:
    """A clock that only pauses move, and milestones that hold from a time on."""

    def __init__(self) -> None:
        self.now = 100.0

    def follow(self, milestones: dict[str, Callable[[], object]], *needed: str, timeout_s: float = 60.0
               ) -> trials.Trial:
        return trials.follow(milestones, needed, timeout_s=timeout_s, now=lambda: self.now, pause=self._pause)

    def _pause(self, _seconds: float) -> None:
        self.now += 1.0

    def since(self, seconds: float) -> Callable[[], bool]:
        return lambda: self.now >= 100.0 + seconds


# -- what a kill is followed by ---------------------------------------------------------------------------------------
def test_milestones_count_from_the_kill() -> None:
    world = World()
    found = world.follow({"a": world.since(2), "b": world.since(5), "c": world.since(9)}, "b")
    assert found == {"a": 2.0, "b": 5.0}


def test_milestone_that_stops_holding_counts_from_when_it_holds_again() -> None:
    """A process that is just ending may be seen once more: that is no recovery."""
    world = World()
    found = world.follow({"serves": lambda: world.now < 102.0 or world.now >= 107.0, "end": world.since(9)}, "end")
    assert found == {"serves": 7.0, "end": 9.0}


def test_needed_milestones_hold_at_the_same_time() -> None:
    world = World()
    found = world.follow({"a": lambda: world.now != 103.0, "b": world.since(3)}, "a", "b")
    assert found == {"a": 4.0, "b": 3.0}


def test_etcd_that_does_not_answer_is_no_milestone() -> None:
    world = World()

    def read() -> bool:
        if world.now < 104.0:
            raise EtcdUnavailable("away")
        return True

    assert world.follow({"read": read}, "read") == {"read": 4.0}


def test_wait_for_what_never_comes_back_ends_and_names_it() -> None:
    world = World()
    with pytest.raises(DeadlineExceeded, match="20 s after a kill this did not hold: the step$"):
        world.follow({"driver": world.since(1), "the step": lambda: False}, "driver", "the step", timeout_s=20.0)


def test_step_that_is_done_before_the_replacement_is_no_recovery() -> None:
    """Actors go on for a while when Ray's head is gone."""
    world, outage, done = World(), Outage(step=4, began=100.0, ended=100.0), [5, 5, 5, 6, 6, 7]

    def step() -> int:
        return done[min(int(world.now - 100.0), len(done) - 1)]

    milestones = run_parts.after_replacement(world.since(4), lambda: step() > outage.step, outage, step)
    found = world.follow(milestones, run_parts.STEP)
    assert found[run_parts.STEP] == 5.0 and outage.step == 6


# -- rows -------------------------------------------------------------------------------------------------------------
def test_rows_have_the_median_and_the_maximum_beyond_the_bare_start() -> None:
    found = [{"api": 1.0, "node": 4.0}, {"api": 6.5, "node": 5.0}, {"api": 1.0, "node": 5.5}]
    row, most = trials.rows("r", "kill", found, ("api", "node"), goal=3.0, bare=[1.9, 2.0, 9.0])
    assert (row.value, row.goal, row.met, row.samples) == (3.5, 3.0, False, 3)
    assert (most.id, most.value, most.met) == ("r-max", 4.5, False)
    assert row.alternatives == {"with it": 5.5, "bare start": 2.0, "api": 1.0, "node": 5.0}


def test_missed_row_names_the_longest_part_of_what_it_waited_for() -> None:
    found = [{"driver": 4.0, "engines": 44.0, "beside": 45.0, "step": 50.0, "later": 500.0}]
    stages = ("driver", "engines", "later")
    row, _ = trials.rows("r", "kill", found, ("step",), goal=10.0, stages=stages)
    assert row.name == "kill → step; longest: 40.0 of 50.0 s from “driver” to “engines”"
    row, _ = trials.rows("r", "kill", found, ("step",), goal=60.0, stages=stages)
    assert row.name == "kill → step" and row.met is True


def test_row_of_one_milestone_does_not_repeat_itself() -> None:
    row, _ = trials.rows("r", "kill", [{"step": 5.0}], ("step",), goal=3.0)
    assert row.name == "kill → step" and row.alternatives == {}


def test_milestone_that_one_trial_lacks_is_left_out() -> None:
    assert trials.medians([{"a": 3.0, "b": 1.0}, {"a": 5.0}]) == {"a": 4.0}
    assert trials.medians([]) == {} and trials.longest([], ("a",), ()) == ""


def test_rows_without_a_trial_have_no_value() -> None:
    rows = [*trials.rows("r", "kill", [], ("step",), goal=3.0), *trials.unmeasured("u", "kill", "it ended", goal=3.0)]
    assert [row.id for row in rows] == ["r", "r-max", "u", "u-max"]
    assert all(row.value is None and row.met is None and row.goal == 3.0 for row in rows)


def test_overhead_adds_the_cores_of_all_parts_in_each_interval() -> None:
    readings = [(0.0, {"etcd": 1.0, "agent": 0.0}), (10.0, {"etcd": 1.5, "agent": 0.1}),
                (20.0, {"etcd": 1.6, "agent": 0.2}), (30.0, {"etcd": 1.7, "agent": 0.3, "new": 9.0})]
    row, most = overhead.rows(readings)
    assert (row.value, row.met, row.samples) == (pytest.approx(0.02), True, 3)
    assert row.alternatives == {"agent": pytest.approx(0.01), "etcd": pytest.approx(0.01)}, "it was there once only"
    assert (most.value, most.met) == (pytest.approx(0.06), False)


def test_each_listed_row_is_measured() -> None:
    made = {module: [row.id for row in rows] for module, rows in {
        "overhead": overhead.rows([(0.0, {"etcd": 0.0}), (1.0, {"etcd": 0.0})]),
        "services": [row for name, service in services.SERVICES.items()
                     for row in services.rows(name, [{services.API: 1.0, service.works: 2.0}], [1.0])],
        "agent": trials.rows("agent-kill", "", [], (), goal=3.0),
        "run_parts": [row for name, kind in run_parts.KINDS.items()
                      for row in run_parts.rows(name, [{kind.end: 1.0, run_parts.STEP: 2.0}])],
        "trainer_hosts": [row for name, of in trainer_hosts.ROWS.kinds.items()
                          for row in trainer_hosts.ROWS.of(name, [{of.end: 1.0, REDONE: 2.0}])],
        "engine_hosts": [row for name, to in engine_hosts.ROWS.kinds.items()
                         for row in engine_hosts.ROWS.of(name, [{to.end: 1.0}])]}.items()}
    assert {module: sorted(rows) for module, rows in recovery.SUITE.rows.items()} == {
        module: sorted(rows) for module, rows in made.items()}


def test_longest_time_without_a_new_step_counts_steps_that_are_done_again_as_none() -> None:
    watched = Watched(marks={"early": 1.0, "formed": 4.0, "ranks": 7.0})
    for now, step in ((0.0, 10), (1.0, 11), (2.0, 12), (3.0, 12), (5.0, 0), (7.0, 11), (8.0, 12), (9.0, 13), (9.5, 14)):
        watched.add(now, step)
    assert watched.trial() == {"early": 0.0, "formed": 2.0, "ranks": 5.0, NEXT_STEP: 7.0, REDONE: 1.0}
    row, _, redone = trainer_hosts.ROWS.of("shrink", [{"the group is another one": 2.0, "all ranks are there": 17.0,
                                                     NEXT_STEP: 20.0, REDONE: 3.0}])
    assert (redone.value, redone.unit) == (3.0, "steps") and REDONE not in row.alternatives
    assert row.met is False and "15.0 of 20.0 s from “the group is another one” to “all ranks are there”" in row.name
