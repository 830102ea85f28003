"""Decides whose fault it is that prompt groups fail: the group's, which is dropped in the end; or that of the user's
function, of a service it asks, of the engines or of the trainer, which the run waits for. Pure: the time is passed in.

A group may make a function raise, hang or end its process whenever it is tried, and must not hold the run up. A
function that is wrong, or asks a service that is away, fails for every group, and dropping groups would use up the data
without learning. What happens to other groups meanwhile shows which one it is. One attempt shows one of four failures:

- ``GROUP``: the function failed for this group, and its process went on;
- ``PROCESS``: its process or thread ended with all groups under way there, and any of them may be to blame;
- ``ENGINES``: no engine answered in as many attempts as there are. Mostly they are away; but a group may be what ends
  each of them, or always takes longer than they may;
- ``SERVICE``: something does not answer, or the function was not called, which says nothing about the group.

Each group that is not done is in one of two lanes, and each lane has a process (or instance) of the function::

            add                        GROUP, SERVICE: after a pause
             |                          +------+
             v                          |      |
         +----------------------------------+  |
         | MAIN: beside all other groups    |<-+
         +----------------------------------+
             |    ^                 |
     PROCESS |    | GROUP           | success -> DONE
             v    |                 |
         +----------------------------------+
         | PROBATION: in rounds, of which   |<-+
         | one is tried at a time           |  |  PROCESS: the next round is half as large (or a single group)
         +----------------------------------+  |  SERVICE: the round stays as large as it was
             |                          |      |
             | success -> DONE          +------+

    In both lanes: a failure that counts, after ``attempts`` of them and within the limit -> DROP

    ENGINES: groups that failed together stay together in MAIN. A group that fails so ``_UNANSWERED`` times, while the
    function worked for others in between, goes to PROBATION; only failures that it has there alone count. A group that
    ends engines fails others with it, which succeed once they are tried without it.

A failure *counts* when the function worked in the same lane for another group since this group failed before, and when
nothing else can be to blame: after ``PROCESS`` the group must have been the only one there. So that this can be known
where no other group comes by, the lane *wants a probe* after a failure: a group for which the function worked before.

The limit: of the last ``window`` groups at most a share is dropped. Beyond it the function is taken to be at fault, and
groups are tried again without end; failures by ``ENGINES`` have a limit of the same size for themselves. An outage of a
service, or of all engines, has no limit: it pauses the run (I11) and drops nothing, since nothing works meanwhile.
"""

from __future__ import annotations

import enum
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from elastic_rl.config import Config
from elastic_rl.errors import SourceFailed
from elastic_rl.runtime.backoff import RetryBackoff

T = TypeVar("T")

_LEAST_DEMONSTRATIONS = 8
"""The fewest demonstrations of which a share may be left out: of one or two, a share says nothing."""
_UNANSWERED = 2
"""Failures by ``ENGINES`` beside others that are answered, before a group is tried alone."""


class Failure(enum.Enum):
    """The kinds of a failed attempt, by whose fault it can be."""

    GROUP = "group"
    """The function failed for this group while its process went on."""
    PROCESS = "process"
    """The process or thread of the function ended, with every group that was under way there."""
    ENGINES = "engines"
    """No engine answered for the group."""
    SERVICE = "service"
    """What the function asks does not answer, or the function was not called."""

    @classmethod
    def of(cls, *, shared: bool, away: bool, unanswered: bool = False) -> Failure:
        return cls.ENGINES if unanswered else cls.SERVICE if away else cls.PROCESS if shared else cls.GROUP


class Lane(enum.Enum):
    """The place in which a group is tried."""

    MAIN = "main"
    """The group is tried beside all others."""
    PROBATION = "probation"
    """The group is tried in another process or instance of the function, so that a group which ends it ends no group of
    ``MAIN``."""


class Verdict(enum.Enum):
    """What becomes of a group after an attempt."""

    DONE = "done"
    RETRY = "retry"
    """The group is tried again after a pause."""
    LIMIT = "limit"
    """The group is tried again, as with ``RETRY``: it has used up its attempts, but too many groups were dropped, so
    the function is at fault."""
    DROP = "drop"
    """The group has failed for good."""

    def reason(self, why: str, correct: str) -> str:
        """``why``, and why the group is not dropped. ``correct``: what the user is to correct."""
        return f"{why} (more of the last groups failed than rollout.max_failed_groups allows, so none is dropped: " \
               f"correct {correct})" if self is Verdict.LIMIT else why


class Trial(Generic[T]):
    """Groups that one call tries: those that were added together or, once it has failed, a single one."""

    def __init__(self, groups: Sequence[T], lane: Lane, retry: RetryBackoff) -> None:
        self.groups, self.lane, self.retry = groups, lane, retry
        self.worked: int | None = None
        """Number of groups for which the function had worked in the lane when this one failed last, or was first tried.
        """
        self.round_size = 1
        """The most groups that a round of probation with this one may have."""
        self.is_alone = False
        """Whether it was sent as the only one of its lane; known in ``PROBATION``."""
        self.failures = 0
        """Attempts that failed, but for those of a service."""
        self.counted = 0
        """Attempts that count against the group."""
        self.unanswered = 0
        """Attempts in ``MAIN`` that no engine answered, although others were answered since the one before."""


@dataclass
class _LaneState(Generic[T]):
    waiting: dict[Trial[T], None]
    """Trials that wait for the lane, in the order in which they came."""
    running: dict[Trial[T], None]
    worked: int = 0
    """Groups for which the function worked here. Those of the other lane say nothing: this process may fail for a
    reason of its own, such as memory for one process only."""
    wants_probe: bool = False
    is_probing: bool = False


class DropLimit:
    """How many of the last groups may be dropped."""

    def __init__(self, max_share: float, window: int) -> None:
        """``max_share``: fraction of the last ``window`` groups; a share above 0 allows at least one."""
        self._max_share, self._window = max_share, window
        self._most = max(1, int(max_share * window)) if max_share > 0 else 0
        self._dropped: deque[bool] = deque(maxlen=window)

    @classmethod
    def of(cls, cfg: Config, phase: Literal["sft", "rl"] = "rl") -> DropLimit:
        """The limit as the section ``rollout`` has it, of as many groups, or demonstrations, as a step has; of a few
        more where a step has very few."""
        window = (max(cfg.sft.batch_size, _LEAST_DEMONSTRATIONS) if phase == "sft"
                  else max(cfg.train.prompts_per_step, cfg.groups_per_request))
        return cls(cfg.rollout.max_failed_groups, window)

    def copy(self) -> DropLimit:
        """A limit of the same size, of which nothing is used up."""
        return DropLimit(self._max_share, self._window)

    def kept(self, groups: int = 1) -> None:
        """The function worked for so many groups."""
        self._dropped.extend([False] * groups)

    def drop(self) -> bool:
        """Whether one more group may be dropped, which then counts."""
        if sum(self._dropped) >= self._most:
            return False
        self._dropped.append(True)
        return True


class FaultIsolation(Generic[T]):
    """Says of one function which groups are tried where and when, and what becomes of those for which it fails.

    The caller makes the calls: it sends what ``start`` and ``probe`` give, and settles what has ended.
    """

    def __init__(self, *, attempts: int, limit: DropLimit, retry_s: tuple[float, float], halves: bool = False) -> None:
        """``attempts``: failures that count before a group is dropped. ``retry_s``: first and longest pause between two
        attempts of a group. ``halves``: groups that were under way when their process ended are tried in rounds of half
        as many, which explains the end of many in few rounds where one attempt takes minutes; else one by one, which
        ends the process no more often than there are groups to blame."""
        self._attempts, self._limit, self._retry_s, self._halves = attempts, limit, retry_s, halves
        self._limit_of_engines = limit.copy()
        self._known_good: T | None = None
        """The group for which the function worked last: as long as it works for that one again, it works."""
        self._others = 0
        """Other groups that probes were made of."""
        self.reset()

    @classmethod
    def of(cls, cfg: Config, retry_s: tuple[float, float], *, halves: bool = False, limit: DropLimit | None = None
           ) -> FaultIsolation[T]:
        """The rules as the section ``rollout`` has them. ``limit``: one that outlives this; None for a new one."""
        return cls(attempts=cfg.rollout.reward_attempts, retry_s=retry_s, halves=halves,
                   limit=DropLimit.of(cfg) if limit is None else limit)

    def reset(self) -> None:
        """Forgets all groups that are not done; the limit still knows of the last groups, and probes of the one that
        worked."""
        self._lanes: dict[Lane, _LaneState[T]] = {lane: _LaneState({}, {}) for lane in Lane}

    @property
    def is_pending(self) -> bool:
        """Whether there are groups that are not done."""
        return any(state.waiting or state.running for state in self._lanes.values())

    @property
    def has_probation(self) -> bool:
        """Whether groups are in ``PROBATION``."""
        state = self._lanes[Lane.PROBATION]
        return bool(state.waiting or state.running)

    def add(self, groups: Sequence[T]) -> None:
        """Groups that are to be tried together."""
        self._lanes[Lane.MAIN].waiting[Trial(groups, Lane.MAIN, RetryBackoff(*self._retry_s))] = None

    def start(self, lane: Lane, now: float, most: int = sys.maxsize) -> list[Trial[T]]:
        """What is to be tried in the lane now; it is taken to be under way from now on. ``most``: trials at once."""
        state = self._lanes[lane]
        due = self._round(state, now) if lane is Lane.PROBATION else [
            trial for trial in state.waiting if trial.retry.is_due(now)]
        due = due[:max(0, most - len(state.running))]
        for trial in due:
            del state.waiting[trial]
            state.running[trial] = None
            trial.worked = state.worked if trial.worked is None else trial.worked
            trial.is_alone = lane is Lane.PROBATION and len(due) == 1
        return due

    def is_due(self, lane: Lane, now: float) -> bool:
        """Whether a group waits for the lane whose pause is over."""
        return any(trial.retry.is_due(now) for trial in self._lanes[lane].waiting)

    @staticmethod
    def _round(state: _LaneState[T], now: float) -> list[Trial[T]]:
        """The next round of probation: the group that has failed least often among those whose pause is over, and
        others beside it.

        No round begins while another one or a probe is under way, and no group is in a larger round than it may be:
        else a group that is being tried alone would fail for the sake of another, and be dropped for it."""
        if state.running or state.is_probing:
            return []
        first = min((t for t in state.waiting if t.retry.is_due(now)), key=lambda t: t.failures, default=None)
        if first is None:
            return []
        # The others need not be due: a round that is smaller than it may be takes as long and explains less.
        others = [t for t in state.waiting if t is not first and t.round_size >= first.round_size]
        return [first, *others][:first.round_size]

    def left_s(self, now: float) -> float:
        """Seconds until ``start`` may give something, if nothing ends before."""
        return min((trial.retry.left_s(now) for lane, state in self._lanes.items()
                    if lane is Lane.MAIN or not (state.running or state.is_probing) for trial in state.waiting),
                   default=math.inf)

    def probe(self, lane: Lane, other: Callable[[int], T]) -> T | None:
        """The group that is to be tried in the lane now to show whether the function works; it is taken to be under way
        until ``probed``. In ``PROBATION`` no group is sent beside others, whose process it would share.

        ``other``: a group of the source that was not among those of the run, another one for each number, since the
        function may fail for some of them too. It is used until the function has worked for one group: without it, a
        first group that always fails would be tried without end. None where no probe is wanted, and where ``other``
        raises SourceFailed, since the source gives none now."""
        state = self._lanes[lane]
        if not state.wants_probe or state.is_probing or (lane is Lane.PROBATION and state.running):
            return None
        state.wants_probe, state.is_probing = False, True
        if self._known_good is not None:
            return self._known_good
        self._others += 1
        try:
            return other(self._others)
        except SourceFailed:
            self.probed(lane, works=False)
            return None

    def probed(self, lane: Lane, *, works: bool) -> None:
        """A probe has ended."""
        state = self._lanes[lane]
        state.is_probing = False
        state.worked += works

    def interrupted(self, trial: Trial[T], now: float) -> None:
        """The call failed as a whole before the function was asked: its groups are tried together again."""
        trial.retry.failed(now)
        self._wait(trial)

    def take_back(self, lane: Lane) -> None:
        """No call was made for what is under way in the lane: it is due at once."""
        state = self._lanes[lane]
        state.waiting, state.running = {**state.running, **state.waiting}, {}
        state.wants_probe, state.is_probing = state.wants_probe or state.is_probing, False

    def settle(self, lane: Lane, ended: Sequence[tuple[Trial[T], Sequence[Failure | None]]], now: float
               ) -> list[list[Verdict]]:
        """What becomes of the groups of trials that ended at the same time, from what became of each: None for a
        success.

        Successes are taken first, so that none of them is missed as a sign that the function works."""
        state = self._lanes[lane]
        at_once = sum(len(trial.groups) for trial in state.running)
        for trial, found in ended:
            del state.running[trial]
            worked = [group for group, failure in zip(trial.groups, found, strict=True) if failure is None]
            state.worked += len(worked)
            self._limit.kept(len(worked))
            self._limit_of_engines.kept(len(worked))
            self._known_good = worked[-1] if worked else self._known_good
        return [self._unanswered(trial, now) if lane is Lane.MAIN and {*found} == {Failure.ENGINES} else
                [Verdict.DONE if failure is None else self._failed(trial, group, failure, at_once, now)
                 for group, failure in zip(trial.groups, found, strict=True)] for trial, found in ended]

    def _unanswered(self, trial: Trial[T], now: float) -> list[Verdict]:
        """No engine answered for any group of a trial in ``MAIN``."""
        state, probation = self._lanes[Lane.MAIN], self._lanes[Lane.PROBATION]
        trial.unanswered += state.worked > (trial.worked or 0)
        trial.worked, state.wants_probe, trials = state.worked, True, [trial]
        if trial.unanswered >= _UNANSWERED:
            trials = [trial] if len(trial.groups) == 1 else [self._single(trial, group) for group in trial.groups]
            probation.wants_probe = True
            for one in trials:
                one.lane, one.worked, one.round_size = Lane.PROBATION, probation.worked, max(1, len(trials) // 2)
        for one in trials:
            one.retry.failed(now)
            self._wait(one)
        return [Verdict.RETRY] * len(trial.groups)

    def _failed(self, trial: Trial[T], group: T, failure: Failure, at_once: int, now: float) -> Verdict:
        if len(trial.groups) > 1:
            trial = self._single(trial, group)
        if failure is Failure.ENGINES and trial.lane is Lane.MAIN:
            return self._unanswered(trial, now)[0]
        if failure is not Failure.SERVICE:
            trial.failures += 1
            if self._counts(trial, failure):
                trial.counted += 1
                limit = self._limit_of_engines if failure is Failure.ENGINES else self._limit
                if trial.counted >= self._attempts and limit.drop():
                    return Verdict.DROP
            trial.lane = Lane.MAIN if failure is Failure.GROUP else Lane.PROBATION
            trial.round_size = max(1, at_once // 2) if self._halves else 1
        trial.retry.failed(now)
        to = self._lanes[trial.lane]
        trial.worked = to.worked
        to.wants_probe |= failure is Failure.GROUP or (failure is not Failure.SERVICE and trial.round_size == 1)
        self._wait(trial)
        return Verdict.LIMIT if trial.counted >= self._attempts and failure is not Failure.SERVICE else Verdict.RETRY

    def _counts(self, trial: Trial[T], failure: Failure) -> bool:
        """Whether the failure is the group's own fault.

        A failure does not count while the function works for no other group: an outage would drop every group, as one
        of a judge or of a tool's service did. Nor does one count that others may have caused: all groups beside the one
        that ends a process would be dropped with it. What worked in the other lane is no evidence: a second process
        that finds no memory would have every group in probation dropped."""
        return (self._lanes[trial.lane].worked > (trial.worked or 0)
                and (failure is Failure.GROUP or trial.is_alone))

    def _single(self, trial: Trial[T], group: T) -> Trial[T]:
        single = Trial([group], trial.lane, RetryBackoff(*self._retry_s))
        single.worked, single.is_alone, single.round_size = trial.worked, False, trial.round_size
        single.unanswered = trial.unanswered
        return single

    def _wait(self, trial: Trial[T]) -> None:
        for state in self._lanes.values():
            state.running.pop(trial, None)
        self._lanes[trial.lane].waiting[trial] = None
