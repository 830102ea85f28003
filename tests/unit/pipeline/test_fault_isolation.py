"""Whose fault it is that a function fails for groups: the rules, and a world of groups that are to blame or not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.errors import SourceFailed
from elastic_rl.pipeline.sampling.fault_isolation import DropLimit, Failure, FaultIsolation, Lane, Trial, Verdict

_RETRY_S = (1.0, 4.0)
_PAUSE_S = 10.0
"""Longer than any pause."""


def isolation(attempts: int = 2, share: float = 1.0, window: int = 64, *, halves: bool = False) -> FaultIsolation[int]:
    return FaultIsolation(attempts=attempts, limit=DropLimit(share, window), retry_s=_RETRY_S, halves=halves)


def other(number: int) -> int:
    """A group that is not among those of the run."""
    return -number


class Clock:
    now = 0.0

    def next(self) -> float:
        self.now += _PAUSE_S
        return self.now


def fail(of: FaultIsolation[int], clock: Clock, failure: Failure, lane: Lane = Lane.MAIN, *, probe: bool = True
         ) -> Verdict:
    """Tries the only group that is due. ``probe``: whether the function works for another one meanwhile."""
    if of.probe(lane, other) is not None:
        of.probed(lane, works=probe)
    [trial] = of.start(lane, clock.next())
    [[verdict]] = of.settle(lane, [(trial, [failure])], clock.now)
    return verdict


def test_group_is_dropped_after_attempts_between_which_the_function_worked() -> None:
    one, clock = isolation(attempts=3), Clock()
    one.add([7])
    assert [fail(one, clock, Failure.GROUP) for _ in range(4)] == [Verdict.RETRY] * 3 + [Verdict.DROP]
    assert not one.is_pending


def test_group_is_not_dropped_while_the_function_works_for_no_other() -> None:
    one, clock = isolation(attempts=1), Clock()
    one.add([7])
    assert {fail(one, clock, Failure.GROUP, probe=False) for _ in range(50)} == {Verdict.RETRY}
    assert fail(one, clock, Failure.GROUP) is Verdict.DROP


def test_failure_of_a_service_never_counts_and_needs_another_proof_after_it() -> None:
    one, clock = isolation(attempts=1), Clock()
    one.add([7])
    one.add([8])
    first, second = one.start(Lane.MAIN, clock.next())
    one.settle(Lane.MAIN, [(first, [Failure.SERVICE]), (second, [None])], clock.now)
    assert {fail(one, clock, Failure.SERVICE) for _ in range(50)} == {Verdict.RETRY}
    assert fail(one, clock, Failure.GROUP) is Verdict.RETRY, "what worked before the outage says nothing after it"
    assert fail(one, clock, Failure.GROUP) is Verdict.DROP


def test_process_that_ends_with_several_groups_is_held_against_none() -> None:
    one, clock = isolation(attempts=1, halves=True), Clock()
    for group in range(4):
        one.add([group])
    trials = one.start(Lane.MAIN, clock.next())
    one.settle(Lane.MAIN, [(trial, [Failure.PROCESS]) for trial in trials], clock.now)
    assert not one.start(Lane.MAIN, clock.next()) and one.has_probation
    pair = one.start(Lane.PROBATION, clock.now)
    assert len(pair) == 2 and not one.start(Lane.PROBATION, clock.next()), "one round at a time"
    verdicts = one.settle(Lane.PROBATION, [(trial, [Failure.PROCESS]) for trial in pair], clock.now)
    assert verdicts == [[Verdict.RETRY]] * 2


def test_success_in_the_main_lane_does_not_blame_a_group_in_probation() -> None:
    """As where there is no memory for a second process."""
    one, clock = isolation(attempts=1), Clock()
    one.add([7])
    fail(one, clock, Failure.PROCESS)
    for other in range(20):
        one.add([other])
        [trial] = one.start(Lane.MAIN, clock.next())
        one.settle(Lane.MAIN, [(trial, [None])], clock.now)
        assert fail(one, clock, Failure.PROCESS, Lane.PROBATION, probe=False) is Verdict.RETRY
    assert fail(one, clock, Failure.PROCESS, Lane.PROBATION) is Verdict.DROP


def test_request_that_fails_as_a_whole_stays_together() -> None:
    one, clock = isolation(), Clock()
    one.add([1, 2, 3])
    for _ in range(3):
        [trial] = one.start(Lane.MAIN, clock.next())
        one.interrupted(trial, clock.now)
        assert not one.start(Lane.MAIN, clock.now) and 0 < one.left_s(clock.now) < _PAUSE_S
    [trial] = one.start(Lane.MAIN, clock.next())
    assert trial.groups == [1, 2, 3]
    assert one.settle(Lane.MAIN, [(trial, [None, Failure.GROUP, None])], clock.now) == [
        [Verdict.DONE, Verdict.RETRY, Verdict.DONE]]
    assert [trial.groups for trial in one.start(Lane.MAIN, clock.next())] == [[2]]


def test_what_was_not_called_is_due_at_once_with_its_probe() -> None:
    one, clock = isolation(), Clock()
    one.add([1])
    fail(one, clock, Failure.GROUP)
    one.start(Lane.MAIN, clock.next())
    assert one.probe(Lane.MAIN, other) and not one.probe(Lane.MAIN, other)
    one.take_back(Lane.MAIN)
    assert len(one.start(Lane.MAIN, clock.now)) == 1 and one.probe(Lane.MAIN, other)


def test_probe_is_another_group_until_the_function_has_worked() -> None:
    one, clock, probes = isolation(attempts=9), Clock(), list[int | None]()

    def fails() -> None:
        [trial] = one.start(Lane.MAIN, clock.next())
        one.settle(Lane.MAIN, [(trial, [Failure.GROUP])], clock.now)
        probes.append(one.probe(Lane.MAIN, other))
        one.probed(Lane.MAIN, works=False)

    one.add([7])
    fails()
    fails()
    one.add([8])
    [first, second] = one.start(Lane.MAIN, clock.next())
    one.settle(Lane.MAIN, [(first, [Failure.GROUP]), (second, [None])], clock.now)
    one.reset()
    one.add([7])
    fails()
    assert probes == [-1, -2, 8]


def test_probe_that_the_source_cannot_give_is_asked_for_again_later() -> None:
    one, clock = isolation(), Clock()

    def away(number: int) -> int:
        raise SourceFailed("the file is gone for a moment")

    one.add([7])
    fail(one, clock, Failure.GROUP)
    assert one.probe(Lane.MAIN, away) is None and one.probe(Lane.MAIN, other) is None
    fail(one, clock, Failure.GROUP)
    assert one.probe(Lane.MAIN, other) == -2


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3)), max_size=60), st.sampled_from([0.0, 0.01, 0.25, 1.0]),
       st.integers(1, 12))
def test_dropped_groups_stay_within_the_share_of_the_last_ones(asked: list[tuple[bool, int]], share: float, window: int
                                                               ) -> None:
    limit, last = DropLimit(share, window), list[bool]()
    most = max(1, int(share * window)) if share else 0
    for drops, groups in asked:
        before = sum(last[-window:])
        dropped = [limit.drop() for _ in range(groups)] if drops else []
        if not drops:
            limit.kept(groups)
            last += [False] * groups
        last += [True] * sum(dropped)
        assert sum(last[-window:]) <= most
        assert not drops or before >= most or dropped[0], "it may be dropped while there is room"


def unanswered(of: FaultIsolation[int], clock: Clock, group: int) -> bool:
    """Adds a group that no engine ever answers, while they answer others. Returns whether it is dropped."""
    of.add([group])
    for _ in range(20):
        for lane in Lane:
            if of.probe(lane, other) is not None:
                of.probed(lane, works=True)
            for trial in of.start(lane, clock.next()):
                if of.settle(lane, [(trial, [Failure.ENGINES])], clock.now) == [[Verdict.DROP]]:
                    return True
    return False


def test_share_of_groups_that_engines_do_not_answer_is_of_the_last_groups() -> None:
    one, clock = isolation(share=0.5, window=2), Clock()
    assert unanswered(one, clock, 7) and not unanswered(one, clock, 8)
    one.reset()
    one.add([1, 2])
    [trial] = one.start(Lane.MAIN, clock.next())
    assert one.settle(Lane.MAIN, [(trial, [None, None])], clock.now) == [[Verdict.DONE] * 2]
    assert unanswered(one, clock, 9), "both of the last two were answered"


class World:
    """Groups of which some are to blame, two processes, and one outage."""

    def __init__(self, seed: int, bad: dict[int, Failure], groups: int, outage: Failure | None, *, share: float,
                 halves: bool) -> None:
        self.random, self.bad, self.outage = random.Random(seed), bad, outage
        self.one, self.clock = isolation(2, share, halves=halves), Clock()
        self.outage_begins = self.random.randint(0, 20)
        self.running: dict[Lane, list[Trial[int] | None]] = {lane: [] for lane in Lane}
        self.unsent, self.verdicts = list(range(groups)), dict[int, Verdict]()

    def run(self, steps: int) -> None:
        for step in range(steps):
            if self.unsent and (self.random.random() < 0.6 or not self.one.is_pending):
                size = self.random.choice([1, 1, 4])
                self.one.add(self.unsent[:size])
                del self.unsent[:size]
            now = self.clock.next() if self.random.random() < 0.8 else self.clock.now
            for lane in Lane:
                self._send(lane, now)
            lane = self.random.choice([*Lane])
            self._end(lane, self.outage if 0 <= step - self.outage_begins < 40 else None, now)
            if not self.unsent and not self.one.is_pending:
                return

    def _send(self, lane: Lane, now: float) -> None:
        if (probe := self.one.probe(lane, other)) is not None:
            assert lane is Lane.MAIN or not self.running[lane], "a probe shares no process of a group in probation"
            worked = [group for group, verdict in self.verdicts.items() if verdict is Verdict.DONE]
            assert probe in worked if worked else probe < 0
            self.running[lane].append(None)
        sent = self.one.start(lane, now, 16)
        if lane is Lane.PROBATION and sent:
            assert not self.running[lane], "one round at a time"
            assert all(trial.round_size >= len(sent) for trial in sent)
        self.running[lane] += sent

    def _end(self, lane: Lane, outage: Failure | None, now: float) -> None:
        running = self.running[lane]
        groups = [group for trial in running if trial is not None for group in trial.groups]
        ends_process = outage is Failure.PROCESS or any(self.bad.get(g) is Failure.PROCESS for g in groups)
        ended = running if ends_process else [t for t in running if self.random.random() < 0.7]
        self.running[lane] = [trial for trial in running if trial not in ended]
        failure = Failure.PROCESS if ends_process else outage
        for _ in (trial for trial in ended if trial is None):
            self.one.probed(lane, works=failure is None)
        settled = [(trial, [failure or self.bad.get(g) for g in trial.groups]) for trial in ended if trial is not None]
        for (trial, found), verdicts in zip(settled, self.one.settle(lane, settled, now), strict=True):
            self._note(trial.groups, found, verdicts)

    def _note(self, groups: Sequence[int], found: Sequence[Failure | None], verdicts: Sequence[Verdict]) -> None:
        for group, failure, verdict in zip(groups, found, verdicts, strict=True):
            assert self.verdicts.get(group) not in (Verdict.DONE, Verdict.DROP), "a group is settled once"
            assert (verdict is Verdict.DONE) == (failure is None)
            self.verdicts[group] = verdict


blame = st.dictionaries(st.integers(0, 23), st.sampled_from([Failure.GROUP, Failure.PROCESS]), max_size=6)
outages = st.sampled_from([None, Failure.GROUP, Failure.PROCESS, Failure.SERVICE])


@settings(max_examples=seeds(40), deadline=None)
@given(st.integers(0, 1 << 30), blame, outages, st.booleans())
def test_groups_that_are_to_blame_are_dropped_and_no_others(seed: int, bad: dict[int, Failure], outage: Failure | None,
                                                            halves: bool) -> None:
    world = World(seed, bad, 24, outage, share=1.0, halves=halves)
    world.run(5000)
    assert {group: verdict is Verdict.DROP for group, verdict in world.verdicts.items()} == {
        group: group in bad for group in range(24)}


@settings(max_examples=seeds(40), deadline=None)
@given(st.integers(0, 1 << 30), blame, outages, st.booleans())
def test_groups_beyond_the_limit_hold_up_no_other(seed: int, bad: dict[int, Failure], outage: Failure | None,
                                                  halves: bool) -> None:
    world = World(seed, bad, 24, outage, share=0.0, halves=halves)
    world.run(2500)
    assert Verdict.DROP not in world.verdicts.values()
    assert {group for group, verdict in world.verdicts.items() if verdict is Verdict.DONE} == set(range(24)) - set(bad)
    assert all(world.verdicts[group] in (Verdict.LIMIT, Verdict.RETRY) for group in bad)


@pytest.mark.parametrize("culprits", [(), (9,), (9, 40)])
def test_end_of_a_process_with_many_groups_takes_few_rounds_to_explain(culprits: tuple[int, ...]) -> None:
    """One group after the other would take hours where an episode takes minutes."""
    one, clock, dropped, rounds = isolation(halves=True), Clock(), set[int](), 0
    for group in range(64):
        one.add([group])
    trials = one.start(Lane.MAIN, clock.next())
    one.settle(Lane.MAIN, [(trial, [Failure.PROCESS]) for trial in trials], clock.now)
    while one.is_pending:
        if one.probe(Lane.PROBATION, other) is not None:
            rounds += 1
            one.probed(Lane.PROBATION, works=True)
        if trials := one.start(Lane.PROBATION, clock.next()):
            rounds += 1
            failure = Failure.PROCESS if {g for t in trials for g in t.groups} & set(culprits) else None
            verdicts = one.settle(Lane.PROBATION, [(trial, [failure]) for trial in trials], clock.now)
            dropped |= {t.groups[0] for t, [v] in zip(trials, verdicts, strict=True) if v is Verdict.DROP}
    # Two halves that live. For each culprit, at each of six halvings, the half that ends the process and the one that
    # lives; and attempts alone, with a probe after each.
    assert dropped == set(culprits) and rounds <= 2 + len(culprits) * (2 * 6 + 6)
