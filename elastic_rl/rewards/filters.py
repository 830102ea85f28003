"""The seam ``Filter``, and what the project has of it: which prompt groups are not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from elastic_rl.data.samples import Group
from elastic_rl.errors import ConfigError
from elastic_rl.plugins.user_code import describe, resolve

Filter = Callable[[Group], str]
"""Returns the reason why a rewarded group is not to be trained on; "" keeps it."""


def uniform_reward(group: Group) -> str:
    """Drops a group whose samples all have the same reward: relative to one another none of them is better, so it has
    no gradient (dynamic sampling, arXiv:2503.14476)."""
    return "uniform reward" if len(set(group.rewards)) == 1 else ""


def length(*, max_prompt_tokens: float = math.inf, min_response_tokens: float = 0.0,
           max_response_tokens: float = math.inf) -> Filter:
    """Drops a group with a longer prompt, or whose responses are shorter or longer in the mean, in tokens."""
    _require_ascending("min_response_tokens", min_response_tokens, "max_response_tokens", max_response_tokens)
    if not isinstance(max_prompt_tokens, int | float):
        raise ValueError(f"max_prompt_tokens={max_prompt_tokens!r} must be a number")

    def drop_reason(group: Group) -> str:
        mean = sum(len(s.response_ids) for s in group.samples) / max(1, len(group.samples))
        if len(group.prompt.token_ids) > max_prompt_tokens:
            return "long prompt"
        if mean < min_response_tokens:
            return "short responses"
        return "long responses" if mean > max_response_tokens else ""

    return drop_reason


def difficulty(*, low: float = 0.0, high: float = 1.0) -> Filter:
    """Drops a group whose mean reward is outside [low, high]: too hard, or too easy, to learn from."""
    _require_ascending("low", low, "high", high)

    def drop_reason(group: Group) -> str:
        mean = sum(group.rewards) / max(1, len(group.rewards))
        return "too hard" if mean < low else "too easy" if mean > high else ""

    return drop_reason


def _require_ascending(low_name: str, low: float, high_name: str, high: float) -> None:
    """Raises ValueError, also for what is no number."""
    if not all(isinstance(v, int | float) for v in (low, high)) or not low <= high:
        raise ValueError(f"{low_name}={low!r} and {high_name}={high!r} must be numbers, the first no larger")


FILTERS: dict[str, Filter] = {"uniform_reward": uniform_reward}
"""Filters without options, by name."""
FILTER_FACTORIES: dict[str, Callable[..., Filter]] = {"length": length, "difficulty": difficulty}
"""What makes a filter from its options, by name."""


def make_filter(setting: str | Mapping[str, Any]) -> tuple[str, Filter]:
    """Name and filter of an entry of ``rollout.filters``: a filter's name, or a mapping with the ``name`` of what makes
    one and its options; either also as ``module:name``. Raises ConfigError."""
    if isinstance(setting, str):
        if setting not in FILTER_FACTORIES:
            return setting, resolve(setting, FILTERS, setting="rollout.filters")
        setting = {"name": setting}
    options = dict(setting)
    name = str(options.pop("name"))
    if name in FILTERS:
        raise ConfigError(f"the filter {name} of rollout.filters has no options", hint=f"write {name} alone")
    make = resolve(name, FILTER_FACTORIES, setting="rollout.filters")
    try:
        return name, make(**options)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # whatever a user's function raises: also SystemExit
        takes = f"it is called as {name}({', '.join(f'{key}=…' for key in options)})"
        raise ConfigError(f"the filter {name} of rollout.filters cannot be made: {describe(e)}", hint=takes) from e
