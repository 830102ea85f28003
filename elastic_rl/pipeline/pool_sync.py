"""Waiting for the engines to serve a version."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine
from elastic_rl.pipeline.republish import Republish
from elastic_rl.pipeline.rollout_pool import PoolWatch, behind, describe, in_sync, missing
from elastic_rl.pipeline.waits import Waits

_LOOK_S, _PAUSE_S = 0.25, 0.01
"""Longest and shortest pause between two looks at the pool: while nothing changes there, and while much does."""


class PoolSync:
    """The pool as the loop sees it. Used by one thread."""

    def __init__(self, etcd: EtcdClient, keys: Keys, waits: Waits, publish_again: Callable[[int], None], *,
                 first_pull_s: float) -> None:
        """``publish_again``: called with a version that engines cannot get. ``first_pull_s``: see ``Republish``."""
        self._etcd, self._keys, self._waits = etcd, keys, waits
        self._publish_again, self._first_pull_s = publish_again, first_pull_s
        self.engines: list[Engine] = []
        """As of the last wait."""

    def no_engine(self) -> str:
        """Which engines are missing, while none serves; "" also without etcd."""
        try:
            return missing(self._etcd, self._keys)
        except EtcdUnavailable:
            return ""

    def wait(self, version: int) -> None:
        """Waits until every routable engine serves ``version`` or a newer one. Raises Fenced, and what
        ``publish_again`` raises."""
        republish, look_s = Republish(self._first_pull_s), 0.0
        # Watched for as long as the wait only: thousands of engines change their records at all times.
        with PoolWatch(self._etcd, self._keys) as pool:
            while True:
                self.engines = self._waits.retry("etcd", partial(pool.engines, look_s))
                if in_sync(self.engines, version):
                    self._waits.works()
                    return
                if republish.is_due(time.monotonic(), behind(self.engines, version)):
                    self._publish_again(version)
                self._waits.waits("engines", describe(self.engines, version))
                self._waits.pause(_PAUSE_S)
                look_s = _LOOK_S
