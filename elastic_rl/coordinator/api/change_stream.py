"""The change stream of a replica: one watch of the job's keys, shared by all subscribers.

The watch starts with the first subscriber and ends some time after the last one. The stream keeps the last changes, so
that a client that reconnects gets those it missed. A subscriber that falls behind is dropped, and never slows the
others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_rl.coordinator import job_view
from elastic_rl.coordinator.api.change_projector import ChangeProjector, ObjectChange
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.errors import Compacted, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient, Watch
from elastic_rl.etcd.keys import Keys

log = logging.getLogger(__name__)

_POLL_S = 0.5
_IDLE_S = 60.0
"""The watch is closed this long after the last subscriber has left."""
_HISTORY = 5_000
"""Changes kept for clients that reconnect."""
MAX_PENDING = 2_000
"""Changes that wait for one subscriber; with more of them it is dropped."""
_MAX_KEYS = 10_000
"""Keys of one kind that are loaded, at most."""


@dataclass(eq=False)
class Subscription:
    """One subscriber of a stream. Used within the event loop only."""

    kinds: frozenset[str]
    """Kinds of changes that it gets; empty for all."""
    missed: list[ObjectChange] | None = None
    """Changes since the revision that it resumes from; None where they are no longer known."""
    ended: bool = False
    """No more changes will come: the subscriber was too slow, or the watch has ended."""
    _pending: list[ObjectChange] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, change: ObjectChange) -> None:
        """Queues a change for the subscriber."""
        if self.kinds and change.kind not in self.kinds:
            return
        if len(self._pending) >= MAX_PENDING:
            log.warning("dropping a slow subscriber of the change stream")
            self.end()
        elif not self.ended:
            self._pending.append(change)
            self._ready.set()

    def end(self) -> None:
        self.ended = True
        self._ready.set()

    async def take(self, timeout_s: float) -> list[ObjectChange]:
        """Changes since the last call. Waits up to ``timeout_s`` for the first one, and returns [] when none came."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return []
        taken, self._pending = self._pending, []
        if not self.ended:
            self._ready.clear()
        return taken


class StreamLimit:
    """Counts the subscribers of all jobs on a replica. Every method is called from the event loop."""

    def __init__(self, most: int) -> None:
        self._most, self._open = most, 0

    def take(self) -> None:
        """Raises a 503 problem at the limit."""
        if self._open >= self._most:
            raise Problem(503, Kind.TOO_MANY_STREAMS, "Too many event streams are open",
                          f"this replica keeps {self._most} open (coordinator.max_streams)",
                          headers={"Retry-After": "10"})
        self._open += 1

    def free(self) -> None:
        self._open -= 1


class ChangeStream:
    """The changes of one job. Every method is called from the event loop."""

    def __init__(self, etcd: EtcdClient, keys: Keys, replica: str, limit: StreamLimit) -> None:
        self._etcd, self._keys, self._replica, self._limit = etcd, keys, replica, limit
        self._subscribers: set[Subscription] = set()
        self._start_lock = asyncio.Lock()
        self._watcher: _Watcher | None = None
        self._history: deque[ObjectChange] = deque()
        self._floor = 0  # every change of a later revision is in ``_history``
        self._idle: asyncio.TimerHandle | None = None

    async def subscribe(self, kinds: frozenset[str] = frozenset(), *, after: int | None = None) -> Subscription:
        """A new subscriber, from now on. ``after``: the last revision of which it has seen anything; ``missed`` then
        starts with that revision once more, since the client may have got only a part of it.

        Raises a 503 problem when there are too many subscribers, and EtcdUnavailable.
        """
        self._limit.take()
        try:
            async with self._start_lock:
                if self._watcher is None or self._watcher.ended:
                    await self._start(after)
        except BaseException:
            self._limit.free()
            raise
        subscription = Subscription(kinds)
        if after is not None and after > self._floor:
            subscription.missed = [c for c in self._history
                                   if c.revision >= after and (not kinds or c.kind in kinds)]
        self._subscribers.add(subscription)
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        if subscription in self._subscribers:
            self._subscribers.remove(subscription)
            self._limit.free()
        if not self._subscribers and self._watcher is not None and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        self._idle = None
        if self._watcher is not None and not self._subscribers:
            self._watcher.stopping.set()
            self._watcher = None
            self._history.clear()

    async def _start(self, after: int | None) -> None:
        loop = asyncio.get_running_loop()
        watcher = _Watcher(self._etcd, self._keys, self._replica)
        try:
            self._floor = await asyncio.to_thread(watcher.open, (after or 0) - 1)
        except Compacted:
            self._floor = await asyncio.to_thread(watcher.open, 0)
        self._history.clear()
        self._watcher = watcher
        threading.Thread(target=watcher.run, args=(loop, self), name="change-stream", daemon=True).start()

    # -- called by the watcher's thread through the loop ------------------------------------------------------------
    def publish(self, watcher: _Watcher, changes: list[ObjectChange]) -> None:
        if watcher is not self._watcher:
            return
        for change in changes:
            if len(self._history) >= _HISTORY:
                self._floor = self._history.popleft().revision
            self._history.append(change)
            for subscription in self._subscribers:
                subscription.offer(change)

    def watch_ended(self, watcher: _Watcher) -> None:
        """Ends all subscriptions: clients reconnect, and get another watch or a new snapshot."""
        if watcher is self._watcher:
            self._watcher = None
            for subscription in self._subscribers:
                subscription.end()


class _Watcher:
    """The thread's side: watches etcd and turns its events into changes."""

    def __init__(self, etcd: EtcdClient, keys: Keys, replica: str) -> None:
        self._etcd, self._keys, self._replica = etcd, keys, replica
        self.stopping = threading.Event()
        self.ended = False
        self._projector: ChangeProjector
        self._watch: Watch

    def open(self, revision: int) -> int:
        """Starts the watch behind ``revision`` (below 1: behind the present one) and returns it. Raises Compacted."""
        keys, kvs = self._keys, []
        for prefix in (keys.pools_prefix(), *job_view.keys_of(keys), keys.alerts_prefix()):
            found = self._etcd.page(prefix, limit=_MAX_KEYS, revision=max(0, revision))
            revision = found.revision
            kvs += found.kvs
        for prefix in (keys.members_prefix(), keys.heartbeats_prefix()):  # all: a change is told from what was before
            kvs += self._etcd.range(prefix, revision=revision)[0]
        self._projector = ChangeProjector(keys, self._replica)
        self._projector.load(kvs)
        self._watch = self._etcd.watch(keys.root, start_revision=revision + 1)
        return revision

    def run(self, loop: asyncio.AbstractEventLoop, stream: ChangeStream) -> None:
        try:
            while not self.stopping.is_set() and not self._watch.closed:
                if changes := self._next():
                    _call(loop, stream.publish, self, changes)
        except (Compacted, EtcdUnavailable) as e:
            log.info("the watch of the change stream ended: %s", e)
        except ElasticRLError as e:
            log.warning("the watch of the change stream failed: %s", e)
        finally:
            self.ended = True
            self._watch.close()
            _call(loop, stream.watch_ended, self)

    def _next(self) -> list[ObjectChange]:
        """Waits for a change, and returns it with those that have arrived by then."""
        changes: list[ObjectChange] = []
        wait_s = _POLL_S
        while len(changes) < MAX_PENDING // 4 and (event := self._watch.get(wait_s)) is not None:
            wait_s = 0.0
            changes += self._projector.apply(event)
        return changes


def _call(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the replica has stopped
        loop.call_soon_threadsafe(what, *args)
