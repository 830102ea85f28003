"""Rewards and filters, bounded: they run in threads that are given up when they take too long.

Those of the user's own code are in processes of their own, which are killed when they block. Any other code may block
too, swallow its cancellation, or leave tasks behind that never end. The thread that it has is lost then; the thread of
the loop goes on, says so, and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from elastic_rl.config import Config
from elastic_rl.data.queue.group_codec import require_writable
from elastic_rl.data.samples import Group, Prompt, Sample, as_episode
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.errors import ElasticRLError, PluginFailed, SourceFailed
from elastic_rl.pipeline.sampling.bounded_calls import TOO_LONG, BoundedCalls, Running
from elastic_rl.pipeline.sampling.generating import Answer
from elastic_rl.pipeline.sampling.reward_failures import RewardFailures
from elastic_rl.pipeline.sampling.source_reads import SHOWN_AFTER_S
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugin_process import CANCEL_S, START_S, CallLost, ProcessLost
from elastic_rl.plugins import describe, plain, text_of
from elastic_rl.rewards.base import Decode, Judge, RewardAway, plain_rewards, require_turns
from elastic_rl.rewards.environment import episode_parts
from elastic_rl.rewards.own import OwnFilter, close_filter, named_filter, require_reason
from elastic_rl.rewards.registry import close_reward, make_reward, start_reward

log = logging.getLogger(__name__)
T = TypeVar("T")

_GRACE_S = 2 * CANCEL_S
"""What a reward that is bounded by itself may take longer, before its thread is given up."""
FILTER_FAILED = "filter failed"
"""Why groups are dropped for which a filter failed, though it works for others."""
_TOO_MANY = ("more of the last groups failed than rollout.max_failed_rewards allows, so none is dropped: correct the "
             "reward or the prompts' metadata")


_JOIN_S = 0.05
"""How often it is looked for further groups while rewards are under way."""

More = Callable[[], Sequence[Answer]]
"""Groups that were generated since the last call. Another thread may call it; it does not wait."""
Settle = Callable[[int, "Sequence[Sample] | PluginFailed"], None]
"""Takes what has become of the group with this number."""


class _Attempt:
    """The groups of one attempt to reward, by number: those that it begins with, and those that join it while it goes
    on. Its own thread writes; the caller's thread takes what is new, and ends it."""

    def __init__(self, groups: Mapping[int, Answer], numbers: Iterator[int], more: More | None) -> None:
        self.groups = dict(groups)
        """Those that are not rewarded."""
        self.size = len(groups)
        self.failed: dict[int, PluginFailed] = {}
        self.lost: dict[int, PluginFailed] = {}
        """Those that were under way when the process of the reward ended."""
        self.away: list[ProcessLost | RewardAway] = []
        """Why some were not rewarded through no fault of theirs."""
        self.begun: dict[int, float] = {}
        """Those that had their turn and are not rewarded → when, monotonic."""
        self.any_rewarded = False
        self._numbers, self._more, self._lock = numbers, more, threading.Lock()
        self._joined: dict[int, Answer] = {}
        self._rewarded: dict[int, list[Sample]] = {}
        self._ended = False

    def join(self) -> dict[int, Answer]:
        """Further groups; none once one has failed, since that one is tried again when the others have ended."""
        with self._lock:
            if self._ended or self._more is None or self.failed or self.lost or self.away:
                return {}
            joined = dict(zip(self._numbers, self._more(), strict=False))
            self.groups |= joined
            self._joined |= joined
            self.size += len(joined)
            return joined

    def reward(self, number: int, samples: list[Sample]) -> None:
        with self._lock:
            if not self._ended:
                self._rewarded[number], self.any_rewarded = samples, True
                del self.groups[number], self.begun[number]

    def take(self) -> tuple[dict[int, Answer], dict[int, list[Sample]]]:
        """The groups that have joined, and the rewarded samples of groups, since the last call."""
        with self._lock:
            (joined, self._joined), (rewarded, self._rewarded) = (self._joined, {}), (self._rewarded, {})
            return joined, rewarded

    def end(self) -> None:
        """Nothing joins or is rewarded any more: a thread that was given up may go on."""
        with self._lock:
            self._ended = True

    def since(self) -> float:
        """When the oldest of those began that have not ended, monotonic; 0 without any."""
        ended = self.failed.keys() | self.lost.keys()
        return min((at for number, at in list(self.begun.items()) if number not in ended), default=0.0)


class Rewarder:
    """Rewards groups and filters them. Used by one thread."""

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
        self._require_writable = cfg.uses_transfer_queue
        """A group that its queue could never take fails as one without a reward, and is no outage of the queue."""
        self._filtered: Group | None = None
        """A group that the filters took: as long as they can again, they work."""
        self._failures = RewardFailures(attempts=rollout.reward_attempts, max_share=rollout.max_failed_rewards,
                                        window=max(cfg.train.prompts_per_step, cfg.groups_per_request))
        self._known_good: tuple[PromptRequest, Sequence[Sample]] | None = None
        """A group that was rewarded: as long as it can be again, the reward works."""
        self._closing = contextlib.ExitStack()
        try:
            self._filters = [self._made(
                f"the filter {plain(str(entry), 200)}", partial(named_filter, entry, rollout.reward_timeout_s),
                lambda named: close_filter(named[1])) for entry in rollout.filters]
            self._reward = self._made(f"rollout.reward={rollout.reward}", lambda: make_reward(
                rollout.reward, rollout.reward_options, decode=decode, pools=cfg.pool_settings(""), judge=judge,
                seed=cfg.seed, attempts=rollout.max_attempts), close_reward)
            self._limit_s = max(rollout.reward_timeout_s, getattr(self._reward, "least_timeout_s", 0.0))
            """Of one call of the reward."""
        except BaseException:
            self.close()  # the caller tries again
            raise

    def _made(self, what: str, make: Callable[[], T], close: Callable[[T], None]) -> T:
        """What ``make`` returns, as soon as it does; it is closed with this, or when nobody waits for it any more."""
        made, given_up = list[T](), threading.Event()

        def work(_running: Running) -> None:
            made.append(make())
            if given_up.is_set():
                close(made[0])

        try:
            error = self._calls.run(f"the start of {what}", work, START_S + _GRACE_S, shown_after_s=SHOWN_AFTER_S)
        except BaseException:
            given_up.set()
            for one in made:  # if it was made just before; closing it twice does no harm
                close(one)
            raise
        if error is not None:
            raise error
        self._closing.callback(close, made[0])
        return made[0]

    def close(self) -> None:
        """Ends what the reward and the filters have started."""
        self._closing.close()

    def groups(self, requests: Sequence[PromptRequest], answered: Sequence[Sequence[Sample]]) -> list[Group]:
        """The groups of one request with their rewards: see ``stream``. Raises Fenced."""
        found: dict[int, Group] = {}
        numbers = {request.ordinal: n for n, request in enumerate(requests)}

        def give(group: Group) -> None:
            found[numbers[group.ordinal]] = group

        self.stream(list(zip(requests, answered, strict=True)), None, give)
        return [found[n] for n in range(len(requests))]

    def stream(self, answers: Sequence[Answer], more: More | None, give: Callable[[Group], None]) -> None:
        """Rewards groups at once, and those of ``more`` beside them, until there are none; gives each as soon as it is
        known. A group whose reward fails is tried again, and is given as failed once that was in vain while others
        were rewarded; while none is, the attempts go on without end. Raises Fenced."""
        numbers = itertools.count()
        left = dict(zip(numbers, answers, strict=False))
        self._failures.begin()

        def settle(number: int, found: Sequence[Sample] | PluginFailed) -> None:
            request, samples = left.pop(number)
            self._failures.forget([number])
            if isinstance(found, PluginFailed):
                log.warning("group %d is dropped since its reward failed: %s", request.ordinal, found)
                give(Group(request.ordinal, request.prompt, tuple(samples), str(found)))
            else:
                self._failures.rewarded(1)
                give(Group(request.ordinal, request.prompt, tuple(found)))

        attempt = partial(self._attempt, left, numbers, more, settle)
        while True:
            if more is not None:
                left.update(zip(numbers, more(), strict=False))
            if not left:
                return
            self._waits.retry("reward", attempt)

    def _attempt(self, left: dict[int, Answer], numbers: Iterator[int], more: More | None, settle: Settle) -> None:
        """Settles what becomes of groups, which takes them out of ``left``; those of ``more`` come into it. Raises
        PluginFailed while some are to be tried again."""
        # Those that failed before come last, each alone: one that blocks the thread holds up all that run beside it,
        # and only alone it is known which one that is.
        fresh = {number: answer for number, answer in left.items() if not self._failures.failures(number)}
        attempts = [_Attempt(fresh, numbers, more)] if fresh else []
        attempts += [_Attempt({number: answer}, numbers, None)
                     for number, answer in left.items() if number not in fresh]
        faults: dict[int, PluginFailed] = {}
        blocked: list[int] = []
        worked = False
        away: ProcessLost | RewardAway | None = None
        for attempt in attempts:
            def look(attempt: _Attempt = attempt) -> None:
                nonlocal worked
                joined, rewarded = attempt.take()
                left.update(joined)
                for number, samples in rewarded.items():
                    worked, self._known_good = True, left[number]
                    settle(number, samples)

            own, held_up, uncalled = self._once(attempt, look)
            faults |= own | held_up
            blocked += held_up
            away = away or uncalled
        if not faults:
            if left:  # the others were rewarded; of these nothing is known
                raise _waited_for(away) if away else PluginFailed("the reward was not called for some groups")
            return
        failed = dict(faults)
        self._failures.failed(blocked, reward_works=False)
        own_faults = [number for number in faults if number not in blocked]
        for number in self._failures.failed(own_faults, reward_works=worked or (bool(own_faults) and self._works())):
            settle(number, failed.pop(number))
        if left:
            first, *others = failed.values() or faults.values()
            further = f"; and {len(others)} more groups failed" if others else ""
            hint = _TOO_MANY if self._failures.is_exhausted(list(failed)) else first.hint
            raise PluginFailed(first.message + further, hint=hint)

    def _works(self) -> bool:
        """Whether the reward works now, as a group shows that was rewarded before or, before there is one, a sample of
        another prompt: else a group that makes the reward fail would be waited for without end when it is the first
        one of an actor."""
        request, samples = self._known_good or self._other_group()
        return bool(samples) and not any(self._once(_Attempt({0: (request, samples)}, iter(()), None)))

    def _other_group(self) -> tuple[PromptRequest, Sequence[Sample]]:
        """A prompt of the source with a sample that nobody generated; no samples where the source gives none now."""
        self._others += 1  # another one each time: the reward may fail for this one too
        try:
            prompt, sample = self._other(self._others)
        except SourceFailed:
            return PromptRequest(-1, Prompt(()), Sampling(1), 0), []
        return PromptRequest(-1, prompt, Sampling(1), 1), [as_episode(self._with_text(sample))]

    def _once(self, attempt: _Attempt, look: Callable[[], None] = lambda: None) -> tuple[
            dict[int, PluginFailed], dict[int, PluginFailed], ProcessLost | RewardAway | None]:
        """Tries each group of the attempt once. ``look`` is called again and again meanwhile, and takes those that are
        rewarded. Returns, by number, why others failed, which were under way when the process or thread ended that one
        of them blocked, and why some were not rewarded through no fault of theirs (the process had ended, or what the
        reward asks was away). These, and those whose turn did not come, are nowhere. Raises Fenced, and PluginFailed
        when no call of the reward can be made."""
        limit_s, what = self._limit_s, f"rollout.reward={self._cfg.rollout.reward}"
        error = self._calls.run(f"the start of {what}", lambda _: start_reward(self._reward), START_S + _GRACE_S,
                                shown_after_s=limit_s)
        if error is not None:
            raise PluginFailed(f"{what} cannot be called: {_text(error)}") from error
        error = None
        try:
            error = self._calls.run(what, lambda running: asyncio.run(self._all_of(attempt, running)),
                                    limit_s + _GRACE_S, shown_after_s=limit_s, since=attempt.since, look=look)
        except PluginFailed as e:
            if not (attempt.begun or attempt.any_rewarded):
                raise
            error = e
        finally:
            attempt.end()
            look()
        begun = list(attempt.begun)
        if attempt.away and not (begun or attempt.any_rewarded):
            raise _waited_for(attempt.away[0])
        unsaid = "its task was cancelled" if error is None else describe(error)
        hint = error.hint if isinstance(error, PluginFailed) else ""
        named = {number: request.ordinal for number, (request, _) in attempt.groups.items()}
        silent = {number: PluginFailed(f"{what} failed for group {named[number]}: {unsaid}", hint=hint)
                  for number in (begun or ([] if attempt.any_rewarded else named)) if number not in attempt.failed}
        silent |= attempt.lost
        own, uncalled = dict(attempt.failed), next(iter(attempt.away), None)
        return (own, silent, uncalled) if attempt.size > 1 else (own | silent, {}, uncalled)

    async def _all_of(self, attempt: _Attempt, running: Running) -> None:
        """Rewards the groups of an attempt, and those that join it meanwhile. In a thread of its own."""
        turn, idle, tasks = asyncio.Semaphore(self._cfg.rollout.reward_concurrency), asyncio.Event(), set[Any]()

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            if not tasks:
                idle.set()

        def begin(groups: Mapping[int, Answer]) -> None:
            for number, answer in groups.items():
                task = asyncio.create_task(self._reward_one(attempt, number, answer, turn, running))
                tasks.add(task)
                task.add_done_callback(ended)

        begin(attempt.groups)
        while tasks:
            idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), _JOIN_S)
            begin(attempt.join())
        running.done()

    async def _reward_one(self, attempt: _Attempt, number: int, answer: Answer, turn: asyncio.Semaphore,
                          running: Running) -> None:
        (request, answered), limit_s = answer, self._limit_s
        what = f"rollout.reward={self._cfg.rollout.reward}"
        named = f"for group {request.ordinal}"
        async with turn:
            attempt.begun[number] = time.monotonic()
            bound = asyncio.timeout(limit_s)
            try:
                async with bound:
                    samples = [self._with_text(sample) for sample in answered]
                    rewards = plain_rewards(await self._reward(request.prompt, samples), len(samples))
                    if self._require_writable:
                        require_writable(request.prompt, samples)
                    require_turns(samples, rewards)
                    rewarded = [s.rewarded(r.value, {**episode_parts(s), **r.parts}, r.turns)
                                for s, r in zip(samples, rewards, strict=True)]
                attempt.reward(number, rewarded)
                running.news.set()
            except BaseException as e:  # whatever a user's function raises: this is no main thread
                if isinstance(e, ProcessLost | RewardAway):
                    del attempt.begun[number]
                    attempt.away.append(e)
                elif isinstance(e, CallLost):
                    attempt.lost[number] = PluginFailed(f"{what} failed {named}: {e.message}", hint=TOO_LONG)
                elif isinstance(e, TimeoutError) and bound.expired():
                    attempt.failed[number] = PluginFailed(f"{what} took longer than {limit_s:g} s {named}",
                                                          hint=TOO_LONG)
                else:
                    attempt.failed[number] = PluginFailed(f"{what} failed {named}: {_text(e)}")

    def _with_text(self, sample: Sample) -> Sample:
        if self._decode is None or not sample.lacks_text:
            return sample
        return replace(sample, text=self._decode(sample.written_ids))

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
            most_s = START_S + limit_s + _GRACE_S if isinstance(drop_reason, OwnFilter) else limit_s
            error = self._calls.run(f"{what} for group {group.ordinal}", work, most_s, shown_after_s=limit_s)
            if isinstance(error, TimeoutError | CallLost) and isinstance(drop_reason, OwnFilter):
                raise PluginFailed(f"{what} for group {group.ordinal} took longer than {limit_s:g} s, or ended its "
                                   "process", hint=TOO_LONG)
            if error is not None:
                raise PluginFailed(f"{what} failed for group {group.ordinal}: {_text(error)}") from error
            if given[0]:
                return given[0]
        return ""


def _waited_for(error: ProcessLost | RewardAway) -> ElasticRLError:
    return error if isinstance(error, RewardAway) else PluginFailed(error.message, hint=error.hint)


def _text(error: BaseException) -> str:
    return text_of(error) if isinstance(error, PluginFailed) else describe(error)
