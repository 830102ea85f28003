"""The requests under way in a replica of a role. They end with the actor that sent them: Ray Serve cancels none of a
caller that has died, and its successor's would wait behind them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from elastic_rl.errors import ElasticRLError, Fenced

log = logging.getLogger(__name__)
T = TypeVar("T")

QUEUES_S = 5.0
_LOOK_S = 1.0
"""How often it is looked which term the actor is in, while there are requests: those of a successor may not be let in
before the others have ended."""


class ActorRequests:
    """Used from one event loop."""

    def __init__(self, read_term: Callable[[], int]) -> None:
        """``read_term``: the term of the actor that may write now. It may block, and raise ElasticRLError; it is called
        in a thread of its own."""
        self._read_term = read_term
        self._thread = ThreadPoolExecutor(1, "actor-term")
        self._newest = 0
        """Term of the newest actor that is known here."""
        self._running: dict[asyncio.Task[Any], int] = {}
        """The term of each request."""
        self._looking: asyncio.Task[None] | None = None

    async def run(self, term: int, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns or raises, for the actor's term ``term``. Raises Fenced when that is over, also in the
        middle of the work, which is cancelled."""
        self._saw(term)
        if term < self._newest:
            work.close()
            raise self._over(term)
        task = asyncio.ensure_future(work)
        self._running[task] = term
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look())
        try:
            return await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if term < self._newest and not (this is not None and this.cancelling()):
                raise self._over(term) from None
            raise
        finally:
            del self._running[task]

    async def stream(self, term: int, work: Callable[[Callable[[T], None]], Coroutine[Any, Any, None]],
                     queues: Callable[[], bool] = lambda: False) -> AsyncIterator[list[T]]:
        """Yields what ``work`` gives by the function that it is called with: all that it gave while the reader had what
        came before. ``queues``: whether some of the work may not have begun yet; then the stream yields an empty list
        each ``QUEUES_S``, so that the reader, who has a limit for the next answer, does not count the time. Raises as
        ``run``. A stream that its reader closes cancels the work."""
        given: list[T] = []
        news = asyncio.Event()

        def give(one: T) -> None:
            given.append(one)
            news.set()

        working = asyncio.ensure_future(self.run(term, work(give)))
        working.add_done_callback(lambda _: news.set())
        try:
            while given or not working.done():
                try:
                    async with asyncio.timeout(QUEUES_S):
                        await news.wait()
                except TimeoutError:
                    if queues():
                        yield []
                    continue
                news.clear()
                if given:
                    some = given.copy()
                    given.clear()
                    yield some
            await working
        finally:
            working.cancel()
            await asyncio.wait([working])

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _look(self) -> None:
        while self._running:
            try:
                self._saw(await asyncio.get_running_loop().run_in_executor(self._thread, self._read_term))
            except ElasticRLError as e:
                log.debug("the term of the actor cannot be read: %s", e)  # as long as nobody can say, all go on
            await asyncio.sleep(_LOOK_S)

    def _saw(self, term: int) -> None:
        if term <= self._newest:
            return  # what was cancelled may need some time to end, and is not cancelled again
        self._newest = term
        orphans = [task for task, of_term in self._running.items() if of_term < term]
        if orphans:
            log.warning("%d requests are cancelled: term %d of the actor has begun", len(orphans), term)
        for task in orphans:
            task.cancel()

    def _over(self, term: int) -> Fenced:
        return Fenced(f"term {term} of the actor is over; the run is in term {self._newest}",
                      hint="stop; another incarnation has taken over")
