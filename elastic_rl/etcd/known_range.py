"""A range of keys that is read again and again, of which etcd sends only what has changed.

Each reading is as good as one of the whole range: linearizable, and as of one revision. etcd is asked for the keys that
were put since the last reading, and says with them how many keys there are. What is known together with what was put
has every key that there is. So it has no other one if the number is the same; otherwise a key was deleted, and the
whole range is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.transaction import KeyValue

_MAX_CHANGED = 5000
"""With more changes than these the whole range is read, in pages."""
_WHOLE_EVERY_S = 30.0
"""The whole range is read so often all the same: an etcd that was restored from a backup counts revisions once more."""


class KnownRange:
    """One range, as it was read last. One thread uses it."""

    def __init__(self, etcd: EtcdClient, prefix: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._etcd, self._prefix, self._clock = etcd, prefix, clock
        self._known: dict[str, KeyValue] = {}
        self._whole_at = float("-inf")
        self.revision = 0
        """Revision of etcd at the last reading."""

    def read(self) -> Mapping[str, KeyValue]:
        """The keys as they are, in key order; the same object as long as nothing has changed. Raises EtcdUnavailable.
        """
        if self._clock() - self._whole_at >= _WHOLE_EVERY_S:
            return self._read_whole()
        found = self._etcd.changed(self._prefix, since=self.revision, limit=_MAX_CHANGED)
        if found.more or found.revision < self.revision:
            return self._read_whole()
        known = self._known if not found.kvs else self._known | {kv.key: kv for kv in found.kvs}
        if len(known) != found.total:
            return self._read_whole()
        if len(known) != len(self._known):
            known = dict(sorted(known.items()))
        self._known, self.revision = known, found.revision
        return known

    def forget(self) -> None:
        """Has the next reading read all."""
        self._whole_at = float("-inf")

    def _read_whole(self) -> Mapping[str, KeyValue]:
        at = self._clock()
        kvs, self.revision = self._etcd.range(self._prefix)
        known = {kv.key: kv for kv in kvs}
        if known != self._known:
            self._known = known
        self._whole_at = at
        return self._known
