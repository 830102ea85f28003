"""Plays episodes: turns of the policy, by the engines, and of an environment, until one of them ends it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from elastic_rl.data.samples import EPISODE, Prompt, Sample, Segment
from elastic_rl.engine.client import GenerateClient
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.environments.base import Environment, NewEpisode
from elastic_rl.environments.episode_time import EpisodeTime
from elastic_rl.environments.observations import EpisodeRewards, require_observation
from elastic_rl.environments.turns import TurnWriter
from elastic_rl.errors import PluginFailed
from elastic_rl.plugins.process import CANCEL_S
from elastic_rl.plugins.user_code import call_fault, describe

log = logging.getLogger(__name__)
T = TypeVar("T")

_CLOSE_S = 5.0
"""Limit for ``close`` of an environment."""


@dataclass(frozen=True)
class EpisodeLimits:
    """The limits of one sample."""

    turns: int
    """Turns of the policy."""
    turn_tokens: int
    """Tokens of one turn."""
    seconds: float
    """Seconds that the environment may take altogether. What it waits for a thread (``OwnThreads``) has a limit of its
    own."""


class Episodes:
    """A ``GenerateFn``: the samples of a prompt are episodes that begin with it."""

    def __init__(self, new_episode: NewEpisode, writer: TurnWriter, limits: EpisodeLimits) -> None:
        self._new_episode, self._writer, self._limits = new_episode, writer, limits

    async def __call__(self, request: PromptRequest, engines: GenerateClient) -> list[Sample]:
        """Raises EngineFailed, PluginFailed, PluginAway, and whatever the environment raises."""
        first = replace(request.sampling, max_new_tokens=min(
            self._limits.turn_tokens, request.sampling.max_new_tokens))
        # All turns of a group go to one engine, which has computed the keys and values of those before.
        route = digest(request, -1).hex()
        began = await engines.generate(request.prompt.token_ids, first, request.samples, route)
        playing = [asyncio.ensure_future(self._play(request, engines, route, sample, i))
                   for i, sample in enumerate(began)]
        try:
            return await asyncio.gather(*playing)
        except BaseException:  # the others would go on
            for one in playing:
                one.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
            raise

    async def check(self, prompt: Prompt) -> None:
        """Raises PluginFailed, and whatever the environment raises, for a prompt with which no episode begins."""
        await self._closed(await self._begun(prompt, 0))

    async def _play(self, request: PromptRequest, engines: GenerateClient, route: str, first: Sample, index: int
                    ) -> Sample:
        environment = await self._begun(request.prompt, int.from_bytes(digest(request, index)[:4], "little") >> 1)
        try:
            return await self._turns(request, engines, route, environment, first, index)
        finally:
            await self._closed(environment)

    async def _begun(self, prompt: Prompt, seed: int) -> Environment:
        async def begin() -> Environment:
            found = self._new_episode(prompt, seed)
            if not callable(getattr(found, "step", None)) or not callable(getattr(found, "close", None)):
                raise PluginFailed(f"rollout.environment began an episode that is a {type(found).__name__}, without "
                                   "step or close", hint="Environment in elastic_rl/environments/base.py")
            if fault := call_fault(found.step, 1, asynchronous=True):
                raise PluginFailed(f"rollout.environment began an episode whose step is {fault}, and must be an async "
                                   "function (text) -> Observation", hint="Environment in "
                                   "elastic_rl/environments/base.py")
            return found

        return await bounded(begin(), EpisodeTime(self._limits.seconds))

    async def _closed(self, environment: Environment) -> None:
        with contextlib.suppress(Exception):
            await bounded(environment.close(), EpisodeTime(_CLOSE_S))

    async def _turns(self, request: PromptRequest, engines: GenerateClient, route: str, environment: Environment,
                     turn: Sample, index: int) -> Sample:
        segments: list[Segment] = []
        rewards = EpisodeRewards()
        ids = list(request.prompt.token_ids)
        left = EpisodeTime(self._limits.seconds)
        while True:
            segments += turn.segments
            ids += turn.response_ids
            if turn.finish_reason != "stop":  # it was cut off: there is nothing to answer
                return self._sample(segments, rewards, turn, turn.finish_reason)
            said = require_observation(await bounded(environment.step(self._writer.text_of(turn.response_ids)), left))
            rewards.add(said)
            if said.done:
                return self._sample(segments, rewards, turn, "stop")
            if rewards.turns >= self._limits.turns:
                return self._sample(segments, rewards, turn, "length")
            room = request.sampling.max_new_tokens - sum(len(s.token_ids) for s in segments)
            if not self._writer.may_fit(said.messages, room):
                return self._sample(segments, rewards, turn, "length")
            # In a thread: it takes long for a long text, and the other episodes go on meanwhile.
            between = await asyncio.to_thread(self._writer.between, said.messages)
            room -= len(between)
            if room < 1:
                return self._sample(segments, rewards, turn, "length")
            # The policy did not write these tokens: they have no log-probs, and it is not trained on them.
            segments.append(Segment(tuple(between), loss=False))
            ids += between
            # A seed of its own: episodes that are the same so far shall not stay the same.
            own = replace(request.sampling, max_new_tokens=min(self._limits.turn_tokens, room), seed=(
                None if request.sampling.seed is None else request.sampling.seed + index))
            [turn] = await engines.generate(ids, own, 1, route)

    def _sample(self, segments: Sequence[Segment], rewards: EpisodeRewards, last: Sample, finish_reason: str) -> Sample:
        return Sample(tuple(segments), finish_reason, metadata={EPISODE: rewards.record()},
                      text=self._writer.plain_text_of(last.response_ids))


def digest(request: PromptRequest, index: int) -> bytes:
    """8 bytes that another prompt, another pass over the data, and another sample do not have. Pure."""
    return hashlib.blake2b(array("q", [request.sampling.seed or 0, index, *request.prompt.token_ids]).tobytes(),
                           digest_size=8).digest()


async def bounded(work: Coroutine[Any, Any, T], left: EpisodeTime) -> T:
    """What a step of an environment returns or raises; its SystemExit, which would end the process, as PluginFailed.
    Raises PluginFailed, or PluginAway, when no time is left. Ends the process when the step does not end soon after it
    was cancelled: nobody knows what it holds."""
    async def guarded() -> T:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as e:
            raise PluginFailed(describe(e)) from e

    task = left.begin(guarded())
    try:
        await left.until(task)
        if task.cancelled():
            raise PluginFailed("rollout.environment cancelled its own step")
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            if not task.done():
                log.error("a step of rollout.environment did not end when it was cancelled: its process ends")
                os._exit(1)
