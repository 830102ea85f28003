"""Rewards by their name in the configuration, made from their options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_rl.config import PoolSettings
from elastic_rl.plugins.user_code import resolve
from elastic_rl.rewards.base import Decode, Judge, RewardContext, RewardFactory, RewardFn
from elastic_rl.rewards.code import Code
from elastic_rl.rewards.environment import environment
from elastic_rl.rewards.genrm import GenRm
from elastic_rl.rewards.math_rewards import DeepScaler, MathVerify
from elastic_rl.rewards.mix import Mix
from elastic_rl.rewards.own import OwnReward
from elastic_rl.rewards.reasoning import ReasoningGym
from elastic_rl.rewards.remote import Remote
from elastic_rl.rewards.text import exact_match, f1

REWARDS: dict[str, RewardFactory] = {
    "code": Code, "deepscaler": DeepScaler, "environment": environment, "exact_match": exact_match, "f1": f1,
    "genrm": GenRm, "math_verify": MathVerify, "mix": Mix, "reasoning_gym": ReasoningGym, "remote": Remote}
"""Factories by name: ``factory(options, context)``."""


def make_reward(name: str, options: Mapping[str, Any], *, decode: Decode | None = None,
                pools: Mapping[str, PoolSettings] | None = None, judge: Judge | None = None, seed: int = 0,
                attempts: int = 1, setting: str = "rollout.reward",
                options_setting: str = "rollout.reward_options") -> RewardFn:
    """The reward that a setting names: an entry of the registry made with its options, or the user's own as
    ``package.module:name``. The other arguments: see ``RewardContext``. The caller closes it (``close_reward``). Raises
    ConfigError."""
    def make(name: str, options: Mapping[str, Any], setting: str, options_setting: str) -> RewardFn:
        if ":" in name:
            return OwnReward(name, options, setting, options_setting)
        context = RewardContext(options_setting, make, decode, pools or {}, judge, seed, attempts)
        return resolve(name, REWARDS, setting=setting)(options, context)

    return make(name, options, setting, options_setting)


def start_reward(reward: RewardFn) -> None:
    """Replaces processes of the user's code that have ended, or have a call left over; call it before calls of the
    reward. Raises PluginFailed."""
    if callable(start := getattr(reward, "start", None)):
        start()


def close_reward(reward: RewardFn) -> None:
    """Ends what a reward has started."""
    if callable(close := getattr(reward, "close", None)):
        close()
