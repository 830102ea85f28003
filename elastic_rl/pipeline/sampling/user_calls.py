"""Calls of a user's rewards and filters, for which the loop waits: it shows a slow one, and gives up one that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from elastic_rl.errors import PluginFailed
from elastic_rl.pipeline.sampling.source_reads import SHOWN_AFTER_S
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.abandonable import AbandonableCall, AbandonableCalls, CallRefused

T = TypeVar("T")

_SLICE_S = 0.05
"""The loop's thread looks this often whether it is to end."""
_MAX_THREADS = 16
"""Threads of one loop that may still run what was given up."""
TOO_LONG = "raise rollout.reward_timeout_s, or make the function faster"


class UserCalls:
    """Calls that one loop makes, one at a time. Used by one thread."""

    def __init__(self, waits: Waits) -> None:
        self._waits, self._calls = waits, AbandonableCalls("plugin", _MAX_THREADS)

    def run(self, what: str, work: Callable[[AbandonableCall[T]], T], limit_s: float, *, shown_after_s: float,
            since: Callable[[], float] = lambda: 0.0, look: Callable[[], None] = lambda: None,
            late: Callable[[T], object] = lambda found: None) -> Future[T]:
        """What ``work`` returned or raised, as soon as it has returned or finished; what it does after that, as ending
        the tasks it left behind, costs no time here. ``look`` is called in the thread of the caller whenever there is
        news, and at the end; ``late``: see ``AbandonableCall``.

        After ``shown_after_s`` the loop says that it waits. Raises PluginFailed after ``limit_s``, which gives the
        call up, and while calls that were given up hold too many threads; and Fenced when the loop is to end. Both
        times count from the begin of the call or, if that is later, from ``since()``, monotonic.
        """
        began = time.monotonic()

        def watch() -> None:
            look()
            took_s = time.monotonic() - max(began, since())
            if took_s > limit_s:
                raise PluginFailed(f"{what} took longer than {limit_s:g} s", hint=TOO_LONG)
            if took_s > shown_after_s:
                self._waits.waits("plugin", f"{what}, which has taken longer than {shown_after_s:g} s")
            else:
                self._waits.pause(0.0)

        try:
            call = self._calls.begin_with(work)
        except CallRefused as e:
            raise PluginFailed(f"{what} is not called: {e.message}, since they took too long or left tasks behind that "
                               "do not end when they are cancelled",
                               hint="correct the function, and `elastic-rl restart roles/actor`") from e
        call.wait(watch, every_s=_SLICE_S, late=late)
        look()
        return call.future

    def make(self, what: str, make: Callable[[], T], close: Callable[[T], None], limit_s: float) -> T:
        """What ``make`` returns or raises, as soon as it does; it is closed when nobody waits for it any more. Raises
        also as ``run``."""
        return self.run(f"the start of {what}", lambda _: make(), limit_s, shown_after_s=SHOWN_AFTER_S, late=close
                        ).result()
