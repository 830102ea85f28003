"""Waiting for the engines to serve a version, which is published again when they lack it for long."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine
from elastic_rl.pipeline.rollout_pool import PoolWatch, behind, describe, in_sync, missing, serves
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.backoff import doubled_s

log = logging.getLogger(__name__)

_LOOK_S, _PAUSE_S = 0.25, 0.01
"""Longest and shortest pause between two looks at the pool: while nothing changes there, and while much does."""
FIRST_S, _MAX_S = 15.0, 3600.0
"""The least and the longest time that engines may lack a version before it is published again."""
_PULLS = 3.0
"""Multiple of the longest last pull that is still no loss."""

Enough = Callable[[list[Engine], int], bool]
"""``(engines, version)`` → whether they serve it, or newer ones."""


class Republish:
    """Decides, in one wait for one version, when to publish it again. Pure; the clock is an argument.

    With one replica a node that dies takes the chunks along that were not on its disk yet. A committed version may then
    be one that nobody can fetch, while the trainer has the very weights. Engines that merely take long to fetch must
    not be given another version again and again: the limit grows with their last pulls, and doubles each time, up to an
    hour."""

    def __init__(self, first_pull_s: float) -> None:
        """``first_pull_s``: how long the first pull of an engine, of which nothing is known, may take."""
        self._first_pull_s = first_pull_s
        self._since: dict[str, float] = {}
        self._times = 0

    def is_due(self, now: float, behind: Sequence[Engine]) -> bool:
        """Whether to publish again now. ``behind``: the engines that run and lack the version. Call it regularly."""
        self._since = {e.id: self._since.get(e.id, now) for e in behind}
        longest_pull_s = max((e.pull_apply_s for e in behind), default=0.0)
        usual_s = max(FIRST_S, _PULLS * longest_pull_s)

        def over(engine: Engine) -> bool:
            limit_s = usual_s if engine.version or engine.pull_apply_s else max(usual_s, self._first_pull_s)
            return now - self._since[engine.id] >= doubled_s(self._times + 1, limit_s, max(limit_s, _MAX_S))

        if not any(map(over, behind)):
            return False
        self._times += 1
        self._since = dict.fromkeys(self._since, now)
        return True


class PoolSync:
    """The pool as the loop sees it. Used by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, waits: Waits, publish_again: Callable[[int], None], *,
                 first_pull_s: float) -> None:
        """``publish_again``: called with a version that engines cannot get. ``first_pull_s``: see ``Republish``; also
        how long engines that serve the version wait for others that do not get so far."""
        self.etcd, self.keys, self.waits = etcd, keys, waits
        self.publish_again, self.first_pull_s = publish_again, first_pull_s
        self.engines: list[Engine] = []
        """The pool's engines, as they were at the last wait."""

    def no_engine(self) -> str:
        """Which engines are missing, while none serves; "" also without etcd."""
        try:
            return missing(self.etcd, self.keys)
        except EtcdUnavailable:
            return ""

    def wait(self, version: int) -> None:
        """Waits until every routable engine serves ``version`` or a newer one. Raises Fenced, and what
        ``publish_again`` raises."""
        with contextlib.closing(self.begin(version)) as wait:
            while not wait.poll():
                self.waits.pause(_PAUSE_S)

    def begin(self, version: int, enough: Enough = in_sync) -> VersionWait:
        """A wait that the caller polls."""
        return VersionWait(self, version, enough)


class VersionWait:
    """A wait until every routable engine serves a version or a newer one. The pool is watched until it is closed only,
    since thousands of engines change their records at all times."""

    def __init__(self, sync: PoolSync, version: int, enough: Enough) -> None:
        self._sync, self._version, self._enough = sync, version, enough
        self._republish, self._timeout_s = Republish(sync.first_pull_s), 0.0
        self._served_since: float | None = None
        """Monotonic time since which every engine that takes requests serves the version, while others still lack it;
        None before."""
        self._pool = PoolWatch(sync.etcd, sync.keys)

    def poll(self) -> bool:
        """Whether they do; if not, says what is waited for. Raises Fenced, and what ``publish_again`` raises."""
        sync = self._sync
        sync.engines = sync.waits.retry("etcd", partial(self._pool.engines, self._timeout_s))
        now = time.monotonic()
        if self._enough(sync.engines, self._version) or self._others_take_too_long(now):
            sync.waits.works()
            return True
        if self._republish.is_due(now, behind(sync.engines, self._version)):
            sync.publish_again(self._version)
        sync.waits.waits("engines", describe(sync.engines, self._version))
        self._timeout_s = _LOOK_S
        return False

    def _others_take_too_long(self, now: float) -> bool:
        """One that hangs in an update, or that no router takes, must not hold up the run: no request reaches it before
        it serves the head."""
        if not serves(self._sync.engines, self._version):
            self._served_since = None
            return False
        self._served_since = now if self._served_since is None else self._served_since
        if now - self._served_since < self._sync.first_pull_s:
            return False
        log.warning("no longer waiting for %s", describe(self._sync.engines, self._version))
        return True

    def close(self) -> None:
        self._pool.close()
