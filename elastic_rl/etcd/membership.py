"""Members: processes that do work and say so from the inside, under a lease, with their progress.

Whoever reads them can tell a dead process (the key is gone) from one that hangs (it beats, and ``progress_at`` stands
still): see ``progress``.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Self

from elastic_rl.errors import ElasticRLError, EtcdUnavailable, LeaseLost
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.records import Member
from elastic_rl.etcd.transaction import Compare, Op

log = logging.getLogger(__name__)
_SOONEST_S = 0.1
"""Shortest pause between two writes, however fast the progress."""
_JOIN_S = 2.0


class Membership:
    """This process's entry among the members, kept by a thread of the process until ``close``.

    A process that starts under the same role and id replaces the entry; the older one then sees ``replaced`` and beats
    no more.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, role: str, member_id: str, *, ttl_s: int, url: str = "",
                 epoch: int = 0, info: dict[str, Any] | None = None) -> None:
        self._etcd, self._keys, self._ttl_s = etcd, keys, ttl_s
        self._key = keys.member(role, member_id)
        now = time.time()
        self._member = Member(role=role, id=member_id, pid=os.getpid(), host=socket.gethostname(), epoch=epoch,
                              incarnation=secrets.token_hex(8), url=url, progress_at=now, beat_at=now,
                              info=dict(info or {}))
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._done = threading.Event()
        self.replaced = threading.Event()
        self._lease: KeptLease | None = None
        self._written_at = 0  # revision of our last write
        self._thread = threading.Thread(target=self._beat_on, name=f"member-{role}-{member_id}", daemon=True)

    @property
    def incarnation(self) -> str:
        """Random name of this process's stay."""
        return self._member.incarnation

    def start(self) -> Self:
        """Registers, and keeps the entry fresh from then on. Raises EtcdUnavailable."""
        try:
            self._register()
        except ElasticRLError:
            if self._lease is not None:
                self._lease.close()  # nobody will close us, and its thread would keep it alive
            raise
        self._thread.start()
        return self

    def progress(self, step: int, phase: str, **info: Any) -> None:
        """A sign of life of the thread that works, and how far it is; ``info`` (JSON-able) is merged into the entry's.
        Never waits for etcd; a sign that changes nothing else goes with the next beat."""
        with self._lock:
            now = self._member
            new = now.replace(step=step, phase=phase, info={**now.info, **info})
            moved = new != now
            self._member = new.replace(progress_at=time.time())
        if moved:
            self._news.set()

    def close(self) -> None:
        """Leaves cleanly: the entry, and the leader's memory of it, go at once. Without etcd it runs out by itself."""
        if self._done.is_set():
            return
        self._done.set()
        self._news.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)
        if self._lease is None:
            return
        try:
            if not self.replaced.is_set():
                roster = self._keys.registry_entry(self._member.role, self._member.id)
                self._etcd.txn([Compare.mod(self._key, "==", self._written_at)],
                                [Op.delete(self._key), Op.delete(roster)])
        except EtcdUnavailable as e:
            log.warning("member %s cannot sign off: %s", self._key, e)
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat_on(self) -> None:
        beaten_at = time.monotonic()
        while not self._done.is_set() and not self.replaced.is_set():
            moved = self._news.wait(self._ttl_s / 3)
            self._news.clear()
            if self._done.is_set():
                return
            alive = self._lease is not None and self._lease.alive
            if alive and not moved and time.monotonic() - beaten_at < self._ttl_s:
                continue  # the lease has its own thread; a beat without news is a write to etcd, and may be rarer
            try:
                if alive:
                    self._beat()
                else:
                    self._register()
                beaten_at = time.monotonic()
            except LeaseLost:
                if self._lease is not None:
                    self._lease.lost.set()
                self._news.set()
            except ElasticRLError as e:  # it may pass, and a member that beats no more counts as dead
                log.warning("member %s cannot beat: %s", self._key, e)
            self._done.wait(_SOONEST_S)

    def _register(self) -> None:
        """A new lease and an entry that replaces whatever is there, except a younger process's."""
        if self._written_at and self._displaced():
            return
        old, lease = self._lease, self._etcd.keepalive(self._ttl_s)
        try:
            self._written_at = self._etcd.put(self._key, self._now().encode(), lease=lease.id)
        except ElasticRLError:
            lease.close()  # the entry of before is better than none
            raise
        self._lease = lease
        if old is not None:
            old.close()

    def _beat(self) -> None:
        assert self._lease is not None
        outcome = self._etcd.txn([Compare.mod(self._key, "==", self._written_at)],
                                  [Op.put(self._key, self._now().encode(), self._lease.id)])
        if outcome.succeeded:
            self._written_at = outcome.revision
        elif not self._displaced():
            self._register()

    def _displaced(self) -> bool:
        """Whether another process has taken our name since we registered."""
        there = self._etcd.get(self._key)
        if there is not None and Member.decode(there.value).incarnation != self.incarnation:
            log.warning("member %s was replaced by another process", self._key)
            self.replaced.set()
        return self.replaced.is_set()

    def _now(self) -> Member:
        with self._lock:
            self._member = self._member.replace(beat_at=time.time())
            return self._member


def sign_off(etcd: EtcdClient, keys: Keys, ended: Iterable[Member]) -> None:
    """Takes members off whose processes the caller has ended on purpose, so that nobody takes it for a death."""
    for member in ended:
        key = keys.member(member.role, member.id)
        found = etcd.get(key)
        if found is not None and Member.decode(found.value).incarnation == member.incarnation:
            etcd.txn([Compare.mod(key, "==", found.mod_revision)],
                      [Op.delete(key), Op.delete(keys.registry_entry(member.role, member.id))])


def members(etcd: EtcdClient, keys: Keys, role: str = "") -> list[Member]:
    """The members that are alive, of one role or of all."""
    return [Member.decode(kv.value) for kv in etcd.range(keys.members_prefix(role))[0]]
