"""The reward ``mix``: a weighted sum of others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins.user_code import MAX_NAME, is_name
from elastic_rl.rewards.base import MAX_PARTS, Reward, RewardAway, RewardContext, RewardFn, call_limit_s


class MixPart(Options):
    reward: str
    """Name of the reward, as ``rollout.reward``."""
    weight: float = 1.0
    """What its value is multiplied by; negative for a penalty."""
    options: dict[str, Any] = {}
    """Options of the reward."""
    name: Annotated[str, Field(max_length=32)] = ""
    """Name of the part in the records; the reward's name where it is empty."""


class MixOptions(Options):
    parts: Annotated[list[MixPart], Field(min_length=1, max_length=16)]
    """The rewards that are added."""


class Mix:
    """The sum of the parts' values, each times its weight, and so of those of turns. The reward's parts are the parts'
    own values by name, and what those are made of as ``name/part``."""

    def __init__(self, options: Mapping[str, Any], context: RewardContext) -> None:
        """Raises ConfigError."""
        chosen = read_options(MixOptions, options, of="the reward 'mix'", setting=context.setting)
        names = [part.name or part.reward.rpartition(":")[2][:32] for part in chosen.parts]
        if wrong := [name for name in names if not is_name(name)]:
            raise ConfigError(f"{context.setting}.parts have the name {wrong[0]!r}",
                              hint="names of parts are of printable characters")
        if len(set(names)) < len(names):
            raise ConfigError(f"{context.setting}.parts have the same name twice: {', '.join(names)}",
                              hint="give each part a name of its own")
        self._parts: list[tuple[str, float, RewardFn]] = []
        try:
            for i, (name, part) in enumerate(zip(names, chosen.parts, strict=True)):
                where = f"{context.setting}.parts.{i}"
                self._parts.append((name, part.weight, context.make(
                    part.reward, part.options, f"{where}.reward", f"{where}.options")))
        except ConfigError:
            self.close()
            raise

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        # All of them to their end: what one leaves behind would go on beside the next attempt.
        ended = await asyncio.gather(*(reward(prompt, samples) for _, _, reward in self._parts), return_exceptions=True)
        failed = [one for one in ended if isinstance(one, BaseException)]
        if failed:  # a fault of the group counts, whatever is away besides
            raise next((e for e in failed if not isinstance(e, RewardAway)), failed[0])
        found = [one for one in ended if not isinstance(one, BaseException)]
        for (name, _, _), rewards in zip(self._parts, found, strict=True):
            if len(rewards) != len(samples):
                raise PluginFailed(f"the part {name} gave {len(rewards)} rewards for {len(samples)} samples")
        return [self._sum([rewards[i] for rewards in found]) for i in range(len(samples))]

    def _sum(self, rewards: Sequence[Reward]) -> Reward:
        value, parts = 0.0, dict[str, float]()
        turns = [0.0] * max(len(reward.turns) for reward in rewards)
        for (name, weight, _), reward in zip(self._parts, rewards, strict=True):
            value += weight * reward.value
            parts[name] = reward.value
            for i, turn in enumerate(reward.turns):
                turns[i] += weight * turn
        for (name, _, _), reward in zip(self._parts, rewards, strict=True):
            for inner, number in reward.parts.items():
                if len(parts) < MAX_PARTS and len(f"{name}/{inner}") <= MAX_NAME:
                    parts.setdefault(f"{name}/{inner}", number)
        return Reward(value, parts, tuple(turns))

    def least_timeout_s(self, samples: int) -> float:
        return max(call_limit_s(reward, 0.0, samples) for _, _, reward in self._parts)

    def check(self, prompt: Prompt) -> None:
        for _, _, reward in self._parts:
            if check := getattr(reward, "check", None):
                check(prompt)

    def start(self) -> None:
        for _, _, reward in self._parts:
            if start := getattr(reward, "start", None):
                start()

    def close(self) -> None:
        for _, _, reward in self._parts:
            if close := getattr(reward, "close", None):
                close()
