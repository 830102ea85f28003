"""The feed of a replica: one watch of the job's keys, shared by every open stream.

The watch begins with the first stream and ends some time after the last one. It keeps the last changes, so that a
client that comes back gets what it missed. A reader that does not keep up is cut, and never slows the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_rl.coordinator.api.change_projector import Change, ChangeProjector
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.errors import Compacted, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient, Watch
from elastic_rl.etcd.keys import Keys

log = logging.getLogger(__name__)

_POLL_S = 0.5
_IDLE_S = 60.0
_KEPT = 5_000
_WAITING = 2_000
_MOST = 10_000
"""Keys of one kind that are looked at, at most."""


@dataclass(eq=False)
class Subscription:
    """One reader's place in the feed. Used within the event loop only."""

    kinds: frozenset[str]
    """Kinds of changes that it wants; empty for all."""
    missed: list[Change] | None = None
    """What came since the revision that it resumes from; None where that cannot be told any more."""
    over: bool = False
    """No more will come: the reader was too slow, or the watch has ended."""
    _waiting: list[Change] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def offer(self, change: Change) -> None:
        if self.kinds and change.kind not in self.kinds:
            return
        if len(self._waiting) >= _WAITING:
            log.warning("a reader of the feed does not keep up and is cut")
            self.end()
        elif not self.over:
            self._waiting.append(change)
            self._news.set()

    def end(self) -> None:
        self.over = True
        self._news.set()

    async def take(self, timeout_s: float) -> list[Change]:
        """Changes that came since the last call, waiting for the first one; none after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return []
        taken, self._waiting = self._waiting, []
        if not self.over:
            self._news.clear()
        return taken


class ChangeStream:
    """The changes of one job. Every method is called from the event loop."""

    def __init__(self, etcd: EtcdClient, keys: Keys, replica: str, *, most: int) -> None:
        """``most``: readers at once."""
        self._etcd, self._keys, self._replica, self._most = etcd, keys, replica, most
        self._readers: set[Subscription] = set()
        self._expected = 0  # readers that are being let in
        self._begin = asyncio.Lock()
        self._watcher: _Watcher | None = None
        self._recent: deque[Change] = deque()
        self._floor = 0  # every change of a later revision is in ``_recent``
        self._idle: asyncio.TimerHandle | None = None

    async def subscribe(self, kinds: frozenset[str] = frozenset(), *, after: int | None = None) -> Subscription:
        """A new reader, from now on. ``after``: the last revision of which it has seen anything; ``missed`` then begins
        with that revision once more, for it may have got only a part of it.

        Raises a 503 problem when there are too many readers, EtcdUnavailable.
        """
        if len(self._readers) + self._expected >= self._most:
            raise Problem(503, Kind.TOO_MANY_STREAMS, "Too many event streams are open",
                          f"this replica keeps {self._most} open (coordinator.max_streams)",
                          headers={"Retry-After": "10"})
        self._expected += 1
        try:
            async with self._begin:
                if self._watcher is None or self._watcher.over:
                    await self._start(after)
        finally:
            self._expected -= 1
        reader = Subscription(kinds)
        if after is not None and after > self._floor:
            reader.missed = [c for c in self._recent if c.revision >= after and (not kinds or c.kind in kinds)]
        self._readers.add(reader)
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        return reader

    def leave(self, reader: Subscription) -> None:
        self._readers.discard(reader)
        if not self._readers and self._watcher is not None and self._idle is None:
            self._idle = asyncio.get_running_loop().call_later(_IDLE_S, self._rest)

    def _rest(self) -> None:
        self._idle = None
        if self._watcher is not None and not self._readers:
            self._watcher.stopping.set()
            self._watcher = None
            self._recent.clear()

    async def _start(self, after: int | None) -> None:
        loop = asyncio.get_running_loop()
        watcher = _Watcher(self._etcd, self._keys, self._replica)
        try:
            self._floor = await asyncio.to_thread(watcher.open, (after or 0) - 1)
        except Compacted:
            self._floor = await asyncio.to_thread(watcher.open, 0)
        self._recent.clear()
        self._watcher = watcher
        threading.Thread(target=watcher.run, args=(loop, self), name="feed", daemon=True).start()

    # -- called by the watcher's thread through the loop ------------------------------------------------------------
    def tell(self, watcher: _Watcher, changes: list[Change]) -> None:
        if watcher is not self._watcher:
            return
        for change in changes:
            if len(self._recent) >= _KEPT:
                self._floor = self._recent.popleft().revision
            self._recent.append(change)
            for reader in self._readers:
                reader.offer(change)

    def ended(self, watcher: _Watcher) -> None:
        """The watch broke off: readers come again, and find another one or a new snapshot."""
        if watcher is self._watcher:
            self._watcher = None
            for reader in self._readers:
                reader.end()


class _Watcher:
    """The thread's side: reads the store and turns its events into changes."""

    def __init__(self, etcd: EtcdClient, keys: Keys, replica: str) -> None:
        self._etcd, self._keys, self._replica = etcd, keys, replica
        self.stopping = threading.Event()
        self.over = False
        self._scene: ChangeProjector
        self._watch: Watch

    def open(self, revision: int) -> int:
        """Begins behind ``revision`` (below 1: behind the present one) and returns it. Raises Compacted."""
        keys, kvs = self._keys, []
        for prefix in (keys.pools_prefix(), keys.leader_prefix(), keys.job_status(), keys.epoch(),
                       keys.alerts_prefix()):
            found = self._etcd.page(prefix, limit=_MOST, revision=max(0, revision))
            revision = found.revision
            kvs += found.kvs
        self._scene = ChangeProjector(keys, self._replica)
        self._scene.load(kvs)
        self._watch = self._etcd.watch(keys.root, start_revision=revision + 1)
        return revision

    def run(self, loop: asyncio.AbstractEventLoop, feed: ChangeStream) -> None:
        try:
            while not self.stopping.is_set() and not self._watch.closed:
                if changes := self._next():
                    _call(loop, feed.tell, self, changes)
        except (Compacted, EtcdUnavailable) as e:
            log.info("the feed's watch ended: %s", e)
        except ElasticRLError as e:
            log.warning("the feed's watch failed: %s", e)
        finally:
            self.over = True
            self._watch.close()
            _call(loop, feed.ended, self)

    def _next(self) -> list[Change]:
        """The next changes: the one that is waited for, and those that are there with it."""
        changes: list[Change] = []
        wait_s = _POLL_S
        while len(changes) < _WAITING // 4 and (event := self._watch.get(wait_s)) is not None:
            wait_s = 0.0
            if (change := self._scene.apply(event)) is not None:
                changes.append(change)
        return changes



def _call(loop: asyncio.AbstractEventLoop, what: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the replica has stopped
        loop.call_soon_threadsafe(what, *args)
