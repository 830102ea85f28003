"""Rewards and filters, bounded: they run in threads that are given up when they take too long.

Those of the user's own code are in processes of their own, which are killed when they block. Any other code may block
too, swallow its cancellation, or leave tasks behind that never end. The thread that it has is lost then; the thread of
the loop goes on, says so, and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from elastic_rl.config import Config
from elastic_rl.data.group_codec import require_writable
from elastic_rl.data.samples import Group, Prompt, Sample, as_episode
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.errors import ElasticRLError, PluginFailed, SourceFailed
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

_SLICE_S = 0.1
"""The loop's thread looks this often whether it is to end."""
_MAX_LEFT = 16
"""Threads that may still run what was given up."""
_GRACE_S = 2 * CANCEL_S
"""What a reward that is bounded by itself may take longer, before its thread is given up."""
FILTER_FAILED = "filter failed"
"""Why groups are dropped for which a filter failed, though it works for others."""
_TOO_LONG = "raise rollout.reward_timeout_s, or make the function faster"
_TOO_MANY = ("more of the last groups failed than rollout.max_failed_rewards allows, so none is dropped: correct the "
             "reward or the prompts' metadata")


class BoundedCalls:
    """Calls of a user's code in daemon threads. Used by one thread."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._left: list[threading.Thread] = []

    def run(self, what: str, work: Callable[[threading.Event], None], limit_s: float, *, shown_after_s: float
            ) -> BaseException | None:
        """What ``work`` raised, or None, as soon as it has returned or has set the event that it is given; what it does
        after that, as ending the tasks it left behind, costs no time here.

        After ``shown_after_s`` the loop says that it waits. Raises PluginFailed after ``limit_s``, which gives the
        thread up, and while too many threads that were given up still run; and Fenced when the loop is to end.
        """
        self._require_room(what)
        done, errors = threading.Event(), list[BaseException]()

        def body() -> None:
            try:
                work(done)
            except BaseException as e:  # whatever a user's function raises: this is no main thread
                errors.append(e)
            finally:
                done.set()

        thread = threading.Thread(target=body, name="plugin", daemon=True)
        began = time.monotonic()
        try:
            thread.start()
        except RuntimeError as e:
            raise PluginFailed(f"{what} cannot run: {describe(e)}") from e
        self._left.append(thread)
        while not done.wait(_SLICE_S):
            took_s = time.monotonic() - began
            if took_s > limit_s:
                raise PluginFailed(f"{what} took longer than {limit_s:g} s", hint=_TOO_LONG)
            if took_s > shown_after_s:
                self._waits.waits("plugin", f"{what}, which has taken longer than {shown_after_s:g} s")
            else:
                self._waits.pause(0.0)
        return errors[0] if errors else None

    def _require_room(self, what: str) -> None:
        self._left = [t for t in self._left if t.is_alive()]
        if len(self._left) >= _MAX_LEFT:
            self._left[0].join(_SLICE_S)  # it may be about to end
            self._left = [t for t in self._left if t.is_alive()]
        if len(self._left) >= _MAX_LEFT:
            raise PluginFailed(f"{what} waits until one of {len(self._left)} earlier calls ends, which took too long "
                               "or left tasks behind that do not end when they are cancelled",
                               hint="correct the function, and `elastic-rl restart roles/actor`")


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
        self._require_writable = cfg.train.schedule == "fully_async" and cfg.train.queue == "transfer_queue"
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

        def work(_done: threading.Event) -> None:
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
        """The groups of one request with their rewards, which are computed at once. A group whose reward fails is tried
        again, and is returned as failed once that was in vain while others were rewarded; while none is, the attempts
        go on without end. Raises Fenced."""
        known: dict[int, tuple[Sample, ...] | PluginFailed] = {}
        self._failures.begin()
        self._waits.retry("reward", lambda: self._attempt(requests, answered, known))
        failed = {requests[i].ordinal: str(found) for i, found in known.items() if isinstance(found, PluginFailed)}
        if failed:
            log.warning("%d of %d groups are dropped since their reward failed: %s", len(failed), len(requests),
                        next(iter(failed.values())))
        return [Group(request.ordinal, request.prompt, tuple(samples) if isinstance(found, PluginFailed) else found,
                      failed.get(request.ordinal, ""))
                for request, samples, found in zip(requests, answered, map(known.__getitem__, range(len(requests))),
                                                   strict=True)]

    def _attempt(self, requests: Sequence[PromptRequest], answered: Sequence[Sequence[Sample]],
                 known: dict[int, tuple[Sample, ...] | PluginFailed]) -> None:
        """Adds what becomes of the groups of which it is not known. Raises PluginFailed while some are to be tried
        again."""
        left = [i for i in range(len(requests)) if i not in known]
        if not left:
            return
        # Those that failed before come last, each alone: one that blocks the thread holds up all that run beside it,
        # and only alone it is known which one that is.
        fresh = [i for i in left if not self._failures.failures(i)]
        faults: dict[int, PluginFailed] = {}
        blocked: list[int] = []
        worked = False
        away: ProcessLost | RewardAway | None = None
        for together in ([fresh] if fresh else []) + [[i] for i in left if i not in fresh]:
            found: dict[int, list[Sample]] = {}
            try:
                own, held_up, uncalled = self._once([requests[i] for i in together], [answered[i] for i in together],
                                                    found)
            finally:
                known.update({together[n]: tuple(samples) for n, samples in found.items()})
                self._failures.rewarded(len(found))
            for n in found:
                worked, self._known_good = True, (requests[together[n]], answered[together[n]])
            faults |= {together[n]: fault for n, fault in (own | held_up).items()}
            blocked += [together[n] for n in held_up]
            away = away or uncalled
        if not faults:
            if len(known) < len(requests):  # the others were rewarded; of these nothing is known
                raise _waited_for(away) if away else PluginFailed("the reward was not called for some groups")
            return
        failed = dict(faults)
        self._failures.failed(blocked, reward_works=False)
        own_faults = [i for i in faults if i not in blocked]
        for i in self._failures.failed(own_faults, reward_works=worked or (bool(own_faults) and self._works())):
            known[i] = failed.pop(i)
        if len(known) < len(requests):
            first, *others = failed.values() or faults.values()
            more = f"; and {len(others)} more groups failed" if others else ""
            hint = _TOO_MANY if self._failures.is_exhausted(list(failed)) else first.hint
            raise PluginFailed(first.message + more, hint=hint)

    def _works(self) -> bool:
        """Whether the reward works now, as a group shows that was rewarded before or, before there is one, a sample of
        another prompt: else a group that makes the reward fail would be waited for without end when it is the first
        one of an actor."""
        request, samples = self._known_good or self._other_group()
        return bool(samples) and not any(self._once([request], [samples], {}))

    def _other_group(self) -> tuple[PromptRequest, Sequence[Sample]]:
        """A prompt of the source with a sample that nobody generated; no samples where the source gives none now."""
        self._others += 1  # another one each time: the reward may fail for this one too
        try:
            prompt, sample = self._other(self._others)
        except SourceFailed:
            return PromptRequest(-1, Prompt(()), Sampling(1), 0), []
        return PromptRequest(-1, prompt, Sampling(1), 1), [as_episode(self._with_text(sample))]

    def _once(self, requests: Sequence[PromptRequest], answered: Sequence[Sequence[Sample]],
              into: dict[int, list[Sample]]) -> tuple[
                  dict[int, PluginFailed], dict[int, PluginFailed], ProcessLost | RewardAway | None]:
        """Tries each of these groups once: adds the samples of those that are rewarded to ``into``, by position, and
        returns why others failed, which were under way when the process or thread ended that one of them blocked, and
        why some were not rewarded through no fault of theirs (the process had ended, or what the reward asks was
        away). These, and those whose turn did not come, are nowhere. Raises Fenced, and PluginFailed when no call of
        the reward can be made."""
        limit_s, what = self._limit_s, f"rollout.reward={self._cfg.rollout.reward}"
        at_once = self._cfg.rollout.reward_concurrency
        error = self._calls.run(f"the start of {what}", lambda _: start_reward(self._reward), START_S + _GRACE_S,
                                shown_after_s=limit_s)
        if error is not None:
            raise PluginFailed(f"{what} cannot be called: {_text(error)}") from error
        # Of this attempt: a thread that is given up may still write into them.
        found: dict[int, list[Sample]] = {}
        failed: dict[int, PluginFailed] = {}
        lost: dict[int, PluginFailed] = {}
        begun: dict[int, None] = {}
        ended: list[ProcessLost | RewardAway] = []

        async def one(i: int, turn: asyncio.Semaphore) -> None:
            named = f"for group {requests[i].ordinal}"
            async with turn:
                begun[i] = None
                bound = asyncio.timeout(limit_s)
                try:
                    async with bound:
                        samples = [self._with_text(sample) for sample in answered[i]]
                        rewards = plain_rewards(await self._reward(requests[i].prompt, samples), len(samples))
                        if self._require_writable:
                            require_writable(requests[i].prompt, samples)
                        require_turns(samples, rewards)
                        found[i] = [s.rewarded(r.value, {**episode_parts(s), **r.parts}, r.turns)
                                    for s, r in zip(samples, rewards, strict=True)]
                except BaseException as e:  # whatever a user's function raises: this is no main thread
                    if isinstance(e, ProcessLost | RewardAway):
                        del begun[i]
                        ended.append(e)
                    elif isinstance(e, CallLost):
                        lost[i] = PluginFailed(f"{what} failed {named}: {e.message}", hint=_TOO_LONG)
                    elif isinstance(e, TimeoutError) and bound.expired():
                        failed[i] = PluginFailed(f"{what} took longer than {limit_s:g} s {named}", hint=_TOO_LONG)
                    else:
                        failed[i] = PluginFailed(f"{what} failed {named}: {_text(e)}")

        async def all_of_them(done: threading.Event) -> None:
            turn = asyncio.Semaphore(at_once)
            await asyncio.gather(*(one(i, turn) for i in range(len(requests))), return_exceptions=True)
            done.set()

        error = None
        turns = -(-len(requests) // at_once)
        try:
            error = self._calls.run(what, lambda done: asyncio.run(all_of_them(done)), turns * limit_s + _GRACE_S,
                                    shown_after_s=limit_s)
        except PluginFailed as e:
            if not begun:
                raise
            error = e
        finally:
            into.update(dict(found))
        if ended and not begun:
            raise _waited_for(ended[0])
        unsaid = "its task was cancelled" if error is None else describe(error)
        hint = error.hint if isinstance(error, PluginFailed) else ""
        silent = {i: PluginFailed(f"{what} failed for group {requests[i].ordinal}: {unsaid}", hint=hint)
                  for i in (list(begun) or range(len(requests))) if i not in into and i not in failed}
        silent |= {i: fault for i, fault in list(lost.items()) if i not in into}
        own = {i: fault for i, fault in list(failed.items()) if i not in into}
        uncalled = ended[0] if ended else None
        return (own, silent, uncalled) if len(requests) > 1 else (own | silent, {}, uncalled)

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

            def work(_done: threading.Event, call=drop_reason, given=given) -> None:  # type: ignore[no-untyped-def]
                given.append(require_reason(call(group)))

            what = f"the filter {name}"
            # One of the user's own is bounded by itself, with the start of its process.
            most_s = START_S + limit_s + _GRACE_S if isinstance(drop_reason, OwnFilter) else limit_s
            error = self._calls.run(f"{what} for group {group.ordinal}", work, most_s, shown_after_s=limit_s)
            if isinstance(error, TimeoutError | CallLost) and isinstance(drop_reason, OwnFilter):
                raise PluginFailed(f"{what} for group {group.ordinal} took longer than {limit_s:g} s, or ended its "
                                   "process", hint=_TOO_LONG)
            if error is not None:
                raise PluginFailed(f"{what} failed for group {group.ordinal}: {_text(error)}") from error
            if given[0]:
                return given[0]
        return ""


def _waited_for(error: ProcessLost | RewardAway) -> ElasticRLError:
    return error if isinstance(error, RewardAway) else PluginFailed(error.message, hint=error.hint)


def _text(error: BaseException) -> str:
    return text_of(error) if isinstance(error, PluginFailed) else describe(error)
