"""Rewards by their name in the configuration, made from their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_rl.plugins import resolve
from elastic_rl.rewards.base import Decode, RewardContext, RewardFactory, RewardFn
from elastic_rl.rewards.code import Code
from elastic_rl.rewards.math_rewards import DeepScaler, MathVerify
from elastic_rl.rewards.mix import Mix
from elastic_rl.rewards.own import OwnReward
from elastic_rl.rewards.reasoning import ReasoningGym
from elastic_rl.rewards.remote import Remote
from elastic_rl.rewards.text import exact_match, f1

REWARDS: dict[str, RewardFactory] = {
    "code": Code, "deepscaler": DeepScaler, "exact_match": exact_match, "f1": f1, "math_verify": MathVerify, "mix": Mix,
    "reasoning_gym": ReasoningGym, "remote": Remote}
"""Factories by name: ``factory(options, context)``."""


def make_reward(name: str, options: Mapping[str, Any], *, decode: Decode | None = None,
                setting: str = "rollout.reward", options_setting: str = "rollout.reward_options") -> RewardFn:
    """The reward that a setting names: an entry of the registry made with its options, or the user's own as
    ``package.module:name``. The caller closes it (``close_reward``). Raises ConfigError."""
    def make_other(name: str, options: Mapping[str, Any], setting: str, options_setting: str) -> RewardFn:
        return make_reward(name, options, decode=decode, setting=setting, options_setting=options_setting)

    if ":" in name:
        return OwnReward(name, options, setting, options_setting)
    return resolve(name, REWARDS, setting=setting)(options, RewardContext(options_setting, make_other, decode))


def start_reward(reward: RewardFn) -> None:
    """Replaces processes of the user's code that have ended, or have a call left over; call it before calls of the
    reward. Raises PluginFailed."""
    if callable(start := getattr(reward, "start", None)):
        start()


def close_reward(reward: RewardFn) -> None:
    """Ends what a reward has started."""
    if callable(close := getattr(reward, "close", None)):
        close()
