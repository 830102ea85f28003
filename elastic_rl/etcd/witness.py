"""The witness: watches the members' processes on its machine, and ends the registration of one that cannot work.

A lease that was not renewed says little: the process may be dead, or it may have had no core, or some C code in it may
have held the GIL. Whether it exists, the kernel knows. So a process that has no such work, on the same machine, looks:
once a member's process is gone, or has been stopped, and nobody has deregistered the member within a moment (whoever
ends a process on purpose does), the witness deletes its entry and leaves ``Evidence``, by which the leader declares the
death. A process that is merely slow never gives evidence.

There may be several witnesses on a machine; whoever is first writes. One only speaks about processes that it has itself
seen alive, so machines that believe to be the same one (clones of one virtual machine) do no harm.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from elastic_rl.errors import ElasticRLError, LeaseLost
from elastic_rl.etcd import process_state
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.mirror import Mirror
from elastic_rl.etcd.process_state import ProcessState, Sighting
from elastic_rl.etcd.records import Evidence, MemberProcess, ProcessFinding, Record, Witness
from elastic_rl.etcd.transaction import Compare, Op

log = logging.getLogger(__name__)

LEASE_S = 9
"""Lease of the witness's own record, as long as a member's with the default settings: the witness starves last."""
_LOOK_EVERY_S = 0.5
_LIST_EVERY_S = 1.0
_JOIN_TIMEOUT_S = 2.0
_LOAD_CHANGE = 0.25
"""Relative change of the load that is worth a write."""

_STILL = {ProcessFinding.GONE: ProcessState.GONE, ProcessFinding.STOPPED: ProcessState.STOPPED}

Name = tuple[str, str]


class _Registered(Record):
    """What the entries of members, of DCS nodes and of the member registry have in common."""

    pid: int
    incarnation: str = ""
    dead_at: float = 0.0

    def is_of(self, process: MemberProcess) -> bool:
        return self.pid == process.pid and self.incarnation in ("", process.incarnation)


@dataclass(frozen=True)
class Watched:
    """A process, and what was seen of it. Times are monotonic seconds. Pure."""

    process: MemberProcess
    alive: bool = False
    """Whether it was ever seen alive."""
    gone_since: float | None = None
    stopped_since: float | None = None
    ran: int = 0
    """How often it had run at the last look."""

    def look(self, sighting: Sighting, now: float) -> Watched:
        """What is known of it after one more look."""
        match sighting.state:
            case ProcessState.UNKNOWN:
                return replace(self, gone_since=None, stopped_since=None)
            case ProcessState.GONE:
                return replace(self, gone_since=now if self.gone_since is None else self.gone_since)
            case ProcessState.STOPPED if self.stopped_since is not None and sighting.ran == self.ran:
                return self  # it has not run since the last look either
            case state:
                return replace(self, alive=True, gone_since=None, ran=sighting.ran,
                               stopped_since=now if state is ProcessState.STOPPED else None)

    def finding(self, now: float, *, gone_s: float, stopped_s: float) -> ProcessFinding | None:
        """What there is to say about it. ``gone_s``: how long whoever ended it has for deregistering it."""
        if not self.alive:
            return None
        if self.gone_since is not None:
            return ProcessFinding.GONE if now - self.gone_since >= gone_s else None
        if self.stopped_since is not None and now - self.stopped_since >= stopped_s:
            return ProcessFinding.STOPPED
        return None


class HostWitness:
    """Watches the members of this machine in a thread, until ``close``.

    It costs a few reads of /proc for each process twice a second, and a watch of the list of this machine's processes.
    Where the kernel does not tell which machine this is, it does nothing.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys, name: str, *, ttl_s: int,
                 look_at: Callable[[int, int], Sighting] = process_state.look_at) -> None:
        """``name``: unique on the machine. ``ttl_s``: ``coordinator.lease_ttl_s``, the time after which a stopped
        process counts as one; a process that is gone has two thirds of it to be deregistered."""
        self._etcd, self._keys, self._look_at = etcd, keys, look_at
        self._gone_s, self._stopped_s = ttl_s * 2 / 3, float(ttl_s)
        self._machine = process_state.machine_id()
        self._record = Witness(name=name, machine=self._machine, host=socket.gethostname(), pid=os.getpid())
        self._listed = Mirror(etcd, keys.processes_prefix(self._machine), lambda kv: readable_one(kv, MemberProcess))
        self._own: list[MemberProcess] = []
        self._watched: dict[Name, Watched] = {}
        self._lease: KeptLease | None = None
        self._said = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"witness-{name}", daemon=True)

    def announce(self, role: str, member_id: str, incarnation: str) -> None:
        """Has the other witnesses of this machine watch this process, which registers as a member without a
        ``Membership``. Call it before ``start``."""
        self._own.append(MemberProcess(role=role, id=member_id, incarnation=incarnation, pid=os.getpid(),
                                       started=process_state.start_ticks(os.getpid())))

    def start(self) -> Self:
        if self._machine:
            self._thread.start()
        return self

    def close(self) -> None:
        """Ends it, and its record. Without etcd the record expires."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)
        self._listed.close()
        if self._lease is not None:
            self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        listed_at = float("-inf")
        while not self._stopping.is_set():
            due = time.monotonic() - listed_at >= _LIST_EVERY_S
            try:
                if due:
                    listed_at = time.monotonic()
                    self._list()
                self._look()
                if due:
                    self._register()
                self._said = ""
            except Exception as e:  # etcd is away, or this process has no file left: it is reported when that is over
                if str(e) != self._said:
                    log.warning("the witness of this machine cannot report: %s", e)
                self._said = str(e)
                self._see()
            self._stopping.wait(_LOOK_EVERY_S)

    # -- its own record ---------------------------------------------------------------------------------------------
    def _register(self) -> None:
        load = round(process_state.load_per_core(), 2)
        alive = self._lease is not None and self._lease.alive
        if alive and abs(load - self._record.load_per_core) <= max(0.5, _LOAD_CHANGE * self._record.load_per_core):
            return
        self._record = self._record.replace(load_per_core=load)
        old = self._lease
        lease = old if alive and old is not None else self._etcd.keepalive(LEASE_S)
        ops = [Op.put(self._keys.witness(self._machine, self._record.name), self._record.encode(), lease.id)]
        ops += [Op.put(self._keys.process(self._machine, p.role, p.id), p.encode(), lease.id) for p in self._own]
        try:
            self._etcd.txn([], ops)
        except ElasticRLError as e:
            if lease is not old:
                lease.close()
            elif isinstance(e, LeaseLost):
                lease.lost.set()
            raise
        self._lease = lease
        if old is not None and old is not lease:
            old.close()

    # -- the others -------------------------------------------------------------------------------------------------
    def _list(self) -> None:
        """Who is to be watched now. A process that is no longer listed is watched while the leader knows its member:
        its lease may have ended because it is gone, or because it is slow."""
        listed = {(p.role, p.id): p for p in self._listed.read(0.0).values()}
        self._watched = merge(self._watched, listed)
        for name in [n for n in self._watched if n not in listed]:
            entry = readable_one(self._etcd.get(self._keys.registry_entry(*name)), _Registered)
            if entry is None or entry.dead_at or not entry.is_of(self._watched[name].process):
                del self._watched[name]

    def _see(self) -> None:
        for name, watched in self._watched.items():
            self._watched[name] = watched.look(self._look_at(watched.process.pid, watched.process.started),
                                               time.monotonic())

    def _look(self) -> None:
        self._see()
        for name, watched in list(self._watched.items()):
            found = watched.finding(time.monotonic(), gone_s=self._gone_s, stopped_s=self._stopped_s)
            if found is not None and self._report(watched.process, found) and found is ProcessFinding.GONE:
                del self._watched[name]

    def _report(self, process: MemberProcess, finding: ProcessFinding) -> bool:
        return report(self._etcd, self._keys, process, finding, self._record.name,
                      lambda: self._look_at(process.pid, process.started).state is _STILL[finding])


def report(etcd: EtcdClient, keys: Keys, process: MemberProcess, finding: ProcessFinding, by: str,
           still: Callable[[], bool] = lambda: True) -> bool:
    """Ends a member's registration with the evidence; whether there is nothing more to do. ``still``: whether it is
    still so, since etcd may have been away since the last look. Raises EtcdUnavailable."""
    role, member_id = process.role, process.id
    registration = etcd.get(keys.registration(role, member_id))
    entry = etcd.get(keys.registry_entry(role, member_id))
    known, seen = readable_one(registration, _Registered), readable_one(entry, _Registered)
    if registration is not None and (known is None or not known.is_of(process)):
        return True  # a successor has its name, perhaps of another release
    mine = seen is not None and seen.is_of(process) and not seen.dead_at
    if registration is None and not mine:
        return True  # deregistered, or known to be dead
    key = keys.evidence(role, member_id)
    if registration is None and etcd.get(key) is not None:
        return True  # another witness was first, and the leader has not read it yet
    if not still():
        return False
    compares = [Compare.mod(keys.registration(role, member_id), "==", registration.mod_revision if registration else 0),
                Compare.mod(keys.registry_entry(role, member_id), "==", entry.mod_revision if entry else 0)]
    ops = [Op.delete(keys.registration(role, member_id))] if registration else []
    if mine:  # one that no leader has seen will not be missed
        evidence = Evidence(role=role, id=member_id, incarnation=process.incarnation, finding=finding,
                            at=time.time(), by=by)
        ops.append(Op.put(key, evidence.encode()))
    if not etcd.txn(compares, ops).succeeded:
        return False  # something changed: the next look finds out what
    log.warning("%s %s (pid %d): its process is %s", role, member_id, process.pid, finding)
    return True


def merge(watched: Mapping[Name, Watched], listed: Mapping[Name, MemberProcess]) -> dict[Name, Watched]:
    """What is watched once the list of processes was read again. Pure."""
    found = dict(watched)
    for name, process in listed.items():
        if name not in found or found[name].process != process:
            found[name] = Watched(process)
    return found
