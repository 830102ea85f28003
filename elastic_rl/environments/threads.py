"""Threads in which a tool or a game runs: it may block, and a call that took too long cannot be ended.

Each has its own, so that one that hangs takes none from the others, nor from the client of the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from elastic_rl.errors import PluginAway

T = TypeVar("T")

_LOOK_AGAIN_S = 1.0
"""How often a call that waits for its turn looks whether all threads are held."""
_REPLACE_S = 600.0
"""What has all its threads held for so long gets another process: its calls may never end."""


class TookTooLong(Exception):
    """A call took longer than it may."""


class OwnThreads:
    """Used from one event loop."""

    def __init__(self, what: str, threads: int, timeout_s: float) -> None:
        """``what``: runs in them, for texts. ``timeout_s``: of a call, from when its turn has come."""
        self._what, self._threads, self._timeout_s = what, threads, timeout_s
        self._turns = asyncio.Semaphore(threads)
        self._pool = ThreadPoolExecutor(threads, "own")
        self._held = 0
        """Threads that run calls which took too long."""
        self._held_since = 0.0

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. Raises TookTooLong, and PluginAway while all threads are held by calls that
        took too long: what they ask may be away, of which the policy shall not learn."""
        await self._turn()
        loop = asyncio.get_running_loop()
        running = self._pool.submit(work)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._turns.release))
        answer = asyncio.wrap_future(running)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has seen it
        try:
            done, _ = await asyncio.wait({answer}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._hold(running, loop)
            raise
        if not done:
            self._hold(running, loop)
            raise TookTooLong
        return answer.result()

    async def _turn(self) -> None:
        while True:
            if self._held >= self._threads:
                raise PluginAway(
                    f"{self._what} does not answer: all of its {self._threads} threads run calls that took "
                    f"longer than {self._timeout_s:g} s", replace=time.monotonic() - self._held_since > _REPLACE_S,
                    hint="see whether what it asks is away; give what it does a timeout of its own")
            try:
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._turns.acquire()
                return
            except TimeoutError:
                continue

    def _hold(self, running: Future[T], loop: asyncio.AbstractEventLoop) -> None:
        """Counts a call that nobody waits for any more, until it ends."""
        self._held += 1
        if self._held == self._threads:
            self._held_since = time.monotonic()

        def ended() -> None:
            self._held -= 1

        running.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))
