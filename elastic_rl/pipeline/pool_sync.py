"""Waiting for the engines to serve a version, which is published again where nobody has its chunks any more.

An engine that is merely slow is the leader's to deal with (``coordinator.stragglers``): once a quorum serves the
version, it has those that lack it leave the router, and the wait is over. So a wait says which version it is for."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from elastic_rl.coordinator.stragglers.rule import FollowLimits, served_by_quorum
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine
from elastic_rl.pipeline.rollout_pool import PoolWatch, behind, describe, in_sync, serves, unserved
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.abandonable import AbandonableCall, AbandonableCalls, CallRefused
from elastic_rl.runtime.backoff import doubled_s

log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""Longest pause between two looks at the pool, while nothing changes there."""
_PAUSE_S, _PAUSE_OF_ENGINE_S = 0.001, 1e-6
"""The pause after a look while much changes: the engines of a pool become ready within milliseconds of each other, and
the last of them is what a step waits for. A look at 10,000 engines takes as long as their pause."""
FIRST_S, _MAX_S = 15.0, 3600.0
"""The least and the longest time that engines may lack a version before it is looked whether it is lost."""
_PULLS = 3.0
"""Multiple of the longest last pull that is still no loss."""
_SAID_AFTER_S = 1.0
"""A wait that lasts so long is told the leader."""

Enough = Callable[[list[Engine], int], bool]
"""``(engines, version)`` → whether they serve it, or newer ones."""


class OnNeeds(Protocol):
    """Is told that the run needs engines that serve a version. Raises Fenced."""

    def __call__(self, version: int, *, at_once: bool) -> None:
        """``at_once``: it has waited for that for a while, so that others are to know."""


class Republish:
    """Decides, in one wait for one version, when to look whether it is lost, and so to be published again. Pure; the
    clock is an argument.

    With one replica a node that dies takes the chunks along that were not on its disk yet. A committed version may then
    be one that nobody can fetch, while the trainer has the very weights. An engine that lacks a version for several
    times as long as its last pull took may be waiting for that, or merely be slow: so this asks for a look, which is
    dear, and not for a publish. One that has found no sound copy is not slow: the first look is at once. What was
    published again and is lost once more is looked at ever less often, up to an hour."""

    def __init__(self, first_pull_s: float, version: int) -> None:
        """``first_pull_s``: how long the first pull of an engine, of which nothing is known, may take. ``version``: the
        one that is waited for; that an older one could not be had says nothing of it."""
        self._first_pull_s, self._version = first_pull_s, version
        self._since: dict[str, float] = {}
        self._times, self._has_looked = 0, False

    def is_due(self, now: float, behind: Sequence[Engine]) -> bool:
        """Whether to look now; ``looked`` is called then. ``behind``: the engines that run and lack the version. Call
        it regularly."""
        self._since = {e.id: self._since.get(e.id, now) for e in behind}
        longest_pull_s = max((e.pull_apply_s for e in behind), default=0.0)
        usual_s = max(FIRST_S, _PULLS * longest_pull_s)

        def over(engine: Engine) -> bool:
            has_failed = engine.unfetchable_version >= self._version
            if has_failed and not self._has_looked:
                return True
            is_first_pull = not (engine.version or engine.pull_apply_s or has_failed)
            limit_s = max(usual_s, self._first_pull_s) if is_first_pull else usual_s
            return now - self._since[engine.id] >= doubled_s(self._times + 1, limit_s, max(limit_s, _MAX_S))

        return any(map(over, behind))  # not all: each engine that comes would begin the time of the others again

    def looked(self, now: float, *, lost: bool) -> None:
        """``lost``: it is published again now."""
        self._times += lost
        self._has_looked = True
        self._since = dict.fromkeys(self._since, now)


class PoolSync:
    """The pool as the loop sees it. Used by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, waits: Waits, publish_again: Callable[[int], None], *,
                 is_lost: Callable[[], bool], needs: OnNeeds, first_pull_s: float, limits: FollowLimits) -> None:
        """``publish_again``: called with a version that nobody has any more. ``is_lost``: whether that is so of the
        newest one; it may take seconds, and is called in a thread of its own, one call at a time. ``needs``: is told
        which version is waited for, again and again. ``first_pull_s``: see ``Republish``. ``limits``: how long engines
        that serve the version wait for others that do not get so far."""
        self.etcd, self.keys, self.waits = etcd, keys, waits
        self.publish_again, self.is_lost, self.needs = publish_again, is_lost, needs
        self.looks = AbandonableCalls("lost-version", 1)
        """The calls of ``is_lost``."""
        self.first_pull_s, self.limits = first_pull_s, limits
        self.engines: list[Engine] = []
        """The pool's engines, as they were at the last wait."""
        self._waited_for = 1
        """The version of the newest wait."""
        self._unserved: _LostVersion | None = None
        """The looks for that version while no engine serves; None while one does."""

    def no_engine(self) -> str:
        """Which engines are missing, while none serves; "" also without etcd. Call it regularly: the engines that are
        started meanwhile may be unable to get the newest version, which is published again then. Raises Fenced, and
        what ``publish_again`` raises."""
        try:
            found = unserved(self.etcd, self.keys)
        except EtcdUnavailable:
            return ""
        if self._unserved is not None and (found is None or self._unserved.version != self._waited_for):
            self._unserved.close()  # of an outage that is over
            self._unserved = None
        if found is None:
            return ""
        if self._unserved is None:
            self._unserved = _LostVersion(self, self._waited_for)
        self._unserved.publish_again(found)
        return describe(found, self._waited_for)

    def wait(self, version: int) -> None:
        """Waits until every routable engine serves ``version`` or a newer one. Raises Fenced, and what
        ``publish_again`` raises."""
        with contextlib.closing(self.begin(version)) as wait:
            while not wait.poll():
                self.waits.pause(_PAUSE_S + len(self.engines) * _PAUSE_OF_ENGINE_S)

    def begin(self, version: int, enough: Enough = in_sync) -> VersionWait:
        """A wait that the caller polls."""
        self._waited_for = version
        return VersionWait(self, version, enough)


class _LostVersion:
    """Has a version published again that engines wait for and nobody has; for one wait for one version. The look
    whether it is lost goes on beside the wait."""

    def __init__(self, sync: PoolSync, version: int) -> None:
        self._sync, self.version, self._republish = sync, version, Republish(sync.first_pull_s, version)
        self._look: AbandonableCall[bool] | None = None

    def publish_again(self, engines: list[Engine]) -> None:
        """Begins a look when it is time, and publishes when one has found that the version is lost; call it regularly.
        Raises what ``PoolSync.publish_again`` raises."""
        now = time.monotonic()
        if self._republish.is_due(now, behind(engines, self.version)) and self._look is None:
            try:
                self._look = self._sync.looks.begin(self._sync.is_lost)
            except CallRefused:  # one that an earlier wait began has not ended
                self._republish.looked(now, lost=False)
        if self._look is None or not self._look.future.done():
            return
        look, self._look = self._look, None
        lost = look.future.result()
        self._republish.looked(time.monotonic(), lost=lost)
        if lost:
            self._sync.publish_again(self.version)

    def close(self) -> None:
        if self._look is not None:
            self._look.abandon()


class VersionWait:
    """A wait until every routable engine serves a version or a newer one. The pool is watched until it is closed only,
    since thousands of engines change their records at all times."""

    def __init__(self, sync: PoolSync, version: int, enough: Enough) -> None:
        self._sync, self._version, self._enough = sync, version, enough
        self._lost, self._timeout_s = _LostVersion(sync, version), 0.0
        self._served_since: float | None = None
        """Monotonic time since which a quorum serves the version, and every engine that takes requests, while others
        still lack it; None before."""
        self._began = time.monotonic()
        self._pool = PoolWatch(sync.etcd, sync.keys)

    def poll(self) -> bool:
        """Whether they do; if not, says what is waited for. Raises Fenced, and what ``publish_again`` raises."""
        sync = self._sync
        sync.engines = sync.waits.retry("etcd", partial(self._pool.engines, self._timeout_s))
        now = time.monotonic()
        if self._enough(sync.engines, self._version) or self._others_take_too_long(now):
            sync.needs(self._version, at_once=False)
            sync.waits.works()
            return True
        sync.needs(self._version, at_once=now - self._began >= _SAID_AFTER_S)
        self._lost.publish_again(sync.engines)
        sync.waits.waits("engines", describe(sync.engines, self._version))
        self._timeout_s = _LOOK_S
        return False

    def _others_take_too_long(self, now: float) -> bool:
        """One that hangs in an update, or that no router takes, must not hold up the run: no request reaches it before
        it serves the head. Below a quorum it may be that all are slow, and the few would get all requests."""
        sync = self._sync
        if not serves(sync.engines, self._version):
            self._served_since = None
            return False
        self._served_since = now if self._served_since is None else self._served_since
        quorum = served_by_quorum(sync.engines, self._version, sync.limits)
        lacking = behind(sync.engines, self._version)
        if now - self._served_since < (sync.limits.wait_s(len(lacking), quorum) if quorum else sync.first_pull_s):
            return False
        log.warning("no longer waiting for %s", describe(sync.engines, self._version))
        return True

    def close(self) -> None:
        self._lost.close()
        self._pool.close()
