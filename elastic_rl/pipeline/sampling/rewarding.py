"""The stage reward: groups are rewarded in threads that are abandoned when they take too long.

Rewards of the user's own code are in processes, which are killed when they block. Any other code may block too, swallow
its cancellation, or leave tasks behind that never end. The thread that it has is lost then; the thread of the loop goes
on, says so, and tries again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from elastic_rl.config import Config
from elastic_rl.data.samples import Group, Prompt, Sample, as_episode
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.pipeline.sampling.fault_isolation import FaultIsolation, Lane, Verdict
from elastic_rl.pipeline.sampling.group_requests import Answer
from elastic_rl.pipeline.sampling.reward_calls import Key, RewardAttempt, RewardCalls, Rewarded, RewardFault, with_text
from elastic_rl.pipeline.sampling.side_calls import SideCalls
from elastic_rl.pipeline.waits import Waits
from elastic_rl.rewards.base import Decode, Judge, RewardAway
from elastic_rl.rewards.registry import make_reward

log = logging.getLogger(__name__)

_RETRY_S = (0.1, 2.0)
"""First and longest pause before a group whose reward failed is tried again."""
_LOOK_S = 0.05
"""Seconds between two looks for groups that are due while none is under way in the main lane."""

More = Callable[[], Sequence[Answer]]
"""Groups that were generated since the last call. It does not wait."""
Other = Callable[[int], tuple[Prompt, Sample]]
"""Returns, for a number, some prompt of the source and a sample for it that nobody generated. Raises SourceFailed where
the source gives none, and Fenced."""


class Rewarder:
    """Rewards groups; ``FaultIsolation`` says where and when those are tried again whose reward fails. Those in
    probation are tried by a second instance of the reward, which is there only while it is needed. Used by one thread.
    """

    def __init__(self, cfg: Config, waits: Waits, *, other: Other, decode: Decode | None = None,
                 judge: Judge | None = None) -> None:
        """``decode``: from the token ids of a response to its text, without special tokens; without it samples have
        none. ``judge``: see ``RewardContext``.

        Waits for the user's code, which may take long to be imported. Raises ConfigError for a setting that names
        nothing, and for what the reward needs and this machine lacks; PluginFailed; and Fenced.
        """
        self._waits, self._other, self._decode = waits, other, decode
        self._isolation: FaultIsolation[Answer] = FaultIsolation.of(cfg, _RETRY_S)
        make = partial(make_reward, cfg.rollout.reward, cfg.rollout.reward_options, decode=decode,
                       pools=cfg.pool_settings(""), judge=judge, seed=cfg.seed, attempts=cfg.rollout.max_attempts)
        self._side = SideCalls("reward-probation", waits)
        self._reward, self._second_reward = (RewardCalls(cfg, one, make, decode) for one in (waits, self._side.waits))
        try:
            self._reward.make()
        except BaseException:
            self.close()  # the caller tries again
            raise

    def close(self) -> None:
        """Ends what the reward has started."""
        self._side.close()
        self._second_reward.close()
        self._reward.close()

    def groups(self, requests: Sequence[PromptRequest], answered: Sequence[Sequence[Sample]]) -> list[Group]:
        """The groups of one request with their rewards: see ``stream``. Raises Fenced."""
        found: dict[int, Group] = {}

        def give(group: Group) -> None:
            found[group.ordinal] = group

        self.stream(list(zip(requests, answered, strict=True)), lambda: (), give)
        return [found[request.ordinal] for request in requests]

    def stream(self, answers: Sequence[Answer], more: More, give: Callable[[Group], None]) -> None:
        """Rewards groups, and those of ``more`` beside them, until there are none; gives each as soon as it is known,
        one whose reward has failed for good as failed. Raises Fenced."""
        self._isolation.reset()
        self._give, self._more = give, more
        self._second_call: tuple[Key, Future[Rewarded]] | None = None
        self._add(answers)
        while True:
            if due := self._due():
                attempt = RewardAttempt(due)
                self._reward.run(attempt, partial(self._look, attempt))
                self._isolation.take_back(Lane.MAIN)  # what was added too late
            elif self._isolation.is_pending:
                self._look_at_probation()
                self._waits.pause(_LOOK_S)
            else:
                self._waits.works()
                return

    def _add(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._isolation.add([answer])

    def _due(self) -> dict[Key, Answer]:
        """The groups that are to be rewarded now beside all others, with a probe where one is wanted."""
        self._add(self._more())
        found: dict[Key, Answer] = {
            trial: trial.groups[0] for trial in self._isolation.start(Lane.MAIN, time.monotonic())}
        if (probe := self._isolation.probe(Lane.MAIN, self._other_answer)) is not None:
            found[None] = probe
        return found

    def _look(self, attempt: RewardAttempt) -> None:
        """Settles what has become of groups, and adds to the attempt what is due."""
        self._settle(Lane.MAIN, attempt.take())
        attempt.add(self._due())
        self._look_at_probation()

    def _look_at_probation(self) -> None:
        """Looks after the groups in probation, as ``_look`` does after the others."""
        if self._second_call is not None:
            group, call = self._second_call
            is_done = call.done()
            self._side.show()
            if not is_done:
                return
            self._second_call = None
            self._settle(Lane.PROBATION, {group: call.result()})
            if not self._isolation.has_probation:
                self._side.submit(self._second_reward.close)
        if not self._isolation.has_probation:
            return
        if (probe := self._isolation.probe(Lane.PROBATION, self._other_answer)) is not None:
            self._second_call = None, self._side.submit(partial(self._second_reward.one, probe))
            return
        for trial in self._isolation.start(Lane.PROBATION, time.monotonic()):
            self._second_call = trial, self._side.submit(partial(self._second_reward.one, trial.groups[0]))

    def _settle(self, lane: Lane, found: dict[Key, Rewarded]) -> None:
        """Gives what is known of groups; says what is waited for where one is to be tried again."""
        if None in found:
            self._isolation.probed(lane, works=not isinstance(found.pop(None), RewardFault))
        ended = [(trial, what) for trial, what in found.items() if trial is not None]
        verdicts = self._isolation.settle(lane, [
            (trial, [what.failure if isinstance(what, RewardFault) else None]) for trial, what in ended],
            time.monotonic())
        for (trial, what), [verdict] in sorted(zip(ended, verdicts, strict=True), key=lambda one: isinstance(
                one[0][1], RewardFault)):
            request, samples = trial.groups[0]
            if not isinstance(what, RewardFault):
                self._waits.works()
                self._give(Group(request.ordinal, request.prompt, tuple(what)))
                continue
            kind = "reward" if isinstance(what.error, RewardAway) else "plugin"
            why = f"reward: {what.error}" if kind == "reward" else str(what.error)
            if verdict is Verdict.DROP:
                log.warning("group %d is dropped since its reward failed: %s", request.ordinal, why)
                self._give(Group(request.ordinal, request.prompt, tuple(samples), why))
            else:
                self._waits.waits(kind, verdict.reason(why, "the reward or the prompts' metadata"))

    def _other_answer(self, number: int) -> Answer:
        prompt, sample = self._other(number)
        return PromptRequest(-1, prompt, Sampling(1), 1), [as_episode(with_text(sample, self._decode))]
