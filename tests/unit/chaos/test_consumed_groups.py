"""A committed state of the trainer has consumed what the steps up to it have trained on, and what was dropped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate import groups as of_groups
from chaos_tests.validate.groups import ConsumedOfSteps, missing
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
    state(3, 3, 4, [[1, 12]]), state(3, 0, 4, [[0, 12]]), state(3, 3, 4, [[0, 12]], trained=13),
    state(3, 3, 4, [[0, 13]], dropped={"a": 2}, trained=12)],
    ids=["frozen", "empty", "all that follows", "a step less", "count", "more", "fewer dropped", "first group",
         "of the begin", "counts more", "dropped again"])
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


def by_sets(events: Sequence[Event]) -> list[str]:
    """The states that do not agree with their steps, by a set of all groups for each time that a step was done."""
    effective, after = dict[int, set[int]](), dict[int, list[tuple[int, set[int]]]]()
    for event in events:
        if event["kind"] == Kind.STEP:
            number = event["step"]
            effective = {n: g for n, g in effective.items() if n < number}
            effective[number] = effective.get(number - 1, set()) | set(event["groups"])
            after.setdefault(number, []).append((event["policy_version"], effective[number]))
    before, wrong = min(after) - 1, list[str]()
    states = sorted(((json.loads(event["value"])["meta"], event) for event in events if event["kind"] == Kind.CHANGE),
                    key=lambda found: int(found[0]["step"]))
    known = [{*IntervalSet.from_json(meta["consumed"]["groups"])} for meta, _ in states if meta["step"] == before]
    begun: set[int] | None = set() if before == 0 else known[0] if known else None
    for meta, event in states:
        done = [(0, set[int]())] if meta["step"] == before == 0 else after.get(meta["step"], [])
        has, dropped = {*IntervalSet.from_json(meta["consumed"]["groups"])}, sum(meta["consumed"]["dropped"].values())
        wanted = [g for version, g in done if version == meta["policy_version"]] or [g for _, g in done]
        if not wanted:
            continue
        begun = has - wanted[0] if begun is None else begun
        if all(
                (g | begun) - has or (len(has - g - begun) > dropped if begun else len(has - g) != dropped)
                or (not begun and meta["consumed"]["trained"] != len(g)) for g in wanted):
            wrong.append(event["key"])
    return sorted(wrong)


@st.composite
def runs(draw: st.DrawFn) -> list[Event]:
    """Runs that go back to their states and drop groups, and whose states lack, or have, a group too many now and then.
    The record of a step is behind its state in the log, or before it."""
    begin = draw(st.sampled_from([0, 0, 7]))
    at, ordinal, dropped, number = begin, 4 * begin, 0, 1
    consumed = {begin: (set(range(ordinal)), 0)}
    events = [state(1, begin, 1, IntervalSet.from_values(consumed[begin][0]).to_json())]
    events = events if draw(st.booleans()) else []
    for version in range(2, draw(st.integers(3, 30))):
        if draw(st.integers(0, 5)) == 0:
            at = draw(st.sampled_from(sorted(consumed)))
        has, dropped = consumed[at]
        at, size = at + 1, draw(st.integers(1, 3))
        trained = {*range(ordinal, ordinal + size)}
        drops = draw(st.sampled_from([0, 0, 0, 1]))
        ordinal += size + drops
        has, dropped = has | {*range(ordinal - size - drops, ordinal)}, dropped + drops
        consumed = {n: c for n, c in consumed.items() if n < at} | {at: (has, dropped)}
        found = [step(at, version, sorted(trained))]
        if draw(st.booleans()):
            number += 1
            said = set(has)
            match draw(st.integers(0, 9)):
                case 0:
                    said -= {draw(st.sampled_from(sorted(said)))}
                case 1:
                    said |= {ordinal + 7}
            found.append(state(number, at, version + draw(st.sampled_from([0, 0, 0, 1000])),
                               IntervalSet.from_values(said).to_json(), dropped={"reward": dropped} if dropped else {}))
            if draw(st.booleans()):
                found.reverse()
        events += found
    return events


@given(runs())
def test_states_are_judged_as_by_a_set_for_each_step(events: list[Event]) -> None:
    checker = ConsumedOfSteps()
    show(events, [checker])
    assert sorted(str(v.records[0]["key"]) for v in checker.violations) == by_sets(events)


def test_what_is_held_does_not_grow_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is dropped every third step, so that what a state has consumed grows; one state is of a step that was
    recorded with another version, and one has lost a group, which all later ones lack too."""
    monkeypatch.setattr(of_groups, "_STATES_KEPT", 5)
    events, groups, dropped = list[Event](), list[int](), 0
    for number in range(1, 301):
        dropped += number % 3 == 0
        first = 2 * (number - 1) + dropped
        groups += range(first, first + 2)
        events.append(step(number, number + 1, range(first, first + 2)))
        if number % 2 == 0:
            has = IntervalSet(((0, first + 2),)) - IntervalSet(((190, 191),) if number > 200 else ())
            events.append(state(number, number, 777 if number == 100 else number + 1, has.to_json(),
                                trained=len(groups), dropped={"reward": dropped}))
    checker, held = ConsumedOfSteps(), set[tuple[int, int, int]]()

    def watched() -> Iterator[Event]:
        for event in events:
            yield event
            held.add((len(checker._done), len(checker._effective.of), len(checker._states)))

    show(watched(), [checker])
    assert all(done <= 23 and effective <= 22 and states <= 11 for done, effective, states in held), sorted(held)[-1]
    assert checker.judged == 150 and len(checker.violations) + checker.further == 50


def test_job_that_goes_back_behind_all_that_is_held_is_judged_from_there_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_groups, "_STATES_KEPT", 3)
    done = [e for n in range(1, 21) for e in (step(n, n + 1), state(n, n, n + 1, [[0, A_STEP * n]]))]
    again = [e for n in range(5, 9) for e in (
        step(n, 50 + n), state(50 + n, n, 50 + n, [[0, A_STEP * n - (n == 7)]]))]
    assert len(found(*done, *again)) == 1


spans = st.sets(st.integers(0, 40)).map(lambda values: IntervalSet.from_values(values).to_json())


@given(spans, spans)
def test_ordinals_that_are_missing_are_those_of_the_difference(some: list[list[int]], others: list[list[int]]) -> None:
    assert missing(some, others) == (IntervalSet.from_json(some) - IntervalSet.from_json(others)).to_json()
    assert missing(some[::-1], others[::-1]) == missing(some, others)


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
