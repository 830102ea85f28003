"""What an environment may still take in one episode, apart from what it waits for: a thread that others use is no time
of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_rl.errors import PluginAway, PluginFailed

T = TypeVar("T")

WAITS = 20
"""An episode may wait so many times as long as its environment may take. It bounds a wait that would never end, and not
one for many others: what is given up then begins again behind them."""


@dataclass(frozen=True, eq=False)
class _Wait:
    what: str
    """What the wait is for."""
    hint: str


_of_episode: ContextVar[EpisodeTime | None] = ContextVar("time of the episode", default=None)


class EpisodeTime:
    """Two clocks, of which one runs while a step is made: that of the environment's own time, and that of its waits.
    Used from one event loop, for one step at a time."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: that the environment may take altogether."""
        self._own_s, self._waits_s = seconds, WAITS * seconds
        """Seconds that are left of the limits."""
        self._waits: list[_Wait] = []
        """The waits that the step is in."""
        self._counted: _Wait | None = None
        """The one whose time passes; None while that of the environment does."""
        self._since = 0.0
        """Time up to which time was counted; the loop's."""
        self._bound: asyncio.Timeout | None = None
        """Timeout of the step that is being made."""

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task whose waits (``waiting``) count as such, also those of tasks that it begins."""
        context = copy_context()
        context.run(_of_episode.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)

    async def until(self, step: asyncio.Task[Any]) -> None:
        """Returns when the step is done. Raises PluginFailed when the environment's own time is over, and PluginAway
        when that of its waits is."""
        try:
            async with asyncio.timeout_at(self._started()) as self._bound:
                await asyncio.wait({step})
        except TimeoutError:
            if not step.done():
                raise self._over() from None
        finally:
            self._bound = None
            self._count()

    @contextlib.contextmanager
    def wait(self, wait: _Wait) -> Iterator[None]:
        """Inside, no time of the environment's own passes, also if another call of the same step is at work: the step
        cannot end before this one."""
        self._waits.append(wait)
        self._changed()
        try:
            yield
        finally:
            self._waits.remove(wait)
            self._changed()

    def _changed(self) -> None:
        if self._bound is not None and not self._bound.expired():
            self._count()
            self._bound.reschedule(self._started())

    def _started(self) -> float:
        """When the clock that runs from now on comes to its end; the loop's time."""
        self._counted, self._since = self._waits[0] if self._waits else None, asyncio.get_running_loop().time()
        return self._since + (self._own_s if self._counted is None else self._waits_s)

    def _count(self) -> None:
        spent_s = asyncio.get_running_loop().time() - self._since
        if self._counted is None:
            self._own_s -= spent_s
        else:
            self._waits_s -= spent_s

    def _over(self) -> PluginFailed:
        if self._counted is not None:
            return PluginAway(f"an episode has waited too long for {self._counted.what}", hint=self._counted.hint)
        return PluginFailed("rollout.environment took longer than rollout.generate_timeout_s in the steps of one "
                            "episode", hint="raise rollout.generate_timeout_s, or make the environment faster")


@contextlib.contextmanager
def waiting(what: str, hint: str) -> Iterator[None]:
    """Inside, the step of an episode in which it is called waits: that is no time of the environment. ``what``: is
    waited for; ``hint``: what helps."""
    time = _of_episode.get()
    with contextlib.nullcontext() if time is None else time.wait(_Wait(what, hint)):
        yield
