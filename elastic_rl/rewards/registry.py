"""Rewards by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastic_rl.data.tasks import Problem
from elastic_rl.rewards.exact_match import exact_match

Reward = Callable[[Problem, Sequence[int]], float]

REWARDS: dict[str, Reward] = {"exact_match": exact_match}
