"""Rewards and filters, bounded: they run in threads that are given up when they take too long.

Those of the user's own code are in processes of their own, which are killed when they block. Any other code may block
too, swallow its cancellation, or leave tasks behind that never end. The thread that it has is lost then; the thread of
the loop goes on, says so, and tries again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from elastic_rl.config import Config
from elastic_rl.data.samples import Group, Prompt, Sample, as_episode
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.errors import PluginFailed, SourceFailed
from elastic_rl.pipeline.sampling.bounded_calls import TOO_LONG, BoundedCalls, Running
from elastic_rl.pipeline.sampling.generating import Answer
from elastic_rl.pipeline.sampling.reward_calls import (
    GRACE_S,
    RewardAttempt,
    RewardCalls,
    Rewarded,
    RewardFault,
    error_text,
    with_text,
)
from elastic_rl.pipeline.sampling.reward_failures import RewardFailures
from elastic_rl.pipeline.sampling.side_calls import SideCalls
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugins.process import START_S, CallLost
from elastic_rl.plugins.user_code import plain
from elastic_rl.rewards.base import Decode, Judge, RewardAway
from elastic_rl.rewards.own import OwnFilter, close_filter, named_filter, require_reason
from elastic_rl.rewards.registry import make_reward
from elastic_rl.runtime.backoff import RetryBackoff

log = logging.getLogger(__name__)

_RETRY_S = (0.1, 2.0)
"""First and longest pause before a group whose reward failed is tried again."""
_LOOK_S = 0.05
"""How often it is looked for groups that are due while none is under way but suspects."""
_PROBE = -1
"""Number of the group that probes whether the reward works."""
FILTER_FAILED = "filter failed"
"""Why groups are dropped for which a filter failed, though it works for others."""
_TOO_MANY = ("more of the last groups failed than rollout.max_failed_rewards allows, so none is dropped: correct the "
             "reward or the prompts' metadata")

More = Callable[[], Sequence[Answer]]
"""Groups that were generated since the last call. It does not wait."""


@dataclass
class _Lane:
    """Groups that are rewarded by one instance of the reward."""

    rewarded: int = 0
    """So that it is known whether others were rewarded while one failed. Those of the other instance say nothing: this
    one may fail for a reason of its own, such as memory for one only."""
    wants_probe: bool = False
    """Whether another group is to be rewarded, so that the next failure of one can count."""
    is_probed: bool = False
    """Whether that is under way."""


@dataclass
class _Try:
    """A group that is to be rewarded."""

    answer: Answer
    rewarded: int | None = None
    """How many groups its lane had rewarded when it failed last, or began."""
    is_running: bool = False
    is_suspect: bool = False
    """Whether it was under way when the process or the thread of others ended."""
    retry: RetryBackoff = field(default_factory=lambda: RetryBackoff(*_RETRY_S))


class Rewarder:
    """Rewards groups and filters them. Used by one thread.

    A group whose reward fails is tried again beside all others. Those that were under way when their process or thread
    ended are suspects: each is tried alone, by a second instance of the reward, which is there only while it is needed.
    So the one that is to blame ends no other, and none waits for them."""

    def __init__(self, cfg: Config, waits: Waits, *, other: Callable[[int], tuple[Prompt, Sample]],
                 decode: Decode | None = None, judge: Judge | None = None) -> None:
        """``other``: from a number to some prompt of the source and a sample for it; it raises SourceFailed where the
        source gives none, and Fenced. ``decode``: from the token ids of a response to its text, without special tokens;
        without it samples have none. ``judge``: see ``RewardContext``.

        Waits for the user's code, which may take long to be imported. Raises ConfigError for a setting that names
        nothing, and for what the reward needs and this machine lacks; PluginFailed; and Fenced.
        """
        self._cfg, self._waits, self._calls = cfg, waits, BoundedCalls(waits)
        self._other, self._decode = other, decode
        self._others = 0
        rollout = cfg.rollout
        self._filtered: Group | None = None
        """A group that the filters took: as long as they can again, they work."""
        self._failures = RewardFailures(attempts=rollout.reward_attempts, max_share=rollout.max_failed_rewards,
                                        window=max(cfg.train.prompts_per_step, cfg.groups_per_request))
        self._known_good: Answer | None = None
        """A group that was rewarded: as long as it can be again, the reward works."""
        make = partial(make_reward, rollout.reward, rollout.reward_options, decode=decode, pools=cfg.pool_settings(""),
                       judge=judge, seed=cfg.seed, attempts=rollout.max_attempts)
        self._side = SideCalls("reward-suspects", waits)
        self._reward, self._suspect_reward = (RewardCalls(cfg, one, make, decode) for one in (waits, self._side.waits))
        self._closing = contextlib.ExitStack()
        try:
            self._filters = []
            for entry in rollout.filters:
                self._filters.append(self._calls.make(
                    f"the filter {plain(str(entry), 200)}", partial(named_filter, entry, rollout.reward_timeout_s),
                    lambda named: close_filter(named[1]), START_S + GRACE_S))
                self._closing.callback(close_filter, self._filters[-1][1])
            self._closing.callback(self._reward.close)
            self._reward.make()
        except BaseException:
            self.close()  # the caller tries again
            raise

    def close(self) -> None:
        """Ends what the reward and the filters have started."""
        self._side.close()
        self._suspect_reward.close()
        self._closing.close()

    def groups(self, requests: Sequence[PromptRequest], answered: Sequence[Sequence[Sample]]) -> list[Group]:
        """The groups of one request with their rewards: see ``stream``. Raises Fenced."""
        found: dict[int, Group] = {}
        numbers = {request.ordinal: n for n, request in enumerate(requests)}

        def give(group: Group) -> None:
            found[numbers[group.ordinal]] = group

        self.stream(list(zip(requests, answered, strict=True)), lambda: (), give)
        return [found[n] for n in range(len(requests))]

    def stream(self, answers: Sequence[Answer], more: More, give: Callable[[Group], None]) -> None:
        """Rewards groups, and those of ``more`` beside them, until there are none; gives each as soon as it is known. A
        group whose reward fails is tried again, and is given as failed once that was in vain while others were
        rewarded; while none is, the attempts go on without end. Raises Fenced."""
        self._failures.begin()
        self._give, self._more, self._numbers = give, more, itertools.count()
        self._tries: dict[int, _Try] = {}
        self._main, self._suspects = _Lane(), _Lane()
        self._suspect_call: tuple[int, Future[Rewarded]] | None = None
        self._add(answers)
        while True:
            if due := self._due():
                attempt = RewardAttempt(due)
                self._reward.run(attempt, partial(self._look, attempt))
                self._main.is_probed = False
                for one in self._tries.values():  # some may have been added too late
                    one.is_running = one.is_running and one.is_suspect
            elif self._tries:
                self._look_at_suspects()
                self._waits.pause(_LOOK_S)
            else:
                self._waits.works()
                return

    def _add(self, answers: Sequence[Answer]) -> None:
        self._tries.update((next(self._numbers), _Try(answer)) for answer in answers)

    def _due(self) -> dict[int, Answer]:
        """The groups that are to be rewarded now, but for suspects, by number."""
        self._add(self._more())
        now, found = time.monotonic(), dict[int, Answer]()
        for number, one in self._tries.items():
            if not one.is_suspect and not one.is_running and one.retry.is_due(now):
                found[number] = self._begun(one, self._main)
        if self._main.wants_probe and not self._main.is_probed and (probe := self._probe(self._main)) is not None:
            found[_PROBE] = probe
        return found

    def _begun(self, one: _Try, lane: _Lane) -> Answer:
        one.is_running = True
        one.rewarded = lane.rewarded if one.rewarded is None else one.rewarded
        return one.answer

    def _look(self, attempt: RewardAttempt) -> None:
        """Settles what has become of groups, and adds to the attempt what is due."""
        found = attempt.take()
        for number in sorted(found, key=lambda n: isinstance(found[n], RewardFault)):
            self._settle(number, found[number], self._main)
        attempt.add(self._due())
        self._look_at_suspects()

    def _look_at_suspects(self) -> None:
        """As ``_look``, of the suspects, of which one is tried at a time: next the one that has failed least often."""
        if self._suspect_call is not None:
            number, call = self._suspect_call
            is_done = call.done()
            self._side.show()
            if not is_done:
                return
            self._suspect_call = None
            self._settle(number, call.result(), self._suspects)
            if not any(one.is_suspect for one in self._tries.values()):
                self._side.submit(self._suspect_reward.close)
        now = time.monotonic()
        due = [n for n, one in self._tries.items() if one.is_suspect and one.retry.is_due(now)]
        if due and self._suspects.wants_probe and (probe := self._probe(self._suspects)) is not None:
            self._suspect_call = _PROBE, self._side.submit(partial(self._suspect_reward.one, probe))
        elif due:
            number = min(due, key=self._failures.failures)
            answer = self._begun(self._tries[number], self._suspects)
            self._suspect_call = number, self._side.submit(partial(self._suspect_reward.one, answer))

    def _settle(self, number: int, found: Rewarded, lane: _Lane) -> None:
        """Gives the group, or has it tried again."""
        if number == _PROBE:
            lane.is_probed = False
            lane.rewarded += not isinstance(found, RewardFault)
            return
        one = self._tries[number]
        one.is_running = False
        request, samples = one.answer
        if not isinstance(found, RewardFault):
            self._waits.works()
            lane.rewarded += 1
            self._known_good = one.answer
            self._failures.rewarded(1)
            self._end(number, Group(request.ordinal, request.prompt, tuple(found)))
            return
        one.retry.failed(time.monotonic())
        kind = "reward" if isinstance(found.error, RewardAway) else "plugin"
        why = f"reward: {found.error}" if kind == "reward" else str(found.error)
        if found.away:
            self._waits.waits(kind, why)
            return
        alone = lane is self._suspects
        works = lane.rewarded > (one.rewarded or 0) and (alone or not found.shared)
        if self._failures.failed([number], reward_works=works):
            log.warning("group %d is dropped since its reward failed: %s", request.ordinal, why)
            self._end(number, Group(request.ordinal, request.prompt, tuple(samples), why))
            return
        one.is_suspect = found.shared
        to = self._suspects if found.shared else self._main
        one.rewarded = to.rewarded
        to.wants_probe = to.wants_probe or alone or not found.shared
        self._waits.waits(kind, why + (f" ({_TOO_MANY})" if self._failures.is_exhausted([number]) else ""))

    def _end(self, number: int, group: Group) -> None:
        del self._tries[number]
        self._failures.forget([number])
        self._give(group)

    def _probe(self, lane: _Lane) -> Answer | None:
        """A group that was rewarded before or, before there is one, another prompt of the source each time, with a
        sample that nobody generated: else a group that makes the reward fail would be waited for without end when it is
        the first one of an actor. None where the source gives none now."""
        lane.wants_probe = False
        probe = self._known_good
        if probe is None:
            self._others += 1  # the reward may fail for one too
            try:
                prompt, sample = self._other(self._others)
            except SourceFailed:
                return None
            probe = PromptRequest(-1, prompt, Sampling(1), 1), [as_episode(with_text(sample, self._decode))]
        lane.is_probed = True
        return probe

    def dropped_because(self, group: Group) -> str:
        """The reason of the first filter that drops the group, or "". One for which a filter fails again and again,
        though the filters work for another, is dropped; while they do not, the attempts go on without end. Raises
        Fenced."""
        failures = 0

        def attempt() -> str:
            nonlocal failures
            try:
                reason = self._dropped_because(group)
            except PluginFailed as e:
                failures += 1
                if failures < self._cfg.rollout.reward_attempts or not self._filters_work():
                    raise
                log.warning("group %d is dropped since a filter failed: %s", group.ordinal, e)
                return FILTER_FAILED
            self._filtered = group
            return reason

        return self._waits.retry("filter", attempt) if self._filters else ""

    def _filters_work(self) -> bool:
        if self._filtered is None:
            return False
        with contextlib.suppress(PluginFailed):
            self._dropped_because(self._filtered)
            return True
        return False

    def _dropped_because(self, group: Group) -> str:
        limit_s = self._cfg.rollout.reward_timeout_s
        for name, drop_reason in self._filters:
            given: list[str] = []

            def work(_running: Running, call=drop_reason, given=given) -> None:  # type: ignore[no-untyped-def]
                given.append(require_reason(call(group)))

            what = f"the filter {name}"
            # One of the user's own is bounded by itself, with the start of its process.
            most_s = START_S + limit_s + GRACE_S if isinstance(drop_reason, OwnFilter) else limit_s
            error = self._calls.run(f"{what} for group {group.ordinal}", work, most_s, shown_after_s=limit_s)
            if isinstance(error, TimeoutError | CallLost) and isinstance(drop_reason, OwnFilter):
                raise PluginFailed(f"{what} for group {group.ordinal} took longer than {limit_s:g} s, or ended its "
                                   "process", hint=TOO_LONG)
            if error is not None:
                raise PluginFailed(f"{what} failed for group {group.ordinal}: {error_text(error)}") from error
            if given[0]:
                return given[0]
        return ""
