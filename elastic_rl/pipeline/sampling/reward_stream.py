"""Groups on their way through the thread of the rewards, each given back as soon as it is known: a slow reward holds up
no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from elastic_rl.data.samples import Group
from elastic_rl.pipeline.sampling.group_requests import Answer
from elastic_rl.pipeline.sampling.rewarding import Rewarder
from elastic_rl.pipeline.sampling.side_calls import SideCalls

Judged = tuple[Group, str]
"""A group, and the reason of the first filter that drops it, or ""."""


class RewardStream:
    """Rewards the groups of one loop as they come. A call of the thread of the rewards goes on as long as there are
    groups; the next ones begin another."""

    def __init__(self, side: SideCalls, rewarder: Rewarder, judged: Callable[[Group], str]) -> None:
        """``judged``: says why the group is dropped, or "". It is called in the thread of the rewards."""
        self._side, self._rewarder, self._judged = side, rewarder, judged
        self._lock = threading.Lock()
        self._answers: list[Answer] = []
        self._done: list[Judged] = []
        self._call: Future[None] | None = None
        self.news: Future[None] = Future()
        """A future that is done when there is something to take."""

    @property
    def pending(self) -> bool:
        """Whether groups were added that were not taken."""
        return self._call is not None or bool(self._answers) or bool(self._done)

    def add(self, answers: Sequence[Answer]) -> None:
        """Adds groups, without waiting for those before."""
        with self._lock:
            self._answers += answers

    def take(self) -> list[Judged]:
        """The groups that are done. Raises what the thread raised: Fenced."""
        with self._lock:
            done, self._done = self._done, []
            self.news = Future()
        if self._call is not None and self._call.done():
            call, self._call = self._call, None
            call.result()
            done += self.take()
        if self._call is None and self._answers:
            self._call = self._side.submit(self._reward)
            self._call.add_done_callback(lambda _: self._say())
        return done

    # -- in the thread of the rewards -------------------------------------------------------------------------------
    def _reward(self) -> None:
        self._rewarder.stream(self._more(), self._more, self._give)

    def _more(self) -> list[Answer]:
        with self._lock:
            answers, self._answers = self._answers, []
            return answers

    def _give(self, group: Group) -> None:
        judged = group, self._judged(group)
        with self._lock:
            self._done.append(judged)
        self._say()

    def _say(self) -> None:
        with self._lock:
            if not self.news.done():
                self.news.set_result(None)
