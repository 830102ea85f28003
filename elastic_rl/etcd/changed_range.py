"""A range of keys that is read when one of them has changed, and now and then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient, KeyValue, Watch
from elastic_rl.runtime.clock import boottime_s

log = logging.getLogger(__name__)


class RangeReading(NamedTuple):
    kvs: Sequence[KeyValue]
    revision: int
    """Revision of etcd that it is as of."""
    asked_at: float
    """When it was requested, seconds of ``boottime_s``."""


class ChangedRange:
    """Reads all keys of a prefix, again and again, for one thread. A watch says when; it may fail without harm."""

    def __init__(self, etcd: EtcdClient, prefix: str, *, every_s: float, turn_s: float) -> None:
        """``every_s``: the keys are read so often though none has changed. ``turn_s``: longest wait of ``read`` for a
        change."""
        self._etcd, self._prefix, self._every_s, self._turn_s = etcd, prefix, every_s, turn_s
        self._watch: Watch | None = None
        self._read_at = float("-inf")

    def read(self) -> RangeReading | None:
        """The keys as they are, once one has changed or it is time to read them; None soon after, if not. Raises
        EtcdUnavailable; the next call then reads them."""
        if (self._watch is not None and boottime_s() - self._read_at < self._every_s
                and not self._changed(self._watch)):
            return None
        asked, self._read_at = boottime_s(), float("-inf")
        kvs, revision = self._etcd.range(self._prefix)
        if self._watch is None:
            self._watch = self._etcd.watch(self._prefix, start_revision=revision + 1)
        self._read_at = asked
        return RangeReading(kvs, revision, asked)

    def _changed(self, watch: Watch) -> bool:
        """Waits for a change, for ``turn_s`` at most."""
        try:
            changed = watch.get(self._turn_s) is not None
            while changed and watch.get(0.0) is not None:
                pass
            return changed
        except ElasticRLError as e:  # mostly Compacted: it was interrupted, and a compaction overtook it meanwhile
            log.info("the watch of %s is opened again: %s", self._prefix, e)
            self.close()
            return True

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
