"""Calls that a second thread makes, one after the other, while the loop goes on with something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from elastic_rl.pipeline.waits import WaitRelay, Waits
from elastic_rl.runtime.abandonable import AbandonableCalls

T = TypeVar("T")
_SLICE_S = 0.1
"""The loop's thread looks this often whether it is to end."""
_END_S = 5.0
"""What is under way ends within this time, unless a user's tokenizer hangs: no other code of theirs runs in the thread
itself."""


class SideCalls:
    """Makes calls for one loop. What they wait for is said in ``waits`` of this object, and the loop shows it."""

    def __init__(self, name: str, waits: Waits) -> None:
        """``name``: of the thread. ``waits``: the loop's, which shows what a call waits for as a wait of its own."""
        self._loop, self._ending, self._relay = waits, threading.Event(), WaitRelay()
        self.waits = Waits(self._relay, self._ending)
        self.waits.stage(name)
        self._calls = AbandonableCalls(name, 1)
        self._shows = False

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Makes the call after those before it. Raises CallRefused once the loop has given one up, since it ends."""
        return self._calls.begin(call).future

    def call(self, call: Callable[[], T], unwanted: Callable[[T], object] = lambda found: None) -> T:
        """What the call returns or raises. Raises Fenced when the loop is to end; ``unwanted`` then gets what the call
        returns, if it does."""
        def look() -> None:
            self.show()
            self._loop.pause(0.0)

        found = self._calls.begin(call).result(look, every_s=_SLICE_S, late=unwanted)
        try:
            self.show()
        except BaseException:
            unwanted(found)
            raise
        return found

    def show(self) -> bool:
        """Has the loop wait for what a call waits for; whether one does. Raises Fenced when the loop is to end."""
        kind, what = self._relay.waiting
        if kind:
            self._loop.waits(kind, what)
        elif self._shows:
            self._loop.works()
        self._shows = bool(kind)
        return self._shows

    def close(self) -> None:
        """Ends the call that is under way with Fenced, and makes no other."""
        self._ending.set()
        self._calls.close(_END_S)
