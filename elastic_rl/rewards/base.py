"""What a reward is: the seam ``RewardFn``, how a named reward is made from options, and what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from elastic_rl.data.numbers import number_text
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import ElasticRLError, PluginFailed
from elastic_rl.plugins.user_code import MAX_NAME, is_name, number_fault, number_of, plain

if TYPE_CHECKING:  # the process of a user's reward imports this module too, and starts sooner without the settings
    from elastic_rl.config import PoolSettings
    from elastic_rl.rewards.judging import Judgement, JudgeRequest

_MAX_REWARD = 1e30
MAX_PARTS = 64
"""Parts that a reward may have."""

_TURNS = 10_000
"""Turns that a reward may be split over."""

Judge = Callable[["JudgeRequest"], Sequence["Judgement"]]
"""Has a model judge responses, and blocks for as long as that takes. Raises EngineFailed, RoleUnavailable and
PluginFailed."""
Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text, without special tokens."""


class RewardAway(ElasticRLError):
    """What a reward asks does not answer. It says nothing about a group, which is tried again for as long as that
    lasts."""


@dataclass(frozen=True)
class Reward:
    """What a sample is worth. ``parts``: what the value is made of, by name; for people. ``turns``: what of the value
    is of each of the policy's turns, in order, of samples of several; the rest is of the end. Algorithms with
    advantages of tokens (``ppo``) credit each turn with its own."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)
    turns: Sequence[float] = ()


class RewardFn(Protocol):
    """Rewards the samples of one prompt, together, since a judge may compare them.

    It may have a method ``close()``, which is called when no more samples come; ``check(prompt)``, which raises
    PluginFailed for a prompt that cannot be rewarded, for ``config check``; and ``least_timeout_s(samples)``, the
    seconds that its own limits allow a call with so many samples (``call_limit_s``).
    """

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> Sequence[Reward]:
        """One reward per sample, in order; finite numbers. What it raises is a failure of this group: it is tried
        again, and then the group is dropped."""


@dataclass(frozen=True)
class RewardContext:
    """What a reward is made with, besides its options."""

    setting: str
    """Setting of its options, for the texts of errors: ``rollout.reward_options``."""
    make: Callable[[str, Mapping[str, Any], str, str], RewardFn]
    """Makes another reward: ``make(name, options, setting, options_setting)``. Raises ConfigError."""
    decode: Decode | None = None
    """Turns tokens into text; None where the data source has no tokenizer."""
    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    """The job's pools of engines, by name."""
    judge: Judge | None = None
    """None where the job does not run; then a reward that asks a judge checks what it would ask."""
    seed: int = 0
    """Seed of the job."""
    attempts: int = 1
    """Attempts of a request to engines (``rollout.max_attempts``)."""


def call_limit_s(reward: RewardFn, timeout_s: float, samples: int) -> float:
    """The limit in seconds of a call of the reward with so many samples: ``timeout_s`` (``rollout.reward_timeout_s``),
    or what the reward's own limits add up to, if that is more. So what those promise of a sample, as 0 for a check that
    hangs, comes before the call is given up."""
    own = getattr(reward, "least_timeout_s", None)
    return max(timeout_s, own(samples)) if callable(own) else timeout_s


def rounds(calls: int, at_once: int) -> int:
    """Rounds in which so many calls are made."""
    return -(-calls // at_once)


RewardFactory = Callable[[Mapping[str, Any], RewardContext], RewardFn]
"""Makes a reward from its options. Raises ConfigError for wrong options and for what this machine lacks."""


def gold_answers(prompt: Prompt, decode: Decode | None) -> tuple[str, ...]:
    """The right answers as text, one or more: ``metadata["answer"]``, a text, a number or a list of these, any of
    which is right; without it ``answer_ids``, decoded. Raises PluginFailed for a prompt that has neither."""
    given = prompt.metadata.get("answer")
    if given is None and prompt.answer_ids is not None and decode is not None:
        return (decode(prompt.answer_ids),)
    answers = tuple(a for a in given if a is not None) if isinstance(given, list | tuple) else (given,)
    if not answers or not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in answers):
        raise PluginFailed('the prompt has no metadata["answer"] that is a text, a number, or a list of these',
                           hint="give the prompts of the data source an answer")
    return tuple(a if isinstance(a, str) else number_text(a) for a in answers)


def plain_rewards(given: object, count: int) -> list[Reward]:
    """Rewards of plain numbers that fp32 and the records of a step hold. Raises PluginFailed, and whatever the objects
    of a user's own classes raise."""
    rewards = list(islice(given, count + 1)) if isinstance(given, Iterable) else []
    if len(rewards) != count or not all(isinstance(r, Reward) and isinstance(r.parts, Mapping) for r in rewards):
        got = plain(f"{type(given).__name__} of {type(rewards[0]).__name__}" if rewards else type(given).__name__, 100)
        raise PluginFailed(f"it must return {count} objects Reward, one per sample, not {got}",
                           hint="for a function (text, prompt) -> float, put @per_sample of elastic_rl.rewards.forms "
                                "before it")
    return [Reward(_plain_number(r.value), _plain_parts(r.parts), _plain_turns(r.turns)) for r in rewards]


def require_turns(samples: Sequence[Sample], rewards: Sequence[Reward]) -> None:
    """Raises PluginFailed for a reward of more turns than its sample has."""
    for sample, reward in zip(samples, rewards, strict=True):
        if len(reward.turns) > (turns := len(sample.turn_ends)):
            raise PluginFailed(f"it gave rewards of {len(reward.turns)} turns to a sample of {turns}")


def _plain_turns(given: object) -> tuple[float, ...]:
    turns = list(islice(given, _TURNS + 1)) if isinstance(given, Sequence) and not isinstance(given, str) else None
    if turns is None or len(turns) > _TURNS:
        raise PluginFailed(f"it must give the rewards of a sample's turns as a list of at most {_TURNS} numbers")
    return tuple(map(_plain_number, turns))


def _plain_parts(given: Mapping[str, float]) -> dict[str, float]:
    parts = list(islice(given.items(), MAX_PARTS + 1))
    if len(parts) > MAX_PARTS or not all(is_name(name) for name, _ in parts):
        raise PluginFailed(f"it must give a reward at most {MAX_PARTS} parts, with names of 1 to {MAX_NAME} printable "
                           "characters, which it did not")
    return {plain(name): _plain_number(value) for name, value in parts}


def _plain_number(given: object) -> float:
    number = number_of(given)
    if number is None:
        raise PluginFailed(f"it must return finite numbers as rewards, {number_fault(given)}")
    if not abs(number) <= _MAX_REWARD:
        raise PluginFailed(f"it must return finite numbers as rewards, not {number:g}")
    return number
