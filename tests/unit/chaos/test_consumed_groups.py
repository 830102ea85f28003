"""A committed state of the trainer has consumed what the steps up to it have trained on, and what was dropped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.groups import ConsumedOfSteps
from chaos_tests.validate.judge import broken, show
from chaos_tests.validate.training import TrainedOnce
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.etcd.keys import Keys

JOB = Keys("job")
A_STEP = 4
"""Groups of a step."""


def step(number: int, version: int, groups: Sequence[int] | None = None, **more: Any) -> Event:
    first = (number - 1) * A_STEP
    return {"kind": Kind.STEP, "at": float(version), "step": number, "policy_version": version, "samples": 8,
            "groups": [*range(first, first + A_STEP)] if groups is None else [*groups], **more}


def state(number: int, at_step: int, version: int, spans: list[list[int]], *, trained: int | None = None,
          dropped: dict[str, int] | None = None) -> Event:
    consumed = {"groups": spans, "dropped": dropped or {}, "trained": sum(stop - start for start, stop in spans) - sum(
        (dropped or {}).values()) if trained is None else trained}
    record = {"state": "committed", "number": number, "meta": {
        "phase": "rl", "step": at_step, "policy_version": version, "consumed": consumed}}
    return {"kind": Kind.CHANGE, "revision": number, "put": True, "create": number, "value": json.dumps(record),
            "key": JOB.version("trainer_state", number)}


def found(*events: Event) -> list[str]:
    return [violation.what for violation in broken([*events], [ConsumedOfSteps])]


SOUND = (state(1, 0, 1, []), step(1, 2), state(2, 1, 2, [[0, 4]]), step(2, 3), step(3, 4), state(3, 3, 4, [[0, 12]]))


def test_states_that_have_consumed_what_was_trained_on_keep_i5() -> None:
    assert found(*SOUND) == []
    assert found(*sorted(SOUND, key=lambda event: str(event["kind"]))) == [], "steps are copied after changes are seen"
    again = (step(2, 6), step(3, 7, [30, 31, 32, 33]), state(4, 3, 7, [[0, 8], [30, 34]]))
    assert found(*SOUND, *again) == [], "steps that are done again, with other groups"
    assert found(*SOUND, state(4, 3, 9, [[0, 12]])) == [], "published again by a loop that resumes from it"
    dropped = state(3, 3, 4, [[0, 14]], dropped={"reward": 2})
    assert found(*SOUND[:-1], dropped) == []


@pytest.mark.parametrize("event", [
    state(3, 3, 4, [[0, 8]]), state(3, 3, 4, []), state(3, 3, 4, [[0, 1000]]), state(3, 2, 4, [[0, 12]]),
    state(3, 3, 4, [[0, 12]], trained=11), state(3, 3, 4, [[0, 14]]), state(3, 3, 4, [[0, 13]], dropped={"a": 2}),
    state(3, 3, 4, [[1, 12]]), state(3, 0, 4, [[0, 12]])],
    ids=["frozen", "empty", "all that follows", "a step less", "count", "more", "fewer dropped", "first group",
         "of the begin"])
def test_state_that_has_consumed_something_else_breaks_i5(event: Event) -> None:
    assert len(found(*SOUND[:-1], event)) == 1


def test_state_of_steps_that_were_undone_does_not_hide_one_of_those_in_effect() -> None:
    again = (step(2, 6), step(3, 7, [30, 31, 32, 33]))
    assert len(found(*SOUND, *again, state(4, 3, 7, [[0, 12]]))) == 1


def test_job_that_was_begun_before_has_consumed_what_it_began_with() -> None:
    first, later = state(1, 9, 10, [[0, 36]]), (step(10, 11), step(11, 12))
    assert found(first, *later, state(2, 11, 12, [[0, 44]])) == []
    assert found(*later, state(2, 10, 11, [[0, 40]]), state(3, 11, 12, [[0, 44]])) == [], "its begin is unseen"
    for wrong in ([[0, 40]], [[0, 50]], [[36, 44]]):
        assert len(found(first, *later, state(2, 11, 12, wrong))) == 1, wrong
        assert len(found(*later, state(2, 10, 11, [[0, 40]]), state(3, 11, 12, wrong))) == 1, wrong


def test_what_lacks_the_records_of_its_steps_is_not_judged() -> None:
    checker = ConsumedOfSteps()
    show([*SOUND[:3], step(3, 4), state(3, 3, 4, [[0, 99]])], [checker])
    assert checker.violations == () and checker.judged == 2


@given(st.lists(st.tuples(st.integers(1, 4), st.sets(st.integers(0, 40), max_size=4)), min_size=1, max_size=8))
def test_states_of_any_run_that_goes_back_are_accepted_and_those_with_one_group_more_are_not(
        done: list[tuple[int, set[int]]]) -> None:
    """``done``: how many steps back each one is from the one that would be next, and its groups."""
    events, last, effective = list[Event](), 0, dict[int, set[int]]()
    for version, (back, groups) in enumerate(done, 2):
        last = max(1, last + 2 - back)
        effective = {n: g for n, g in effective.items() if n < last} | {last: groups}
        consumed = IntervalSet.from_values(set[int]().union(*effective.values()))
        events += [step(last, version, sorted(groups)), state(version, last, version, consumed.to_json())]
    assert found(*events) == []
    more = consumed | IntervalSet(((50, 51),))
    assert len(found(*events[:-1], state(len(done) + 1, last, len(done) + 1, more.to_json()))) == 1


@pytest.mark.parametrize(("record", "schedule", "sound"), [
    (step(1, 2), "sync", True), (step(1, 2, [0, 1, 2]), "sync", False), (step(1, 2, range(5)), "sync", False),
    (step(1, 2, [0, 1, 2], dropped_groups=1), "sync", True), (step(1, 2, [1, 2, 3, 4]), "sync", False),
    (step(1, 2, [1, 2, 3, 4], dropped_groups=1), "sync", True), (step(1, 2, samples=0), "sync", False),
    (step(1, 2, [0, 1]), "fully_async", True), (step(1, 2, samples=0), "fully_async", False),
    (step(7, 8), "sync", True)],
    ids=["whole", "one less", "one more", "one dropped", "the first group of the run", "the first one dropped",
         "no samples", "parts", "no samples of parts", "begun before"])
def test_step_has_its_groups_and_samples(record: Event, schedule: str, sound: bool) -> None:
    run = {"kind": Kind.RUN, "settings": {"train": {"prompts_per_step": A_STEP, "schedule": schedule}}}
    assert (broken([run, record], [TrainedOnce]) == []) == sound
