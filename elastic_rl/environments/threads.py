"""Threads in which a tool or a game runs: it may block, and a call that took too long cannot be ended.

Each has its own, so that one that hangs takes none from the others, nor from the client of the engines.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from elastic_rl.environments.episode_time import waiting
from elastic_rl.errors import PluginAway

T = TypeVar("T")

_REPLACE_S = 600.0
"""What has all its threads held for so long gets another process: its calls may never end."""


class TookTooLong(Exception):
    """A call took longer than it may."""


class OwnThreads:
    """Used from one event loop."""

    def __init__(self, what: str, threads: int, timeout_s: float) -> None:
        """``what``: runs in them, for texts. ``timeout_s``: of a call, from when its turn has come."""
        self._what, self._threads, self._timeout_s = what, threads, timeout_s
        self._free = threads
        self._turns: deque[asyncio.Future[None]] = deque()
        """Of calls that wait, the oldest first; none while a thread is free."""
        self._pool = ThreadPoolExecutor(threads, "own")
        self._held = 0
        """Threads that run calls which took too long."""
        self._held_since = 0.0

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises. Until its turn comes it waits, which is no time of its episode. Raises
        TookTooLong, and PluginAway while all threads are held by calls that took too long: what they ask may be away,
        of which the policy shall not learn."""
        await self._turn()
        loop = asyncio.get_running_loop()
        running = self._pool.submit(work)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release))
        answer = asyncio.wrap_future(running)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has seen it
        end = loop.time() + self._timeout_s
        try:
            done, _ = await asyncio.wait({answer}, timeout=self._timeout_s)
        except asyncio.CancelledError:
            loop.call_at(end, self._hold, running, loop)  # not sooner: it may be as fast as any
            raise
        if not done:
            self._hold(running, loop)
            raise TookTooLong
        return answer.result()

    async def _turn(self) -> None:
        if self._held >= self._threads:
            raise self._away()
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            with waiting(f"one of the {self._threads} threads of {self._what}, all of which work for others",
                         "make it faster, or give it more threads; or raise rollout.generate_timeout_s"):
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._release()  # its turn had come
            raise

    def _release(self) -> None:
        """A thread has ended its call."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _away(self) -> PluginAway:
        return PluginAway(
            f"{self._what} does not answer: all of its {self._threads} threads run calls that took "
            f"longer than {self._timeout_s:g} s", replace=time.monotonic() - self._held_since > _REPLACE_S,
            hint="see whether what it asks is away; give what it does a timeout of its own")

    def _hold(self, running: Future[T], loop: asyncio.AbstractEventLoop) -> None:
        """Counts a call that nobody waits for any more, until it ends."""
        if running.done():
            return
        self._held += 1
        if self._held == self._threads:
            self._held_since = time.monotonic()
            for turn in self._turns:
                if not turn.done():
                    turn.set_exception(self._away())
            self._turns.clear()

        def ended() -> None:
            self._held -= 1

        running.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))
