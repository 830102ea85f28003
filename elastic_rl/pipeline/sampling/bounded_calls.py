"""Calls of code that may never end: in daemon threads, which are given up when they take too long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from elastic_rl.errors import PluginFailed
from elastic_rl.pipeline.sampling.source_reads import SHOWN_AFTER_S
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugins.user_code import describe

T = TypeVar("T")

_SLICE_S = 0.05
"""The loop's thread looks this often whether it is to end."""
_MAX_LEFT = 16
"""Threads that may still run what was given up."""
TOO_LONG = "raise rollout.reward_timeout_s, or make the function faster"


class Running:
    """What a call says of itself while it runs, in its own thread."""

    def __init__(self) -> None:
        self.news = threading.Event()
        """Set when there is something to look at."""
        self.is_done = False

    def done(self) -> None:
        """All that is waited for is there."""
        self.is_done = True
        self.news.set()


class BoundedCalls:
    """Calls of a user's code in daemon threads. Used by one thread."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._left: list[threading.Thread] = []

    def run(self, what: str, work: Callable[[Running], None], limit_s: float, *, shown_after_s: float,
            since: Callable[[], float] = lambda: 0.0, look: Callable[[], None] = lambda: None
            ) -> BaseException | None:
        """What ``work`` raised, or None, as soon as it has returned or has said that it is done; what it does after
        that, as ending the tasks it left behind, costs no time here. ``look`` is called in the thread of the caller
        whenever there is news, and at the end.

        After ``shown_after_s`` the loop says that it waits. Raises PluginFailed after ``limit_s``, which gives the
        thread up, and while too many threads that were given up still run; and Fenced when the loop is to end. Both
        times count from the begin of the call or, if that is later, from ``since()``, monotonic.
        """
        self._require_room(what)
        state, errors = Running(), list[BaseException]()

        def body() -> None:
            try:
                work(state)
            except BaseException as e:  # whatever a user's function raises: this is no main thread
                errors.append(e)
            finally:
                state.done()

        thread = threading.Thread(target=body, name="plugin", daemon=True)
        began = time.monotonic()
        try:
            thread.start()
        except RuntimeError as e:
            raise PluginFailed(f"{what} cannot run: {describe(e)}") from e
        self._left.append(thread)
        while not state.is_done:
            state.news.wait(_SLICE_S)
            state.news.clear()
            look()
            if state.is_done:
                break
            took_s = time.monotonic() - max(began, since())
            if took_s > limit_s:
                raise PluginFailed(f"{what} took longer than {limit_s:g} s", hint=TOO_LONG)
            if took_s > shown_after_s:
                self._waits.waits("plugin", f"{what}, which has taken longer than {shown_after_s:g} s")
            else:
                self._waits.pause(0.0)
        look()
        return errors[0] if errors else None

    def make(self, what: str, make: Callable[[], T], close: Callable[[T], None], limit_s: float) -> T:
        """What ``make`` returns or raises, as soon as it does; it is closed when nobody waits for it any more. Raises
        also as ``run``."""
        made, given_up = list[T](), threading.Event()

        def work(_running: Running) -> None:
            made.append(make())
            if given_up.is_set():
                close(made[0])

        try:
            error = self.run(f"the start of {what}", work, limit_s, shown_after_s=SHOWN_AFTER_S)
        except BaseException:
            given_up.set()
            for one in made:  # if it was made just before; closing it twice does no harm
                close(one)
            raise
        if error is not None:
            raise error
        return made[0]

    def _require_room(self, what: str) -> None:
        self._left = [t for t in self._left if t.is_alive()]
        if len(self._left) >= _MAX_LEFT:
            self._left[0].join(_SLICE_S)  # it may be about to end
            self._left = [t for t in self._left if t.is_alive()]
        if len(self._left) >= _MAX_LEFT:
            raise PluginFailed(f"{what} waits until one of {len(self._left)} earlier calls ends, which took too long "
                               "or left tasks behind that do not end when they are cancelled",
                               hint="correct the function, and `elastic-rl restart roles/actor`")
