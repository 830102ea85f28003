"""Calls that may never return: code of a user, or of a package whose peer is gone, can block for ever, and no thread
can be ended from outside.

Each call has a daemon thread. Who waits for a call may *abandon* it, when it takes too long or when nobody needs the
result any more; the thread is then left behind, and is counted until it ends. ::

            begin                  a thread is free              returns
    caller ------> in line -----------------------> running ----------------> ended
                     |                                 |                        ^
                     | abandon                abandon  |                        | returns after all: ``late``
                     v                                 v                        |
                  never run                        abandoned -------------------+

While abandoned calls hold all threads, no call waits for one: those in line and new ones are refused with CallRefused.
Else each of them would wait for as long as what has hung before, and nobody would learn why.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from elastic_rl.errors import ElasticRLError

T = TypeVar("T")


class CallRefused(ElasticRLError):
    """No thread can run the call: abandoned calls hold all of them, or this machine starts no thread now."""


class CallTookTooLong(ElasticRLError):
    """A call was abandoned since it did not return within its limit."""


class AbandonableCalls:
    """Runs calls that may never return in at most so many threads. Thread-safe."""

    def __init__(self, name: str, threads: int) -> None:
        """``name``: the name of the threads."""
        self._name, self._threads = name, threads
        self._lock = threading.Lock()
        self._running: set[AbandonableCall[Any]] = set()
        """Calls that have a thread, abandoned ones too."""
        self._line: deque[AbandonableCall[Any]] = deque()
        """Calls that wait for a thread, the oldest first; none while a thread is free."""
        self._held_since: float | None = None
        """Time since which abandoned calls hold all threads, monotonic."""
        self._closed = False

    def begin(self, call: Callable[[], T]) -> AbandonableCall[T]:
        """Runs the call as soon as a thread is free; calls get threads in the order in which they came. Raises
        CallRefused."""
        return self.begin_with(lambda _: call())

    def begin_with(self, call: Callable[[AbandonableCall[T]], T]) -> AbandonableCall[T]:
        """Begins as ``begin`` does a call that gets itself, to ``notify`` who waits for it or to ``finish`` early."""
        begun = AbandonableCall(self, call)
        with self._lock:
            if self._closed or self._held_since is not None:
                raise self._refusal()
            if len(self._running) >= self._threads:
                self._line.append(begun)
                return begun
            self._running.add(begun)
        try:
            threading.Thread(target=self._work, args=(begun,), name=self._name, daemon=True).start()
        except RuntimeError as e:
            refusal = CallRefused(f"no thread can be started: {e}")
            following = self.ended(begun)
            while following is not None:  # those that came meanwhile wait for this thread
                following.refuse(refusal)
                following = self.ended(following)
            raise refusal from e
        return begun

    @property
    def held_s(self) -> float | None:
        """Seconds for which abandoned calls have held all threads; None while they do not."""
        with self._lock:
            return None if self._held_since is None else time.monotonic() - self._held_since

    def close(self, timeout_s: float) -> None:
        """Begins no other call, and waits so long for those under way."""
        with self._lock:
            self._closed = True
            running = [call.future for call in self._running]
            refused = self._refuse_line()
        for call in refused:
            call.refuse(self._refusal())
        wait(running, timeout=timeout_s)

    def abandoned(self, call: AbandonableCall[Any]) -> None:
        """Nobody waits for the call any more."""
        refused: list[AbandonableCall[Any]] = []
        with self._lock:
            call.is_abandoned = True
            if call in self._running:
                if self._held_since is None and sum(one.is_abandoned for one in self._running) >= self._threads:
                    self._held_since = time.monotonic()
                    refused = self._refuse_line()
            else:
                with contextlib.suppress(ValueError):
                    self._line.remove(call)
                    refused = [call]
        for one in refused:
            one.refuse(self._refusal())

    def _refuse_line(self) -> list[AbandonableCall[Any]]:
        refused = [*self._line]
        self._line.clear()
        return refused

    def _refusal(self) -> CallRefused:
        return CallRefused("no further call is made" if self._closed else
                           f"all {self._threads} threads run calls that were abandoned")

    def _work(self, call: AbandonableCall[Any]) -> None:
        following: AbandonableCall[Any] | None = call
        while following is not None:
            following = following.run()

    def ended(self, call: AbandonableCall[Any]) -> AbandonableCall[Any] | None:
        """Frees the thread of the call; the next call in line, which has it then."""
        with self._lock:
            self._running.discard(call)
            self._held_since = None
            if not self._line:
                return None
            following = self._line.popleft()
            self._running.add(following)
            return following


class AbandonableCall(Generic[T]):
    """One call; ``AbandonableCalls.begin`` makes it. One caller waits for it."""

    def __init__(self, calls: AbandonableCalls, call: Callable[[AbandonableCall[T]], T]) -> None:
        self._calls, self._call = calls, call
        self.future: Future[T] = Future()
        """What the call returns or raises. It cannot be cancelled."""
        self.is_abandoned = False
        self._begun: Future[None] = Future()
        self._news = threading.Event()
        for one in (self.future, self._begun):
            one.set_running_or_notify_cancel()
        self.future.add_done_callback(lambda _: self._news.set())

    @property
    def has_begun(self) -> bool:
        """Whether it has a thread, or never gets one."""
        return self._begun.done()

    # -- in the thread of the call ---------------------------------------------------------------------------------
    def run(self) -> AbandonableCall[Any] | None:
        """Makes the call; returns the next one that has its thread."""
        self._begun.set_result(None)
        found, error = list[T](), list[BaseException]()
        try:
            found.append(self._call(self))
        except BaseException as e:  # whatever a user's function raises: this is no main thread
            error.append(e)
        following = self._calls.ended(self)  # before who waits for it begins another one
        if not self.future.done():
            if error:
                self.future.set_exception(error[0])
            else:
                self.future.set_result(found[0])
        return following

    def finish(self, value: T) -> None:
        """The result is there. The call may go on, as to end tasks that it has left behind."""
        self.future.set_result(value)

    def notify(self) -> None:
        """Has the caller look at once."""
        self._news.set()

    # -- in the thread of the caller -------------------------------------------------------------------------------
    def refuse(self, refusal: CallRefused) -> None:
        """The call is not made."""
        self._begun.set_exception(refusal)
        self.future.set_exception(refusal)

    def wait(self, look: Callable[[], object] = lambda: None, *, every_s: float, limit_s: float = math.inf,
             late: Callable[[T], object] = lambda found: None) -> None:
        """Returns when the call has ended, or was refused. ``look`` is called at least so often until then, and may
        raise. The call is abandoned when ``look`` raises, after ``limit_s``, and when it has finished but goes on.
        ``late`` gets what it returns after it was given up, in its thread. Raises CallTookTooLong."""
        end = time.monotonic() + limit_s
        try:
            while not self.future.done():
                left_s = end - time.monotonic()
                if left_s <= 0:
                    raise CallTookTooLong(f"no answer within {limit_s:g} s")
                self._news.wait(min(every_s, left_s))
                self._news.clear()
                if not self.future.done():
                    look()
        except BaseException:
            self.future.add_done_callback(lambda done: None if done.exception() else late(done.result()))
            raise
        finally:
            self.abandon()

    def result(self, look: Callable[[], object] = lambda: None, *, every_s: float, limit_s: float = math.inf,
               late: Callable[[T], object] = lambda found: None) -> T:
        """What the call returns or raises; as ``wait``. Raises CallRefused too."""
        self.wait(look, every_s=every_s, limit_s=limit_s, late=late)
        return self.future.result()

    async def begins(self) -> None:
        """Returns when the call has a thread. Raises CallRefused. In an event loop; one that is cancelled abandons the
        call."""
        if self.has_begun:
            return self._begun.result()
        try:
            await asyncio.wrap_future(self._begun)
        except asyncio.CancelledError:
            self.abandon()
            raise

    async def result_within(self, limit_s: float) -> T:
        """Awaits the result as ``result`` does, in an event loop, with a limit that counts from when the call has a
        thread. A waiter that is cancelled abandons the call only when its limit has passed: until then it may be as
        fast as any. Raises CallTookTooLong and CallRefused too."""
        await self.begins()
        loop = asyncio.get_running_loop()
        answer = asyncio.wrap_future(self.future)
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # somebody has seen it
        end = loop.time() + limit_s
        try:
            done, _ = await asyncio.wait({answer}, timeout=limit_s)
        except asyncio.CancelledError:
            loop.call_at(end, self.abandon)
            raise
        if not done:
            self.abandon()
            raise CallTookTooLong(f"no answer within {limit_s:g} s")
        return answer.result()

    def abandon(self) -> None:
        """Nobody waits for the call any more; that does nothing to one that has ended."""
        self._calls.abandoned(self)
