"""Schedules of faults: what is drawn, kept in a file, and made smaller."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_tests.faults.catalogue import WEIGHTS
from chaos_tests.nemesis.schedule import Schedule, Strike, drawn, drawn_by_time, shrunk

CATALOGUE = {f"fault-{n}": 1.0 + n for n in range(6)}
seeds = st.integers(0, 2**64)


@given(seeds, st.integers(1, 40))
def test_schedule_follows_from_its_seed_and_has_what_was_asked_for(seed: int, faults: int) -> None:
    found = drawn(seed, 180, faults, CATALOGUE, before=3, apart=4, after=7)
    assert found == drawn(seed, 180, faults, dict(reversed(CATALOGUE.items())), before=3, apart=4, after=7)
    assert found.faults == faults and {name for s in found.strikes for name in s.faults} <= CATALOGUE.keys()
    steps = [s.step for s in found.strikes]
    assert all(b - a >= 4 for a, b in itertools.pairwise(steps)) and steps[0] > 3 and steps[-1] <= 180 - 7
    counts = Counter(name for s in found.strikes for name in s.faults)
    assert faults < len(CATALOGUE) and max(counts.values()) == 1 or len(counts) == len(CATALOGUE)
    assert all(len(set(s.faults)) == len(s.faults) for s in found.strikes), "two of a kind are one fault"
    assert Schedule.from_json(found.to_json(), [*CATALOGUE]) == found


@given(seeds, st.integers(1, 20), st.integers(1, 15))
def test_schedule_by_time_has_its_faults_at_seconds_that_are_apart(seed: int, faults: int, apart: int) -> None:
    found = drawn_by_time(seed, 6.0, faults, CATALOGUE, before_s=20, apart_s=apart, after_s=40)
    assert found.by_time and found.faults == faults and (found.steps, found.minutes) == (0, 6.0)
    seconds = [s.second for s in found.strikes]
    assert all(b - a >= apart for a, b in itertools.pairwise(seconds)) and 20 < seconds[0] <= seconds[-1] <= 320
    assert all(s.step == 0 for s in found.strikes)
    assert Schedule.from_json(found.to_json(), [*CATALOGUE]) == found


def test_file_keeps_what_the_run_is_of() -> None:
    made = replace(drawn(1, 60, 6, CATALOGUE), scenario="quick", settings=("--rollout.engines=2",))
    assert Schedule.from_json(made.to_json(), [*CATALOGUE]) == made
    chosen = replace(made, baseline=True)
    assert Schedule.from_json(chosen.to_json(), [*CATALOGUE]) == chosen


def test_seeds_differ_and_faults_meet() -> None:
    found = [drawn(seed, 100, 20, CATALOGUE) for seed in range(50)]
    assert len({s.strikes for s in found}) == 50
    assert any(len(strike.faults) == 2 for s in found for strike in s.strikes)
    assert all(len(strike.faults) == 1 for strike in drawn(1, 100, 20, CATALOGUE, together=0.0).strikes)


@pytest.mark.parametrize(("steps", "faults", "catalogue"), [
    (20, 30, CATALOGUE), (8, 1, CATALOGUE), (60, 0, CATALOGUE), (60, 1, {}), (60, 1, {"a": 0.0})])
def test_numbers_that_do_not_fit_are_refused(steps: int, faults: int, catalogue: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="a schedule has|steps apart"):
        drawn(1, steps, faults, catalogue)


@pytest.mark.parametrize("changed", [
    {"form": 1}, {"minutes": 1.0}, {"settings": None}, {"minutes": "x"}, {"baseline": 1},
    {"baseline": "no"}, {"evil": 1}, {"form": 2.5},
    {"strikes": [{"step": 3, "faults": ["fault-1"], "second": 0, "x": 1}]}, {"steps": 0},
    {"strikes": [], "steps": 1 << 70},
    {"strikes": [{"step": 3, "faults": ["fault-1"], "second": 2.0}]},
    {"minutes": math.inf}, {"minutes": math.nan}, {"minutes": True}, {"minutes": 10**400}, {"seed": -1},
    {"seed": 1 << 200},
    {"settings": "--a=1"}, {"settings": ["train.lr=1"]}, {"settings": [["--a=1"]]}, {"scenario": None}, {"strikes": {}},
    {"strikes": [5]}, {"strikes": [{"step": 3, "faults": [], "second": 0}]},
    {"strikes": [{"step": 3, "faults": "fault-1", "second": 0}]},
    {"strikes": [{"step": 3, "faults": ["fault-1", "fault-1"], "second": 0}]},
    {"strikes": [{"step": 3, "faults": ["fault-1"], "second": math.nan}]},
    {"strikes": [{"step": 10**30, "faults": ["fault-1"], "second": 0}]},
    {"seed": "1"}, {"steps": 1}, {"strikes": None}, {"strikes": [{"step": 3}]},
    {"strikes": [{"step": 3, "faults": ["unheard-of"], "second": 0}]},
    {"strikes": [{"step": True, "faults": ["fault-1"], "second": 0}]},
    {"strikes": [{"step": 4, "faults": ["fault-1"], "second": 0}, {"step": 4, "faults": ["fault-2"], "second": 0}]}])
def test_file_that_is_no_schedule_is_refused(changed: dict[str, Any]) -> None:
    fields = json.loads(drawn(1, 60, 6, CATALOGUE).to_json())
    with pytest.raises(ValueError):
        Schedule.from_json(json.dumps(fields | changed), [*CATALOGUE])


def test_schedule_with_a_name_twice_is_refused() -> None:
    text = drawn(1, 60, 6, CATALOGUE).to_json().replace('"seed": 1,', '"seed": 1, "seed": 2,')
    with pytest.raises(ValueError, match="a name twice"):
        Schedule.from_json(text, [*CATALOGUE])


def test_schedule_with_more_faults_than_a_run_may_have_is_refused() -> None:
    fields = json.loads(drawn(1, 60, 6, CATALOGUE).to_json())
    strikes = [{"step": n, "faults": ["fault-1"], "second": 0} for n in range(1, 10_002)]
    with pytest.raises(ValueError, match="it has 10,001 faults"):
        Schedule.from_json(json.dumps(fields | {"steps": 20_000, "strikes": strikes}), [*CATALOGUE])
    assert Schedule.from_json(json.dumps(fields | {"steps": 20_000, "strikes": strikes[1:]}), [*CATALOGUE]).faults


def test_schedule_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        Schedule.from_json("[" * 100_000, [*CATALOGUE])


def test_more_faults_than_find_room_are_refused_before_they_are_drawn() -> None:
    for steps, faults in ((100, 10**12), (10**6, 10**9)):
        with pytest.raises(ValueError, match="steps apart"):
            drawn(1, steps, faults, CATALOGUE)


@given(seeds, st.sets(st.sampled_from(sorted(CATALOGUE)), min_size=1, max_size=3))
def test_failing_schedule_is_shrunk_to_the_faults_that_make_it_fail(seed: int, culprits: set[str]) -> None:
    schedule = drawn(seed, 120, 24, CATALOGUE)
    tried = list[Schedule]()

    def fails(one: Schedule) -> bool:
        tried.append(one)
        return culprits <= {name for s in one.strikes for name in s.faults}

    found = shrunk(schedule, fails, tries=400)
    assert sorted(name for s in found.strikes for name in s.faults) == sorted(culprits)
    assert {(s.step, f) for s in found.strikes for f in s.faults} <= {
        (s.step, f) for s in schedule.strikes for f in s.faults}
    assert (found.seed, found.steps) == (schedule.seed, schedule.steps)
    assert all(one.strikes for one in tried), "a run without faults is another run"


@given(seeds, st.integers(0, 6))
def test_shrinking_ends_after_its_tries_with_a_schedule_that_fails(seed: int, tries: int) -> None:
    schedule, count = drawn(seed, 120, 24, CATALOGUE), 0

    def fails(one: Schedule) -> bool:
        nonlocal count
        count += 1
        return any("fault-0" in s.faults for s in one.strikes)

    found = shrunk(schedule, fails, tries=tries)
    assert count <= tries and any("fault-0" in s.faults for s in found.strikes)


def test_single_fault_is_as_small_as_it_gets() -> None:
    one = Schedule(1, 10, (Strike(3, ("fault-0",)),))
    assert shrunk(one, lambda _: pytest.fail("it is run again"), tries=9) == one


def test_every_fault_of_the_catalogue_can_be_drawn() -> None:
    found = drawn(1, 60, len(WEIGHTS), WEIGHTS)
    assert sorted(name for strike in found.strikes for name in strike.faults) == sorted(WEIGHTS)
