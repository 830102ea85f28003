"""Rewards and filters of the user's own code, each in a process of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from elastic_rl.data.samples import FAILED, Group, Prompt, Sample
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins.process import PluginProcess
from elastic_rl.plugins.user_code import call_fault, describe, plain, resolve
from elastic_rl.rewards.base import Reward, RewardFn, plain_rewards, rounds
from elastic_rl.rewards.filters import Filter, make_filter
from elastic_rl.rewards.forms import Bounded, FromOptions, PerSample, require_reward_fn

_Given = tuple[float, Mapping[str, float], Sequence[float]]
"""The fields of a ``Reward``."""
_START_S = 10.0
"""What the start of a worker takes on a busy machine, besides the import of the user's module."""
_REASON = 100
"""Characters of a filter's reason that are kept."""


class OwnReward:
    """A ``RewardFn`` that a setting names as ``package.module:name``. The process of the run does not import it."""

    def __init__(self, name: str, options: Mapping[str, Any], setting: str, options_setting: str) -> None:
        """Raises ConfigError."""
        self._process = PluginProcess(f"{setting}={plain(name, 200)}", f"{__name__}:serve", name, dict(options),
                                      setting, options_setting)
        self._process.start_first()

    def start(self) -> None:
        """Replaces its process if need be; call it before calls. Raises PluginFailed."""
        self._process.start()

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(value, parts, tuple(turns))
                for value, parts, turns in await self._process.call(prompt, tuple(samples))]

    def least_timeout_s(self, samples: int) -> float:
        """What a function of one sample needs: its calls, one round after the other, and the start of a worker that
        imports the module as the process has done."""
        if not (about := self._process.about):
            return 0.0
        call_s, at_once, made_s = about
        return float(rounds(samples, at_once) * call_s + 2 * made_s + _START_S)

    def close(self) -> None:
        self._process.close()


class OwnFilter:
    """A filter that an entry of ``rollout.filters`` names as ``package.module:name``."""

    def __init__(self, name: str, entry: str | Mapping[str, Any], timeout_s: float) -> None:
        """``timeout_s``: the limit in seconds of one call. Raises ConfigError."""
        self._process = PluginProcess(f"the filter {plain(name, 200)}", f"{__name__}:serve_filter", entry)
        self._timeout_s = timeout_s
        self._process.start_first()

    def __call__(self, group: Group) -> str:
        """Why the group is dropped; "" keeps it. Raises PluginFailed and TimeoutError."""
        async def call() -> str:
            async with asyncio.timeout(self._timeout_s):
                return str(await self._process.call(group))

        self._process.start()
        return asyncio.run(call())

    def close(self) -> None:
        self._process.close()


def named_filter(entry: str | Mapping[str, Any], timeout_s: float) -> tuple[str, Filter]:
    """Name and filter of an entry of ``rollout.filters``, which the caller closes (``close_filter``). ``timeout_s``:
    the limit in seconds of one call of one of the user's own. Raises ConfigError."""
    name = entry if isinstance(entry, str) else str(entry["name"])
    return (name, OwnFilter(name, entry, timeout_s)) if ":" in name else make_filter(entry)


def close_filter(drop_reason: Filter) -> None:
    """Ends what a filter has started."""
    if isinstance(drop_reason, OwnFilter):
        drop_reason.close()


def serve_filter(entry: str | Mapping[str, Any]) -> Callable[[Group], str]:
    """The filter, made in the process. Raises ConfigError."""
    name, drop_reason = make_filter(entry)
    if fault := call_fault(drop_reason, 1, asynchronous=False):
        raise ConfigError(f"the filter {plain(name, 200)} of rollout.filters is {fault}, and must be a function "
                          "(group) -> text", hint="one that is made from options is named with them, {name: "
                          "package.module:name, option: value}, and what makes it returns the function")

    def call(group: Group) -> str:
        return require_reason(drop_reason(group))

    return call


def require_reason(given: object) -> str:
    """A filter's answer. Raises PluginFailed for what is no text, and for a reason that stands for a failure: a group
    that the filter drops would be counted as one for which a part failed, without a limit."""
    if not isinstance(given, str):
        raise PluginFailed("it must return why a group is dropped, or an empty text to keep it, not "
                           f"{plain(type(given).__name__, 100)}")
    reason = plain(given, _REASON)
    if reason.strip().casefold() in FAILED:
        raise PluginFailed(f"it returned {reason!r}, which says of a dropped group that the job failed for it",
                           hint="return another text for the filter's reason")
    return reason


class _Served:
    """The function that the process of a reward runs. ``about``: what ``least_timeout_s`` needs of one that has limits:
    seconds of a call, calls at once, and the seconds that it took to be made."""

    def __init__(self, reward: RewardFn, made_s: float) -> None:
        self._reward = reward
        bounds = reward.bounds() if isinstance(reward, Bounded) else None
        self.about = None if bounds is None else (*bounds, made_s)

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[_Given]:
        return [(r.value, r.parts, r.turns)
                for r in plain_rewards(await self._reward(prompt, samples), len(samples))]


def serve(name: str, options: Mapping[str, Any], setting: str, options_setting: str
          ) -> Callable[[Prompt, Sequence[Sample]], Awaitable[list[_Given]]]:
    """The function that the process runs, made there. Raises ConfigError."""
    began = time.monotonic()
    reward = _made(name, options, setting, options_setting)
    return _Served(reward, time.monotonic() - began)


def _made(name: str, options: Mapping[str, Any], setting: str, options_setting: str) -> RewardFn:
    found: Any = resolve(name, {}, setting=setting)
    if isinstance(found, FromOptions):
        found = _from_options(found, options, name, setting)
    elif options:
        raise ConfigError(f"{options_setting} are given, but {setting}={name!r} takes none",
                          hint="put @from_options of elastic_rl.rewards.forms before a function that takes them")
    if isinstance(found, PerSample):
        return found.make(name)
    require_reward_fn(found, setting, name)
    return found  # type: ignore[no-any-return]


def _from_options(factory: FromOptions, options: Mapping[str, Any], name: str, setting: str) -> Any:
    try:
        return factory.function(dict(options))
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as e:  # whatever a user's function raises: also SystemExit
        raise ConfigError(f"{setting}={plain(name, 200)!r} cannot be made: {describe(e)}",
                          hint="it is called as factory(options), and returns a RewardFn") from e
