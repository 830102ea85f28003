"""Threads in which a tool or a game runs: it may block, and a call that took too long cannot be ended.

Each has its own, so that one that hangs takes none from the others, nor from the client of the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic_rl.environments.episode_time import waiting
from elastic_rl.errors import PluginAway
from elastic_rl.runtime.abandonable import AbandonableCalls, CallRefused

T = TypeVar("T")

_REPLACE_S = 600.0
"""Time in which abandoned calls held all threads, after which their process is replaced: they may never end."""


class OwnThreads:
    """Used from one event loop."""

    def __init__(self, what: str, threads: int, timeout_s: float) -> None:
        """``what``: runs in them, for texts. ``timeout_s``: the limit in seconds of a call, from when it has a
        thread."""
        self._what, self._threads, self._timeout_s = what, threads, timeout_s
        self._calls = AbandonableCalls("own", threads)

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. Until it has a thread it waits, which is no time of its episode. Raises
        CallTookTooLong, and PluginAway while calls that took too long hold all threads: what they ask may be away, of
        which the policy shall not learn."""
        try:
            call = self._calls.begin(work)
            if not call.has_begun:
                with waiting(f"one of the {self._threads} threads of {self._what}, all of which work for others",
                             "make it faster, or give it more threads; or raise rollout.generate_timeout_s"):
                    await call.begins()
            return await call.result_within(self._timeout_s)
        except CallRefused as e:
            raise PluginAway(
                f"{self._what} does not answer: all of its {self._threads} threads run calls that took longer than "
                f"{self._timeout_s:g} s", replace=(self._calls.held_s or 0.0) > _REPLACE_S,
                hint="see whether what it asks is away; give what it does a timeout of its own") from e
