"""Calls of one instance of the reward: several groups at a time, in a thread that is abandoned when it blocks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_rl.config import Config
from elastic_rl.data.queue.group_codec import require_writable
from elastic_rl.data.samples import Sample
from elastic_rl.errors import ConfigError, ElasticRLError, PluginFailed
from elastic_rl.host import kept_state
from elastic_rl.pipeline.sampling.fault_isolation import Failure, Trial
from elastic_rl.pipeline.sampling.group_requests import Answer
from elastic_rl.pipeline.sampling.user_calls import TOO_LONG, UserCalls
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugins.process import CANCEL_S, START_S, CallLost, ProcessLost
from elastic_rl.plugins.user_code import describe, text_of
from elastic_rl.rewards.base import Decode, RewardAway, RewardFn, call_limit_s, plain_rewards, require_turns
from elastic_rl.rewards.environment import episode_parts
from elastic_rl.rewards.registry import close_reward, start_reward
from elastic_rl.runtime.abandonable import AbandonableCall
from elastic_rl.runtime.words import counted

GRACE_S = 2 * CANCEL_S
"""What a reward that is bounded by itself may take longer, before its thread is given up."""
_JOIN_S = 0.05
"""How often the thread looks for further groups, which also shows that it is not blocked."""
_SHOWN, _SHOWN_CHARS = 3, 80
"""Responses that the error of a reward shows, and characters of each."""


@dataclass(frozen=True)
class RewardFault:
    """Why a group got no reward."""

    error: ElasticRLError
    failure: Failure = Failure.GROUP


Rewarded = Sequence[Sample] | RewardFault
"""What becomes of one group."""
Key = Trial[Answer] | None
"""What stands for a group; None for a probe."""


class RewardAttempt:
    """Groups that are rewarded at the same time, and what has become of those that have ended. The thread of the calls
    rewards them; the caller's thread adds others, takes what is new, and ends it."""

    def __init__(self, groups: Mapping[Key, Answer]) -> None:
        self.groups = dict(groups)
        """Groups whose reward has not ended."""
        self.begun: dict[Key, float] = {}
        """Group for which the reward was called → when, monotonic."""
        self.starting_since = 0.0
        """Time since which a process for the calls is started, monotonic; 0 while none is."""
        self.awake_at = time.monotonic()
        """Monotonic time at which the thread was last seen not to be blocked."""
        self._lock = threading.Lock()
        self._added = dict(groups)
        self._found: dict[Key, Rewarded] = {}
        self._over = False

    def add(self, groups: Mapping[Key, Answer]) -> None:
        with self._lock:
            self.groups |= groups
            self._added |= groups

    def added(self) -> dict[Key, Answer]:
        """The groups that were added since the last call; none for a thread that was abandoned, which may go on."""
        self.awake_at = time.monotonic()
        with self._lock:
            added, self._added = ({} if self._over else self._added), {}
            return added

    def found(self, group: Key, what: Rewarded) -> None:
        with self._lock:
            if not self._over:
                self._found[group] = what
                del self.groups[group]
                self.begun.pop(group, None)

    def take(self) -> dict[Key, Rewarded]:
        """What has become of groups since the last call."""
        with self._lock:
            found, self._found = self._found, {}
            return found

    def end(self, fault: Callable[[Key, bool], RewardFault | None]) -> None:
        """The thread has ended, or is abandoned. ``fault``: of a group that has not ended, and whether it was under
        way; None for one that came too late."""
        with self._lock:
            self._over = True
            faults = {group: fault(group, group in self.begun) for group in self.groups}
            self._found |= {group: one for group, one in faults.items() if one is not None}

    def since(self) -> float:
        """When the oldest began of those that are under way, monotonic; without any, when the thread was last awake."""
        return min(list(self.begun.values()), default=self.awake_at)


class RewardCalls:
    """One instance of the reward. Used by one thread."""

    def __init__(self, cfg: Config, waits: Waits, make: Callable[[], RewardFn], decode: Decode | None) -> None:
        self._waits, self._calls, self._make, self._decode = waits, UserCalls(waits), make, decode
        self._what, self._concurrency = f"rollout.reward={cfg.rollout.reward}", cfg.rollout.reward_concurrency
        self._correct = f"correct it; `elastic-rl restart roles/actor {kept_state.options(cfg)}` then imports it again"
        self._timeout_s, self._samples = cfg.rollout.reward_timeout_s, cfg.train.group_size
        self._require_writable = cfg.uses_transfer_queue
        """A group that its queue could never take fails as one without a reward, and is no outage of the queue."""
        self._reward: RewardFn | None = None

    def make(self) -> None:
        """Makes the instance, if there is none. Raises ConfigError, PluginFailed and Fenced."""
        if self._reward is None:
            self._reward = self._calls.make(self._what, self._make, close_reward, START_S + GRACE_S)

    def close(self) -> None:
        """Ends what the instance has started; the next call makes another."""
        reward, self._reward = self._reward, None
        if reward is not None:
            close_reward(reward)

    def one(self, answer: Answer) -> Rewarded:
        """Rewards one group alone. Raises Fenced."""
        attempt, found = RewardAttempt({None: answer}), dict[Key, Rewarded]()
        self.run(attempt, lambda: found.update(attempt.take()))
        self._waits.works()
        return found.get(None) or RewardFault(PluginFailed(f"{self._what} was not called"), Failure.SERVICE)

    def run(self, attempt: RewardAttempt, look: Callable[[], None]) -> None:
        """Rewards the groups of the attempt, and those that are added to it meanwhile. ``look`` is called again and
        again, and at the end, and takes what has become of each, but for those that were added too late. Raises
        Fenced."""
        error: BaseException | None = None

        def look_on() -> None:
            since = attempt.starting_since
            if since and time.monotonic() - since > limit_s:
                self._waits.waits("plugin", f"the start of {self._what}, which has taken longer than {limit_s:g} s")
            look()

        try:
            self.make()
            # The limit of one call of the reward.
            assert self._reward is not None
            limit_s = call_limit_s(self._reward, self._timeout_s, self._samples)
            error = self._calls.run(self._what, lambda call: asyncio.run(self._all_of(attempt, call, limit_s)),
                                    limit_s + GRACE_S, shown_after_s=limit_s, since=attempt.since, look=look_on
                                    ).exception()
        except (ConfigError, PluginFailed) as e:
            error = e
        unsaid = "its task was cancelled" if error is None else describe(error)
        hint = error.hint if isinstance(error, ElasticRLError) else ""

        def fault(group: Key, is_under_way: bool) -> RewardFault | None:
            if is_under_way:
                return RewardFault(PluginFailed(f"{self._what} failed for group {attempt.groups[group][0].ordinal}: "
                                                f"{unsaid}", hint=hint), Failure.PROCESS)
            return None if error is None else RewardFault(error if isinstance(error, ElasticRLError) else PluginFailed(
                f"{self._what} was not called: {unsaid}"), Failure.SERVICE)

        attempt.end(fault)
        look()

    async def _all_of(self, attempt: RewardAttempt, call: AbandonableCall[None], limit_s: float) -> None:
        """Rewards the groups of an attempt. It runs in the thread of the call."""
        free, idle, tasks = asyncio.Semaphore(self._concurrency), asyncio.Event(), set[Any]()

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            call.notify()
            if not tasks:
                idle.set()

        def begin(groups: Mapping[Key, Answer]) -> None:
            for group, answer in groups.items():
                task = asyncio.create_task(self._one_of(attempt, group, answer, free, limit_s))
                tasks.add(task)
                task.add_done_callback(ended)

        begin(attempt.added())
        while tasks:
            idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(idle.wait(), _JOIN_S)
            begin(attempt.added())
        call.finish(None)

    async def _one_of(self, attempt: RewardAttempt, group: Key, answer: Answer, free: asyncio.Semaphore,
                      limit_s: float) -> None:
        (request, answered), reward = answer, self._reward
        assert reward is not None
        named = f"for group {request.ordinal}"
        samples: Sequence[Sample] = answered
        async with free:
            try:
                attempt.starting_since = attempt.starting_since or time.monotonic()
                async with asyncio.timeout(START_S + GRACE_S):
                    await asyncio.to_thread(start_reward, reward)
            except BaseException as e:  # whatever a user's module raises
                attempt.found(group, RewardFault(
                    PluginFailed(f"{self._what} cannot be called: {error_text(e)}"), Failure.SERVICE))
                return
            finally:
                attempt.starting_since = 0.0
            attempt.begun[group] = time.monotonic()
            bound = asyncio.timeout(limit_s)
            try:
                async with bound:
                    samples = [with_text(sample, self._decode) for sample in answered]
                    rewards = plain_rewards(await reward(request.prompt, samples), len(samples))
                    if self._require_writable:
                        require_writable(request.prompt, samples)
                    require_turns(samples, rewards)
                    found: Rewarded = [s.rewarded(r.value, {**episode_parts(s), **r.parts}, r.turns)
                                       for s, r in zip(samples, rewards, strict=True)]
            except RewardAway as e:
                found = RewardFault(e, Failure.SERVICE)
            except ProcessLost as e:
                found = RewardFault(PluginFailed(e.message, hint=e.hint), Failure.SERVICE)
            except CallLost as e:
                found = RewardFault(PluginFailed(f"{self._what} failed {named}: {e.message}", hint=TOO_LONG),
                                    Failure.PROCESS)
            except BaseException as e:  # whatever a user's function raises: this is no main thread
                found = RewardFault(
                    PluginFailed(f"{self._what} took longer than {limit_s:g} s {named}", hint=TOO_LONG)
                    if isinstance(e, TimeoutError) and bound.expired() else
                    PluginFailed(f"{self._what} failed {named}: {error_text(e)}, {_shown(samples)}", hint=(
                        e.hint if isinstance(e, PluginFailed) and e.hint else self._correct)))
            attempt.found(group, found)


def with_text(sample: Sample, decode: Decode | None) -> Sample:
    """The sample with its text, where it has none and there is a tokenizer."""
    return sample if decode is None or not sample.lacks_text else replace(sample, text=decode(sample.written_ids))


def _shown(samples: Sequence[Sample]) -> str:
    """The responses that a reward was given, for its error: the shortest first, since what rewards do not expect is
    mostly one that is empty or was cut."""
    texts = sorted({sample.text for sample in samples}, key=lambda text: (len(text), text))
    shown = [repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS - 1]}…") for text in texts[:_SHOWN]]
    more = f" and {counted(len(texts) - _SHOWN, 'other')}" if len(texts) > _SHOWN else ""
    return f"for the response{'s' if len(texts) > 1 else ''} {', '.join(shown)}{more}"


def error_text(error: BaseException) -> str:
    return text_of(error) if isinstance(error, PluginFailed) else describe(error)
