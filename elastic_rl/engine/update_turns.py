"""How many engines of a pool pause at once to apply a version: each that serves takes one of a fixed number of slots
before it pauses, and frees it afterwards.

Nobody lists the slots or the engines: an engine that finds a slot taken tries another one, at random, a little later.
So a version costs each engine a few reads, however large its pool is, and no process has to be there to hand out turns.
An engine that ends loses its slot with its lease. Who waits keeps the version that it has staged, applies it when its
turn comes, and goes on to the newest one then: an engine that staged again for each version that comes meanwhile would
never apply one where versions come faster than turns.

A slot bounds how much of the pool is away; what an engine may serve does not depend on it. Where etcd has lost a lease
for a while one engine more may pause.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

from elastic_rl.config.pools import slots_of
from elastic_rl.errors import LeaseLost
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import PoolSpec, PoolStatus
from elastic_rl.etcd.transaction import Compare, Op
from elastic_rl.runtime.backoff import RetryBackoff

_RETRY_S = (0.05, 1.0)
"""First and longest pause after a slot that another engine has."""


class Slots(Protocol):
    """Where the slots are, for one engine."""

    def count(self) -> int:
        """Number of them."""

    def claim(self, slot: int) -> bool:
        """Whether the engine has the slot now: it was free, or the engine's already. Where this raises an error,
        the engine may have it."""

    def free(self, slot: int) -> None:
        """Frees it, if it is the engine's."""


class UpdateTurn:
    """One engine's turn. For one thread; times are monotonic seconds. Every call raises what its slots raise."""

    def __init__(self, slots: Slots, rng: random.Random | None = None) -> None:
        self._slots, self._rng = slots, rng or random.Random()
        self._retry = RetryBackoff(*_RETRY_S, self._rng)
        self._count = 0
        self._slot: int | None = None
        """The one that it has, or may have."""
        self._is_sure = False
        """Whether it is known to have it."""

    def begin(self) -> None:
        """A new wait."""
        self._count = self._slots.count()
        self._retry.reset()

    def take(self, now: float) -> bool:
        """Whether the engine may pause now. One attempt, if one is due."""
        if self._is_sure:
            return True
        if not self._retry.is_due(now):
            return False
        if self._slot is None:
            self._slot = self._rng.randrange(self._count)
        self._is_sure = self._slots.claim(self._slot)
        if not self._is_sure:
            self._slot = None
            self._retry.failed(now)
        return self._is_sure

    def release(self) -> None:
        """Others may pause. Where this raises an error the slot may still be taken: call it again."""
        self._is_sure = False  # first: where ``free`` raises an error the slot may be another engine's by now
        if self._slot is not None:
            self._slots.free(self._slot)
            self._slot = None


class PoolSlots:
    """The slots of a pool in etcd; a slot's key ends with the lease of the engine that has it."""

    def __init__(self, etcd: EtcdClient, keys: Keys, pool: str, limit: int | str, *, holder: str,
                 lease: Callable[[], int]) -> None:
        """``holder``: names the engine's process, and no other one. ``lease``: of its membership."""
        self._etcd, self._keys, self._pool, self._limit = etcd, keys, pool, limit
        self._holder, self._lease = holder.encode(), lease

    def count(self) -> int:
        """How many may update at once, by the engines that the pool is to have and the external ones. Raises
        EtcdUnavailable."""
        spec = readable_one(self._etcd.get(self._keys.pool_spec(self._pool)), PoolSpec)
        status = readable_one(self._etcd.get(self._keys.pool_status(self._pool)), PoolStatus)
        return slots_of(self._limit, (spec.desired if spec else 1) + (status.external if status else 0))

    def claim(self, slot: int) -> bool:
        """Raises EtcdUnavailable."""
        key = self._keys.update_slot(self._pool, slot)
        found = self._etcd.get(key)  # a read costs etcd less than a transaction that is refused
        if found is not None:
            return found.value == self._holder
        try:
            lease = self._lease()
            return bool(lease) and self._etcd.txn([Compare.absent(key)], [Op.put(key, self._holder, lease)]).succeeded
        except LeaseLost:  # the membership gets another one
            return False

    def free(self, slot: int) -> None:
        """Raises EtcdUnavailable."""
        key = self._keys.update_slot(self._pool, slot)
        self._etcd.txn([Compare.value(key, "==", self._holder)], [Op.delete(key)])
