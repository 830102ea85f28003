"""Ends the trace of a version: the first sample that its weights made."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from elastic_rl.config import Stream
from elastic_rl.dcs import catalog
from elastic_rl.engine.client import Sample
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.telemetry import traces

log = logging.getLogger(__name__)


class FirstSampleTrace:
    """Of one process that asks for samples; several of them each tell what came to them first."""

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd, self._keys = etcd, keys
        self._newest = 0

    def fresh(self, samples: Iterable[Sample]) -> int:
        """The version that these samples are the first of; 0 when there is none, or nobody wants to know."""
        if not traces.enabled():
            return 0
        newest = max((v for s in samples for v in (s.version, *s.versions)), default=0)
        if newest <= self._newest:
            return 0
        self._newest = newest
        return newest

    def tell(self, version: int, asked_at: float, answered_at: float) -> None:
        """Adds the span ``rollout.first_token`` to the version's trace: from asking for the sample to having it (unix
        seconds). Reads etcd; without it nothing is told."""
        try:
            found = catalog.get_version(self._etcd, self._keys, Stream.POLICY, version)
        except EtcdUnavailable as e:
            log.warning("the first token of version %d goes untold: %s", version, e)
            return
        if found is not None:
            traces.record("rollout.first_token", asked_at, answered_at, version=version,
                          parent=traces.extract(found.meta.get("trace", {})))
