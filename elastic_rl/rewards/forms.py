"""Other forms in which a user's code may be a reward, told apart by a decorator: ``@per_sample``, ``@from_options``.

    @per_sample
    def reward(text: str, prompt: Prompt) -> float: ...

    @from_options
    def make(options: Mapping[str, Any]) -> RewardFn: ...
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins.process import START_S
from elastic_rl.plugins.user_code import number_fault, number_of
from elastic_rl.plugins.worker_pool import MAX_MEMORY_MB, WorkerPool, values
from elastic_rl.rewards.base import Reward, RewardFn, plain_rewards

_MAX_PROCESSES = 256
_AT_ONCE = 1 << 30
"""Calls of an async function at once: all of them."""
_MIN_MEMORY_MB = 256
"""Python with its libraries needs most of it."""
SampleReward = Callable[[str, Prompt], float | Reward | Awaitable[float | Reward]]
"""Returns what the text of a response to a prompt is worth; plain or async."""


@dataclass(frozen=True)
class PerSample:
    """A function that ``per_sample`` marks. Called, it is the function itself."""

    function: SampleReward
    timeout_s: float
    processes: int
    memory_mb: int

    def __call__(self, text: str, prompt: Prompt) -> Any:
        return self.function(text, prompt)

    def make(self, name: str) -> RewardFn:
        """The reward, which the settings name as ``name``."""
        return (_AsyncPerSample(self) if inspect.iscoroutinefunction(self.function)
                else _PlainPerSample(self, name))


@overload
def per_sample(function: SampleReward, /) -> PerSample: ...
@overload
def per_sample(*, timeout_s: float = ..., processes: int = ..., memory_mb: int = ...
               ) -> Callable[[SampleReward], PerSample]: ...


def per_sample(function: SampleReward | None = None, /, *, timeout_s: float = 10.0, processes: int = 2,
               memory_mb: int = 4096) -> PerSample | Callable[[SampleReward], PerSample]:
    """Makes a reward of a function ``(text, prompt) -> float`` (or ``Reward``), which sees one response at a time.

    An ``async`` function is called in the process of the loop. A plain one runs in ``processes`` processes of its own,
    which import its module as they start, have ``memory_mb`` MiB of address space each, and are killed when a response
    takes longer than ``timeout_s`` seconds. Of the prompt it gets ``token_ids``, ``text``, ``answer_ids`` and
    ``metadata``.

    Raises ValueError for limits that no call could keep.
    """
    if not 0 < timeout_s < math.inf or not 1 <= processes <= _MAX_PROCESSES or not (
            _MIN_MEMORY_MB <= memory_mb <= MAX_MEMORY_MB):
        raise ValueError(f"per_sample: timeout_s={timeout_s!r}, processes={processes!r}, memory_mb={memory_mb!r}, but "
                         f"it needs a time above 0, 1 to {_MAX_PROCESSES} processes and {_MIN_MEMORY_MB} to "
                         f"{MAX_MEMORY_MB} MiB")
    if function is None:
        return lambda given: PerSample(given, timeout_s, processes, memory_mb)
    return PerSample(function, timeout_s, processes, memory_mb)


@dataclass(frozen=True)
class FromOptions:
    """A function that ``from_options`` marks."""

    function: Callable[[Mapping[str, Any]], RewardFn]


def from_options(function: Callable[[Mapping[str, Any]], RewardFn]) -> FromOptions:
    """Marks a function that gets ``rollout.reward_options`` and returns the ``RewardFn``. It raises ConfigError for
    wrong options."""
    return FromOptions(function)


class Bounded(ABC):
    """A reward whose calls have limits."""

    @abstractmethod
    def bounds(self) -> tuple[float, int]:
        """Seconds of a call, and how many there are at once."""


class _AsyncPerSample(Bounded):
    def __init__(self, given: PerSample) -> None:
        self._given = given

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return list(await asyncio.gather(*(self._one(sample.text, prompt) for sample in samples)))

    def bounds(self) -> tuple[float, int]:
        return self._given.timeout_s, _AT_ONCE

    async def _one(self, text: str, prompt: Prompt) -> Reward:
        return _as_reward(await asyncio.wait_for(self._given(text, prompt), self._given.timeout_s))


class _PlainPerSample(Bounded):
    def __init__(self, given: PerSample, name: str) -> None:
        self._given = given
        self._pool = WorkerPool(f"{__name__}:scorer", given.processes, memory_mb=given.memory_mb, named=name,
                                made_of=name, start_s=START_S)

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        plain = {"token_ids": prompt.token_ids, "text": prompt.text, "answer_ids": prompt.answer_ids,
                 "metadata": dict(prompt.metadata), "question": prompt.question}
        found = await self._pool.calls([{"text": sample.text, "prompt": plain} for sample in samples],
                                       self._given.timeout_s, all_or_none=True)
        return [Reward(value, parts, tuple(turns)) for value, parts, turns in values(found)]

    def bounds(self) -> tuple[float, int]:
        return self._given.timeout_s, self._given.processes

    def close(self) -> None:
        self._pool.close()


def scorer(name: str) -> Callable[[Mapping[str, Any]], tuple[float, dict[str, float], list[float]]]:
    """The function of a worker that calls the user's function ``name``, whose module is imported here: that may take
    longer than a call may. What it returns raises what the user's function raises, and PluginFailed for what is no
    reward."""
    module, _, attribute = name.partition(":")
    marked: Any = importlib.import_module(module)
    for part in attribute.split("."):
        marked = getattr(marked, part)

    def score(job: Mapping[str, Any]) -> tuple[float, dict[str, float], list[float]]:
        raw = job["prompt"]
        answer = raw["answer_ids"]
        prompt = Prompt(tuple(raw["token_ids"]), raw["text"], None if answer is None else tuple(answer),
                        raw["metadata"], raw["question"])
        [sound] = plain_rewards([_as_reward(marked(job["text"], prompt))], 1)
        return sound.value, dict(sound.parts), list(sound.turns)

    return score


def _as_reward(given: Any) -> Reward:
    """What a user's function of one sample returns, a number as a Reward. Raises PluginFailed for anything else."""
    if isinstance(given, Reward):
        return given
    number = number_of(given)
    if number is None:
        raise PluginFailed(f"it must return a number or a Reward, {number_fault(given)}")
    return Reward(number)


def require_reward_fn(found: object, setting: str, name: str) -> None:
    """Raises ConfigError for a user's object that cannot be a RewardFn: most likely a decorator is missing."""
    call = found if inspect.isfunction(found) else vars(type(found)).get("__call__")
    if inspect.isclass(found) or not callable(found) or (
            inspect.isfunction(call) and not inspect.iscoroutinefunction(inspect.unwrap(call))):
        raise ConfigError(f"{setting}={name!r} is no async function (prompt, samples) -> rewards",
                          hint="put @per_sample of elastic_rl.rewards.forms before a function (text, prompt) -> float, "
                               "or @from_options before one that returns the reward")
