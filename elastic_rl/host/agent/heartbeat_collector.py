"""Collects the heartbeats of this host's members: one write to etcd a job and period, and one read, instead of a write
a member.

It reads the files that the processes replace (``etcd.heartbeat_folder``), writes what has changed under the key of this
host, and then marks in the folder whose heartbeats etcd has. The members' own leases, entries and ends are none of its
business. It does look in the same transaction at whether their entries are there: a member whose entry was ended or
replaced is not marked, writes for itself, and thereby finds out.

The key has a lease of its own, which is longer than the time in which a member notices that it is not collected any
more: with the agent, its heartbeats must not be gone before the members write newer ones.
"""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elastic_rl.config import JOB_NAME
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ElasticRLError, LeaseLost
from elastic_rl.etcd import process_state
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import decode_bytes, readable_one
from elastic_rl.etcd.heartbeat_folder import HeartbeatFolder
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.records import HostHeartbeats, Record
from elastic_rl.etcd.transaction import MAX_OPS, Compare, Op, batches
from elastic_rl.host.agent.heartbeat_collection import FoundFile, collect
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.runtime.clock import boottime_s
from elastic_rl.runtime.files import private_folder

log = logging.getLogger(__name__)

_MARK_PERIODS = 3
"""A mark holds for so many periods: a few rounds may be late."""
_LEASE_PERIODS = 10
"""The lease lasts for so many. When the agent ends, at least two thirds of it are left, and a mark; see above."""
_JOIN_S = 5.0


class _Entry(Record):
    """The part of a member's record that says whose it is."""

    incarnation: str = ""
    collector: str = ""
    """Where readers look for its heartbeats."""


@dataclass
class _Job:
    """What etcd has of a job's heartbeats on this host."""

    written: HostHeartbeats | None
    revision: int
    """The highest revision of etcd that was seen."""
    lease: int
    """Lease that they were written under; 0: not by this process."""


class HeartbeatCollector:
    """Collects from ``start`` until ``close``, in a thread of its own."""

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys, host: str, folder: Path, registration: Callable[[], int],
                 *, period_s: float) -> None:
        """``etcd``: a client for this object, which closes it. ``folder``: the folder with those of the jobs, which
        this makes. ``registration``: revision of this host's registration, 0 while it has none: another machine may
        have its name, and then writes its key."""
        self._etcd, self._keys, self._host, self._folder = etcd, keys, host, folder
        self._registration, self._period_s = registration, period_s
        self._lease: KeptLease | None = None
        self._jobs: dict[str, _Job] = {}
        self._said: dict[str, str] = {}
        """The last problem of each job, and of each file, so that it is logged once."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat-collector", daemon=True)

    @classmethod
    def of_cluster(cls, cluster: Cluster, info: ClusterInfo, registration: Callable[[], int]) -> Self:
        """The collector of this host of a cluster; ``registration`` as above. Raises ConfigError."""
        cfg = cluster.cfg
        return cls(cluster.etcd(info), ClusterKeys(cfg.cluster_name), cluster.host.name, cluster.paths.heartbeats,
                   registration, period_s=cfg.coordinator.lease_ttl_s)

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread. What is in etcd stays for a while: the next agent goes on with it, or the members do."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if self._lease is not None:
            self._lease.stop()
        self._etcd.close()

    def _run(self) -> None:
        pause_s = random.uniform(0.0, self._period_s)  # the agents of a cluster are often started at the same time
        while not self._stopping.wait(pause_s):
            pause_s = self._period_s
            if (registration := self._registration()) == 0:
                continue
            try:
                private_folder(self._folder)
                with_folder = {p.name for p in self._folder.iterdir() if re.fullmatch(JOB_NAME, p.name) and p.is_dir()}
            except (ElasticRLError, OSError) as e:
                self._say("", f"the heartbeats of this host cannot be collected: {e}")
                continue
            self._say("", "")
            for job in sorted(with_folder | self._jobs.keys()):
                try:
                    self._collect(job, registration)
                    self._say(job, "")
                except LeaseLost as e:
                    if self._lease is not None:
                        self._lease.lost.set()
                    self._say(job, f"the heartbeats of job {job} are not collected: {e}")
                except Exception as e:  # the members then write for themselves
                    self._say(job, f"the heartbeats of job {job} are not collected: {type(e).__name__}: {e}")

    def _say(self, of: str, problem: str) -> None:
        if problem and self._said.get(of) != problem:
            log.warning("%s", problem)
        if problem:
            self._said[of] = problem
        else:
            self._said.pop(of, None)

    def _collect(self, job: str, registration: int) -> None:
        keys, folder = Keys(job), HeartbeatFolder(self._folder / job, self._host)
        state = self._jobs.get(job)
        if state is None:  # what an earlier agent has written
            found = self._etcd.txn([], [Op.get(keys.heartbeats(self._host))])
            state = self._jobs[job] = _Job(readable_one(found.get(keys.heartbeats(self._host)), HostHeartbeats),
                                           found.revision, lease=0)
        if (revision := self._etcd.revision()) < state.revision:  # etcd was restored: those that were noted are none
            state.written = None
        state.revision = revision
        read_s, contents = boottime_s(), folder.contents()
        self._report_unreadable(job, contents.unreadable)
        folder.delete_abandoned(contents)
        found_files = [FoundFile(f, process_state.look_at(f.pid, f.started).state) for f in contents.files]
        made = collect(self._host, state.written, found_files, revision, read_s, contents.unread)
        guard = Compare.mod(self._keys.host(self._host), "==", registration)
        if not made.record.beats:
            if state.written is None or self._etcd.txn([guard], [Op.delete(keys.heartbeats(self._host))]).succeeded:
                del self._jobs[job]
                _remove(folder, made.over)
                folder.discard()
            return
        lease = self._held_lease()
        if made.record != state.written or lease.id != state.lease:
            entries = self._write(keys, guard, made.record, made.collected, lease, state)
            if entries is not None:
                folder.mark(made.collected & entries, read_s + _MARK_PERIODS * self._period_s)
        _remove(folder, made.over)

    def _write(self, keys: Keys, guard: Compare, record: HostHeartbeats, collected: Collection[str], lease: KeptLease,
               state: _Job) -> set[str] | None:
        """Writes the heartbeats; returns the incarnations that etcd has registered, None if this agent may not write.
        """
        entries = [keys.member(b.role, b.id) for b in record.beats if b.incarnation in collected]
        first, *more = batches([Op.put(keys.heartbeats(self._host), record.encode(), lease.id),
                                *map(Op.get, entries)], MAX_OPS)
        outcome = self._etcd.txn([guard], first)
        if not outcome.succeeded:
            return None
        state.written, state.revision, state.lease = record, outcome.revision, lease.id
        found = [*outcome.kvs, *(kv for batch in more for kv in self._etcd.txn([], batch).kvs)]
        return {entry.incarnation for kv in found if (entry := decode_bytes(kv.value, _Entry)) is not None
                and entry.collector == self._host}

    def _held_lease(self) -> KeptLease:
        if self._lease is None or not self._lease.alive:
            old, self._lease = self._lease, self._etcd.keepalive(round(_LEASE_PERIODS * self._period_s))
            if old is not None:
                old.stop()  # it ends by itself: its keys may be under the new one by then
        return self._lease

    def _report_unreadable(self, job: str, unreadable: dict[str, str]) -> None:
        for name, why in unreadable.items():
            self._say(f"{job}/{name}", f"the heartbeats of a member of job {job} are not collected: {name}: {why}")
        for name in [of.removeprefix(f"{job}/") for of in self._said if of.startswith(f"{job}/")]:
            if name not in unreadable:
                self._say(f"{job}/{name}", "")


def _remove(folder: HeartbeatFolder, incarnations: Iterable[str]) -> None:
    for incarnation in incarnations:
        folder.remove(incarnation)
