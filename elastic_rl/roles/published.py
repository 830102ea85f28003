"""Whether samples are of weights that this job has published: what generated any others is no engine of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from elastic_rl.config import Stream
from elastic_rl.data.samples import Sample
from elastic_rl.dcs.catalog import reads
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Severity

log = logging.getLogger(__name__)

_REPORT_S = 30.0
"""An event at most so often; the alert of it lasts longer."""


class PublishedVersions:
    """Versions of the policy up to the head of their stream, which never goes back. For one event loop."""

    def __init__(self, etcd: EtcdClient, keys: Keys, epoch: int) -> None:
        self._etcd, self._keys, self._epoch = etcd, keys, epoch
        self._newest = 0
        """The newest one that etcd was seen to have."""
        self._reading = asyncio.Lock()
        self._reported_at = float("-inf")

    async def beyond(self, samples: Iterable[Sample]) -> int:
        """The newest version of the samples if none so new was published; else 0. Engines may serve a version from the
        moment on at which it is committed, so etcd is asked about each that was not known yet. Raises EtcdUnavailable.
        """
        version = max((segment.version for sample in samples for segment in sample.segments), default=0)
        if version <= self._newest:
            return 0
        async with self._reading:
            if version > self._newest:
                self._newest = max(self._newest, await asyncio.to_thread(self._head))
        if version <= self._newest:
            return 0
        if (now := time.monotonic()) - self._reported_at >= _REPORT_S:
            self._reported_at = now
            await asyncio.to_thread(self._report, version, self._newest)
        return version

    def _head(self) -> int:
        found = reads.head(self._etcd, self._keys, Stream.POLICY)
        return found.number if found is not None else 0

    def _report(self, version: int, newest: int) -> None:
        text = f"samples of policy version {version} are refused: the newest one that was published is {newest}"
        log.warning("%s", text)
        try:
            fencing.emit(self._etcd, self._keys, self._epoch, event_kinds.SAMPLES_UNPUBLISHED, "rollout", text,
                         severity=Severity.WARNING, version=version)
        except ElasticRLError as e:  # the samples are refused all the same
            log.warning("that cannot be reported: %s", e)
