"""Completes the trace of a version: the first sample that its weights generated."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from elastic_rl.config import Stream
from elastic_rl.data.samples import Sample
from elastic_rl.dcs.catalog import reads
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.telemetry import traces

log = logging.getLogger(__name__)


class FirstSampleTrace:
    """The trace of the first sample of one process that requests samples; each of several such processes records its
    own first sample."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._newest = 0

    def first_of(self, samples: Iterable[Sample]) -> int:
        """The version of which these samples are the first; 0 when there is none, or tracing is off."""
        if not traces.enabled():
            return 0
        newest = max((v for s in samples for v in s.versions), default=0)
        if newest <= self._newest:
            return 0
        self._newest = newest
        return newest

    def record(self, version: int, requested_at: float, answered_at: float) -> None:
        """Adds the span ``rollout.first_token`` to the version's trace: from the request to the sample (unix seconds).
        Reads etcd; without etcd the span is dropped."""
        try:
            found = reads.get_version(self._etcd, self._keys, Stream.POLICY, version)
        except EtcdUnavailable as e:
            log.warning("dropping the span rollout.first_token of version %d: %s", version, e)
            return
        if found is not None:
            traces.record("rollout.first_token", requested_at, answered_at, version=version,
                          parent=traces.extract(found.meta.get("trace", {})))
