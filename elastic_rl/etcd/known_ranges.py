"""Ranges of keys that are read together again and again, of which etcd sends only what has changed.

A reading is one transaction, however many ranges there are, and as good as one that reads all: linearizable, and as of
one revision. etcd is asked for the keys of each range that were put since the last reading, and says with them how many
keys the range has. What is known together with what was put has every key that there is. So it has no other one if the
number is the same; otherwise a key was deleted, and the whole range is read, as of the same revision.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_rl.errors import Compacted, EtcdUnavailable
from elastic_rl.etcd.client import Changed, EtcdClient
from elastic_rl.etcd.transaction import KeyValue

_MAX_CHANGED = 5000
"""A range with more changes than these is read whole, in pages."""
_WHOLE_EVERY_S = 30.0
"""All is read so often all the same: an etcd that was restored from a backup counts revisions once more."""
_MAX_READS = 5
"""Readings that compactions may overtake, one after the other."""


class KnownRanges:
    """Ranges, and single keys, as they were read last. One thread uses it."""

    def __init__(self, etcd: EtcdClient, prefixes: Sequence[str], keys: Sequence[str] = (), *,
                 clock: Callable[[], float] = time.monotonic) -> None:
        """``keys``: keys that lie in none of the ranges; they are sent each time."""
        self._etcd, self._prefixes, self._keys, self._clock = etcd, prefixes, keys, clock
        self._whole_at = float("-inf")
        self.revision = 0
        """Revision of etcd at the last reading."""
        self.ranges: dict[str, Mapping[str, KeyValue]] = {prefix: {} for prefix in prefixes}
        """The keys of each prefix as they were then, in key order; the same object as long as nothing has changed."""
        self.keys: dict[str, KeyValue] = {}
        """The single keys that there were, by key."""

    def read(self) -> None:
        """Raises EtcdUnavailable, also when compactions overtook every try; then all is as before."""
        for attempt in itertools.count(1):
            try:
                self._read()
                break
            except Compacted as e:
                if attempt == _MAX_READS:
                    raise EtcdUnavailable(f"each of {attempt} readings was overtaken by a compaction: {e}") from e

    def _read(self) -> None:
        at = self._clock()
        whole = at - self._whole_at >= _WHOLE_EVERY_S
        found = self._etcd.changed(self._prefixes, self._keys, since=self.revision, limit=1 if whole else _MAX_CHANGED)
        whole = whole or found.revision < self.revision
        ranges = {prefix: self._updated(prefix, changed, found.revision, whole=whole)
                  for prefix, changed in zip(self._prefixes, found.ranges, strict=True)}
        self.ranges, self.keys, self.revision = ranges, {kv.key: kv for kv in found.kvs}, found.revision
        if whole:
            self._whole_at = at

    def _updated(self, prefix: str, changed: Changed, revision: int, *, whole: bool) -> Mapping[str, KeyValue]:
        """A range as of ``revision``."""
        before = self.ranges[prefix]
        if not whole and not changed.more:
            known = before if not changed.kvs else {**before, **{kv.key: kv for kv in changed.kvs}}
            if len(known) == changed.total:
                return known if len(known) == len(before) else dict(sorted(known.items()))
        known = {kv.key: kv for kv in self._etcd.range(prefix, revision=revision)[0]}
        return known if known != before else before

    def forget(self) -> None:
        """Has the next reading read all."""
        self._whole_at = float("-inf")
