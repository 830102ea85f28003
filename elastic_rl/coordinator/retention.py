"""Keeps what the leader stores for people within its limits: events, step metrics, idempotency records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api import idempotency
from elastic_rl.coordinator.failure.statistics import EventCursor
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.transaction import MAX_OPS, GuardedWrite, batches

_EVERY_S, _RETRY_S = 15.0, 1.0
_IDEMPOTENCY_EVERY_S = 600.0


class Retention:
    def __init__(self, etcd: EtcdClient, keys: Keys, cfg: CoordinatorConfig, guarded: GuardedWrite,
                 clock: Callable[[], float]) -> None:
        self._etcd, self._keys, self._cfg, self._guarded, self._clock = etcd, keys, cfg, guarded, clock
        self._next_at = self._next_idempotency_at = float("-inf")

    def trim(self) -> None:
        """Deletes what is beyond the limits, every now and then. Raises Fenced and EtcdUnavailable."""
        now = time.monotonic()
        if now >= self._next_at:
            trimmed = self._trim_events()
            self._downsample_steps()
            self._next_at = now + (_EVERY_S if trimmed else _RETRY_S)
        if now >= self._next_idempotency_at:
            idempotency.trim(self._etcd, self._keys, self._clock(), self._guarded)
            self._next_idempotency_at = now + _IDEMPOTENCY_EVERY_S

    def _trim_events(self) -> bool:
        """Whether no more than the limit are left, as far as events were read."""
        prefix = self._keys.events_prefix()
        cursor = readable_one(self._etcd.get(self._keys.event_cursor()), EventCursor)
        while (excess := self._etcd.count(prefix) - self._cfg.max_events) > 0:
            oldest, _ = self._etcd.range(prefix, limit=min(excess, MAX_OPS))  # the keys sort by time
            # An event that the leader has not read yet may be an alert.
            read = [kv.key for kv in oldest if cursor is not None and kv.mod_revision <= cursor.revision]
            if not read:
                return False
            self._guarded([], [Op.delete(key) for key in read])
        return True

    def _downsample_steps(self) -> None:
        prefix, limit = self._keys.steps_prefix(), self._cfg.max_step_metrics
        if self._etcd.count(prefix) <= limit:
            return
        names = [kv.key.removeprefix(prefix) for kv in self._etcd.range(prefix)[0]]
        steps = [int(name) for name in names if name.isdecimal()]
        for batch in batches([Op.delete(self._keys.step_metrics(n)) for n in steps_to_delete(steps, limit)]):
            self._guarded([], batch)


def steps_to_delete(steps: Sequence[int], limit: int) -> list[int]:
    """Steps whose points are to be deleted so that at most ``limit`` remain. ``steps``: those with a point, ascending.

    The newest half of ``limit`` and the first point remain. Of the older ones the multiples of a power of two remain,
    the smallest that suffices: a later call keeps a subset of what an earlier one kept, and the old points are evenly
    spaced however often it is called. Raises ValueError for a limit below 2.
    """
    if limit < 2:
        raise ValueError(f"limit must be at least 2, not {limit}")
    if len(steps) <= limit:
        return []
    newest = limit // 2
    old, room, stride = steps[1:-newest], limit - newest - 1, 2
    while sum(step % stride == 0 for step in old) > room:
        stride *= 2
    return [step for step in old if step % stride]
