"""Members: processes that do work and report it from the inside, under a lease, with their progress.

A reader can tell one that hangs (heartbeats arrive, but ``progress_at`` stays the same) from one that sends nothing.
Silence alone does not mean that the process is dead: Python code that holds the GIL for seconds, or a machine with too
few cores, silences healthy ones. So the lease lasts for several heartbeats, and the end of a process is found by the
witnesses of its machine (``witness``), which end the entry long before its lease does.

Where the agent of the host collects heartbeats (``heartbeat_folder``), a process writes its record when it registers
and when its ``info`` changes, and leaves its heartbeats in a file. Its lease, its entry and its end are its own all the
same. Readers find the newest heartbeat with ``members``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, Self

from elastic_rl.errors import ElasticRLError, EtcdUnavailable, LeaseLost
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.heartbeat_folder import HeartbeatFile, HeartbeatFolder
from elastic_rl.etcd.heartbeats import heartbeat_of, with_heartbeats
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.process_state import machine_id, start_ticks
from elastic_rl.etcd.records import Member, MemberProcess, StatedWork
from elastic_rl.etcd.transaction import Compare, Op
from elastic_rl.etcd.write_schedule import WriteSchedule
from elastic_rl.runtime.clock import boottime_s
from elastic_rl.runtime.files import os_error_text

log = logging.getLogger(__name__)
_MIN_WRITE_INTERVAL_S = 0.1
"""Shortest pause between two writes to etcd, however fast the progress."""
_FILE_PAUSE_S, _FILE_INTERVAL_S = 0.5, 1.0
"""Shortest and longest pause between two writes of the file while the agent collects it, which it does every few
seconds."""
LEASE_HEARTBEATS = 3
"""The lease of a member lasts for this many intervals of its heartbeats."""
_JOIN_TIMEOUT_S = 2.0
_DEREGISTER_TRIES = 4
_CLOCK_STEP_S = 1.0
"""Disagreement of the wall clock with the monotonic one from which on the wall clock was set."""


class Membership:
    """This process's entry among the members, kept by a thread of the process until ``close``.

    A process that starts under the same role and id replaces the entry, so that a restarted one is listed at once. The
    older one then sees ``replaced`` and stops its heartbeats. If it still runs when the other's entry has been gone for
    ``ttl_s``, it registers again: the other was a failed start under this name, and this process does the work.

    ``ttl_s``: a heartbeat is sent at least so often, in seconds. The lease lasts ``LEASE_HEARTBEATS`` times as long.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, role: str, member_id: str, *, ttl_s: int, url: str = "",
                 epoch: int = 0, info: dict[str, Any] | None = None, heartbeats: HeartbeatFolder | None = None) -> None:
        """``heartbeats``: the folder from which the agent of this host collects heartbeats; None: nobody does."""
        self._etcd, self._keys, self._ttl_s = etcd, keys, ttl_s
        self._key = keys.member(role, member_id)
        self._started = start_ticks(os.getpid())
        now = time.time()
        self._member = Member(role=role, id=member_id, pid=os.getpid(), host=socket.gethostname(), epoch=epoch,
                              incarnation=secrets.token_hex(8), url=url, progress_at=now, beat_at=now,
                              info=dict(info or {}), machine=machine_id(),
                              collector=heartbeats.host if heartbeats is not None else "")
        self._progressed = time.monotonic()
        self._folder, self._folder_problem = heartbeats, ""
        self._written_info: dict[str, Any] | None = None
        """What etcd has of the process beside its heartbeats; None: nothing."""
        self._lock = threading.Lock()
        self._changed, self._info_changed = threading.Event(), threading.Event()
        """Set by any news, and by those of ``info`` and at the end."""
        self._stopping = threading.Event()
        self.replaced = threading.Event()
        self._lease: KeptLease | None = None
        self._revision = 0  # of our last write
        self._absent_since: float | None = None  # monotonic; of the entry of the process that replaced this one
        self._thread = threading.Thread(target=self._run, name=f"member-{role}-{member_id}", daemon=True)

    @property
    def incarnation(self) -> str:
        """Random name of this process as a member; another one after a restart."""
        return self._member.incarnation

    @property
    def lease(self) -> int:
        """The lease of the entry, for what is to end with it; another one after a long outage of etcd."""
        return self._lease.id if self._lease is not None else 0

    def start(self) -> Self:
        """Registers, and keeps the entry fresh from then on. Raises EtcdUnavailable."""
        try:
            self._register()
        except ElasticRLError:
            if self._lease is not None:
                self._lease.close()  # the caller has no object to close, and the lease's thread would keep it alive
            raise
        self._thread.start()
        return self

    def progress(self, step: int, phase: str, *, work: StatedWork | None = None, in_flight: int | None = None,
                 **info: Any) -> None:
        """Reports that the working thread makes progress, and how far it is; ``info`` (JSON-able) is merged into the
        entry's. Never waits for etcd. A change of ``info``, which should be rare, is written at once. Others see one of
        all else as late as the agent of the host collects heartbeats, if it does; where nothing changes, the next
        heartbeat has it. ``work``: the cost of what begins now, which the next heartbeat has, too."""
        with self._lock:
            now = self._member
            new = now.replace(step=step, phase=phase, in_flight=in_flight, info={**now.info, **info})
            changed, info_changed = new != now, new.info != now.info
            self._member = new.replace(progress_at=time.time(), work=work)
            self._progressed = time.monotonic()
        if changed:
            self._changed.set()
        if info_changed:
            self._info_changed.set()

    def close(self) -> None:
        """Deregisters: the entry, and the leader's record of it, are deleted at once. Without etcd the entry
        expires."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._changed.set()
        self._info_changed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)
        self._deregister()
        self._remove_file()

    def _deregister(self) -> None:
        if self._lease is None:
            return
        try:
            if not self.replaced.is_set():
                entry = self._keys.registry_entry(self._member.role, self._member.id)
                self._etcd.txn([Compare.mod(self._key, "==", self._revision)],
                               [Op.delete(self._key), Op.delete(entry)])
        except EtcdUnavailable as e:
            log.warning("member %s cannot deregister: %s", self._key, e)
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        schedule = WriteSchedule(self._ttl_s, time.monotonic())
        while not self._stopping.is_set():
            # One that was replaced has nobody to report to.
            changed = (self._stopping if self.replaced.is_set() else self._changed).wait(
                min(self._ttl_s / 3, _FILE_INTERVAL_S) if self._folder is not None else self._ttl_s / 3)
            self._changed.clear()
            self._info_changed.clear()
            if self._stopping.is_set():
                return
            alive = self._lease is not None and self._lease.alive
            if alive and not self.replaced.is_set():
                collected = self._leave_heartbeat()
                # The lease has its own thread; a heartbeat without news is a write to etcd and can be rarer.
                if not schedule.due(time.monotonic(), changed=changed, collected=collected, random=random.random(),
                                    info_changed=self._member.info != self._written_info):
                    if collected:
                        self._info_changed.wait(_FILE_PAUSE_S)
                    else:
                        self._stopping.wait(_MIN_WRITE_INTERVAL_S)
                    continue
            try:
                if self.replaced.is_set():
                    self._stand_by()
                elif alive:
                    self._heartbeat()
                else:
                    self._register()
                schedule.written(time.monotonic())
            except LeaseLost:
                if self._lease is not None:
                    self._lease.lost.set()
                self._changed.set()
            except ElasticRLError as e:  # it may be temporary, and a member without heartbeats counts as dead
                log.warning("heartbeat of member %s failed: %s", self._key, e)
            self._stopping.wait(_MIN_WRITE_INTERVAL_S)

    def _leave_heartbeat(self) -> bool:
        """Leaves a heartbeat for the agent of this host. Returns whether it has collected those before."""
        if self._folder is None or not self._started or not self._member.machine:
            return False
        m = self._now()
        try:
            left = self._folder.write(HeartbeatFile(
                beat=heartbeat_of(m), pid=m.pid, started=self._started, machine=m.machine,
                lease_s=LEASE_HEARTBEATS * self._ttl_s, written_s=boottime_s()))
        except OSError as e:  # such as that of a full /dev/shm
            if self._folder_problem != (problem := os_error_text(e, self._folder.path)):
                log.warning("member %s writes its heartbeats to etcd itself: %s", self._key, problem)
            self._folder_problem = problem
            return False
        self._folder_problem = ""
        return left and self._folder.is_collected(m.incarnation)

    def _remove_file(self) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):  # the agent does it once this process has ended
                self._folder.remove(self.incarnation)

    def _register(self) -> None:
        """A new lease and an entry that replaces whatever is there, except a younger process's."""
        if self._revision and self._was_replaced():
            return
        old, lease = self._lease, self._etcd.keepalive(LEASE_HEARTBEATS * self._ttl_s)
        m = self._now()
        try:
            self._revision = self._etcd.txn([], self._registration(m, lease)).revision
        except ElasticRLError:
            lease.close()  # the old entry is better than none
            raise
        self._lease, self._written_info = lease, m.info
        if old is not None:
            old.close()

    def _registration(self, m: Member, lease: KeptLease) -> list[Op]:
        """The entry, the process for its witnesses, and the end of whatever they said about an earlier one."""
        ops = [Op.put(self._key, m.encode(), lease.id), Op.delete(self._keys.evidence(m.role, m.id))]
        if m.machine and self._started:
            process = MemberProcess(role=m.role, id=m.id, incarnation=m.incarnation, pid=m.pid, started=self._started)
            ops.append(Op.put(self._keys.process(m.machine, m.role, m.id), process.encode(), lease.id))
        return ops

    def _heartbeat(self) -> None:
        assert self._lease is not None
        m = self._now()
        outcome = self._etcd.txn([Compare.mod(self._key, "==", self._revision)],
                                 [Op.put(self._key, m.encode(), self._lease.id)])
        if outcome.succeeded:
            self._revision, self._written_info = outcome.revision, m.info
        elif not self._was_replaced():
            self._register()

    def _stand_by(self) -> None:
        """Registers again once no process has had our name for ``ttl_s``, in which one that restarts may return."""
        if self._etcd.get(self._key) is not None:
            self._absent_since = None
            return
        now = time.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        if now - self._absent_since < self._ttl_s:
            return
        old, lease = self._lease, self._etcd.keepalive(LEASE_HEARTBEATS * self._ttl_s)
        m = self._now()
        try:
            outcome = self._etcd.txn([Compare.absent(self._key)], self._registration(m, lease))
        except ElasticRLError:
            lease.close()
            raise
        self._absent_since = None
        if not outcome.succeeded:
            lease.close()
            return
        self._lease, self._revision, self._written_info = lease, outcome.revision, m.info
        self.replaced.clear()
        log.warning("member %s is registered again: the process that replaced it is gone", self._key)
        if old is not None:
            old.close()

    def _was_replaced(self) -> bool:
        """Whether another process has taken our name since we registered."""
        found = self._etcd.get(self._key)
        entry = readable_one(found, Member)
        if entry is not None and entry.incarnation != self.incarnation:
            log.warning("member %s was replaced by another process", self._key)
            self.replaced.set()
            self._remove_file()
        return self.replaced.is_set()

    def _now(self) -> Member:
        with self._lock:
            now, stalled_s = time.time(), time.monotonic() - self._progressed
            self._member = self._member.replace(
                beat_at=now, beats=self._member.beats + 1,
                progress_at=progress_time(self._member.progress_at, now, stalled_s))
            return self._member


def progress_time(progress_at: float, now: float, stalled_s: float) -> float:
    """When the last progress was, by the clock of ``now``. Readers compare the two times; after the clock was set they
    must see neither a hang nor progress.

    ``progress_at``: by the clock as it was then, unix seconds; ``stalled_s``: monotonic seconds since then.
    """
    return now - stalled_s if abs(now - progress_at - stalled_s) > _CLOCK_STEP_S else progress_at


def deregister(etcd: EtcdClient, keys: Keys, ended: Iterable[Member]) -> None:
    """Deregisters members whose processes the caller has ended on purpose, so that they do not count as dead."""
    for member in ended:
        key = keys.member(member.role, member.id)
        for _ in range(_DEREGISTER_TRIES):  # its last heartbeat may still arrive
            found = etcd.get(key)
            entry = readable_one(found, Member)
            if found is None or entry is None or entry.incarnation != member.incarnation:
                break
            if etcd.txn([Compare.mod(key, "==", found.mod_revision)],
                        [Op.delete(key), Op.delete(keys.registry_entry(member.role, member.id))]).succeeded:
                break


def members(etcd: EtcdClient, keys: Keys, role: str = "") -> list[Member]:
    """The members that are alive, of one role or of all, each with its newest heartbeat."""
    found = readable(etcd.range(keys.members_prefix(role))[0], Member)
    return with_heartbeats(etcd, keys, (member for member, _ in found))
