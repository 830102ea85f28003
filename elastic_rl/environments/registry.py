"""Environments by their name in the configuration, made from their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from elastic_rl.data.tokenizer import Tokenizer
from elastic_rl.environments.base import EnvironmentContext, EnvironmentFactory, NewEpisode
from elastic_rl.environments.textarena_games import textarena
from elastic_rl.environments.tools import tools
from elastic_rl.errors import ConfigError
from elastic_rl.plugins.user_code import resolve

ENVIRONMENTS: dict[str, EnvironmentFactory] = {"textarena": textarena, "tools": tools}
"""Factories by name: ``factory(options, context)``."""


def make_environment(name: str, options: Mapping[str, Any], tokenizer: Tokenizer) -> NewEpisode:
    """What ``rollout.environment`` names: an entry of the registry, or the user's own factory as
    ``package.module:name``. Raises ConfigError."""
    factory = resolve(name, ENVIRONMENTS, setting="rollout.environment")
    found = factory(options, EnvironmentContext("rollout.environment_options", tokenizer))
    if not callable(found) or not _takes_two(found):
        raise ConfigError(f"rollout.environment={name!r} must return a function (prompt, seed) -> Environment, not a "
                          f"{type(found).__name__}" + " of other parameters" * callable(found),
                          hint="EnvironmentFactory in elastic_rl/environments/base.py")
    return found


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, 0)
    except TypeError:
        return False
    except ValueError:  # it has no signature: it is not written in Python
        pass
    return True
