"""This host in etcd: its registration under a lease, what its agent reports, and the assignments, for its agent.

A thread does all that needs etcd. The agent reads what the thread knows (``view``) and never waits for it, so that the
services of the host are looked after, and its singletons ended in time, however long etcd is away.

Only one agent holds the name of a host. Which one follows from the registration that is there under a lease:

- of this incarnation, and older than this agent: its predecessor's, which has ended (the active agent has a lock). It
  is replaced at once, so that a restarted agent costs nothing;
- of this incarnation, and newer than this agent: an agent that was started later is the host's, and this one gives up
  for good (``replaced``): it starts nothing and ends nothing any more;
- of another incarnation: another machine has the name, or this one had it before it booted. Whoever is registered
  keeps the name. This agent waits until the lease of the other has ended, and says so (``waits_for``).

The transition that must NOT exist: from "another machine is registered" to a registration. Two machines with one name
would take it from each other for ever, and each time the leader would move all that the host holds.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.errors import ElasticRLError, Fenced, LeaseLost
from elastic_rl.etcd.client import EtcdClient, Watch
from elastic_rl.etcd.cluster_records import Assignment, Host, HostStatus
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.leases import KeptLease
from elastic_rl.etcd.transaction import Compare, Op, TxnResult
from elastic_rl.host.agent.duties import AgentLease, KnownOrders, Order
from elastic_rl.runtime.clock import boottime_s

log = logging.getLogger(__name__)

_READ_EVERY_S = 5.0
"""The assignments are read when one has changed, and so often."""
_CHECK_EVERY_S = 5.0
"""The status is written when it has changed. While it does not, the registration is looked up so often."""
_TURN_S = 0.2
"""Longest time until a new status is written, and until a changed assignment is read."""
_PAUSE_S = 0.5
"""Pause after an error, and between two looks at a name that another machine has."""
_JOIN_S = 5.0


class HostName(StrEnum):
    """Whether an agent may register the name of its host."""

    FREE = "free"
    """Nobody is registered under the name, or a predecessor of this agent, which has ended."""
    TAKEN = "taken"
    """Another machine, or this one before its boot, is registered under the name until its lease has ended."""
    REPLACED = "replaced"
    """An agent of this host that was started later is registered under the name: this one gives up."""


def name_of_host(registered_at: int, registered: Host | None, incarnation: str, began: int) -> HostName:
    """Whether an agent may register. Pure. ``registered_at``: mod revision of the registration that is there under a
    lease; 0 without one, and for one of the agent's own leases. ``registered``: its record; None for one that this
    release cannot read. ``began``: revision of etcd when this agent first read it."""
    if not registered_at:
        return HostName.FREE
    if registered is None or registered.incarnation != incarnation:
        return HostName.TAKEN
    return HostName.FREE if registered_at <= began else HostName.REPLACED


@dataclass(frozen=True)
class HostView:
    """What is known about this host at one moment, without asking etcd."""

    lease: AgentLease
    known: KnownOrders
    registration: int = 0
    """Mod revision of the present registration; 0 while there is none."""


@dataclass(frozen=True)
class _Registration:
    lease: KeptLease
    revision: int
    granted_at: float


class HostSession:
    """Keeps a host registered from ``start`` until ``close``."""

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys, host: Host, times: HostTimes) -> None:
        """``etcd``: a client for this object alone, which closes it. Its calls should give up before a lease ends."""
        self.host = host
        self.waits_for = ""
        """Why the host is not registered; empty while it is, or is about to be."""
        self.replaced = threading.Event()
        """An agent of this host that was started later has its name now."""
        self._etcd, self._keys, self._ttl_s = etcd, keys, math.ceil(times.lease_ttl_s)
        self._key, self._registration_key = keys.host(host.id), keys.host_registration(host.id)
        self._writer = FencedWriter(etcd, keys, self._token, f"the registration of host {host.id}")
        self._renewed_at = boottime_s()
        """Value of ``AgentLease.renewed_at`` while there is no registration."""
        self._held: _Registration | None = None
        self._began = 0
        """Revision of etcd when this agent first read it: registrations before it are of its predecessors."""
        self._leases: deque[int] = deque(maxlen=8)
        """The last leases of this agent. It may believe that one has ended which etcd still has, with its keys."""
        self._known = KnownOrders()
        self._status: HostStatus | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-session", daemon=True)

    def start(self) -> Self:
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread. The registration stays until its lease ends: the services of the host run on, and the next
        agent takes the registration over."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self._etcd.close()

    # -- for the agent -------------------------------------------------------------------------------------------------
    def view(self) -> HostView:
        held, known = self._held, self._known
        if held is None:
            return HostView(AgentLease(self._renewed_at), known)
        if held.lease.lost.is_set():
            return HostView(AgentLease(held.lease.renewed_at), known)
        return HostView(AgentLease(held.lease.renewed_at, held.granted_at), known, held.revision)

    def report(self, status: HostStatus) -> None:
        """Has the status written. One that was made under an earlier registration is dropped: it is no evidence that
        the agent follows the assignments since the present one."""
        self._status = status

    # -- the thread ----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        problem = ""
        while not self._stopping.is_set() and not self.replaced.is_set():
            try:
                if self._register():
                    problem = self.waits_for = ""
                    self._follow()
                else:
                    self._stopping.wait(_PAUSE_S)
            except Exception as e:  # without this thread the host ends all that it holds
                if problem != (problem := f"{type(e).__name__}: {e}"):
                    expected = isinstance(e, ElasticRLError)
                    log.log(logging.WARNING if expected else logging.ERROR, "host %s: %s", self.host.id, problem,
                            exc_info=None if expected else e)
                self.waits_for = f"the host cannot be registered: {e}"
                self._stopping.wait(_PAUSE_S)
        if self._stopping.is_set() and (held := self._held) is not None:
            held.lease.stop()

    def _register(self) -> bool:
        """Registers the host under a new lease. False while another machine has its name, and when this agent was
        replaced."""
        before = self._etcd.txn([], [Op.get(self._key), Op.get(self._registration_key)])
        self._began = self._began or before.revision
        if not self._may_register(before):
            return False
        lease = self._etcd.keepalive(self._ttl_s)
        self._leases.append(lease.id)
        try:
            record = self.host.encode()
            outcome = self._etcd.txn([before.unchanged(key) for key in (self._key, self._registration_key)],
                                     [Op.put(self._key, record, lease.id), Op.put(self._registration_key, record)])
        except BaseException:
            lease.close()
            raise
        if not outcome.succeeded:
            lease.close()
            return False
        self._held = _Registration(lease, outcome.revision, boottime_s())
        log.info("host %s is registered at revision %d", self.host.id, outcome.revision)
        return True

    def _may_register(self, before: TxnResult) -> bool:
        found = before.get(self._key)
        other = readable_one(found, Host)
        registered_at = found.mod_revision if found is not None and found.lease not in self._leases else 0
        match name_of_host(registered_at, other, self.host.incarnation, self._began):
            case HostName.FREE:
                return True
            case HostName.REPLACED:
                self.waits_for = f"an agent that was started later has registered host {self.host.id}"
                log.error("%s; this one gives up", self.waits_for)
                self.replaced.set()
            case HostName.TAKEN:
                where = f"at {other.address} (machine {other.machine})" if other is not None else "by another release"
                waits_for = (f"host {self.host.id} is registered {where}; this agent waits for the end of that lease. "
                             "Where it is another machine, give each of the two a name of its own")
                if self.waits_for != waits_for:
                    log.warning("%s", waits_for)
                self.waits_for = waits_for
        return False

    def _token(self) -> Sequence[Compare]:
        if (held := self._held) is None:
            raise Fenced(f"host {self.host.id} is not registered")
        return [Compare.mod(self._key, "==", held.revision)]

    def _follow(self) -> None:
        """Reads assignments and writes the status until the lease is lost, or the registration replaced."""
        held = self._held
        assert held is not None
        assignments = _AssignmentReader(self._etcd, self._keys.assignments_prefix())
        status = _StatusWriter(self._writer, self._keys.host_status(self.host.id), held)
        problem = ""
        try:
            while not self._stopping.is_set() and held.lease.alive:
                try:
                    self._known = assignments.read(self._known)
                    status.write(self._status, assignments.changed_at)
                    problem = ""
                except (Fenced, LeaseLost) as e:
                    log.warning("host %s: %s; registers again", self.host.id, e)
                    return
                except ElasticRLError as e:  # the lease has a thread of its own, and may outlast this
                    if problem != (problem := str(e)):
                        log.warning("host %s: %s", self.host.id, e)
                    self._stopping.wait(_TURN_S)
        finally:
            assignments.close()
            if not self._stopping.is_set():
                log.warning("host %s has lost its lease or registration", self.host.id)
                self._renewed_at = held.lease.renewed_at
                self._held = None
                held.lease.close()


class _AssignmentReader:
    """Reads all assignments, again and again. A watch says when; it may fail without harm."""

    def __init__(self, etcd: EtcdClient, prefix: str) -> None:
        self._etcd, self._prefix = etcd, prefix
        self._watch: Watch | None = None
        self._read_at = float("-inf")
        self.changed_at = 0
        """Revision of the newest change that has been read."""

    def read(self, known: KnownOrders) -> KnownOrders:
        """The assignments as they are, once one has changed or it is time to read them; as they were known before, soon
        after, if not. Raises EtcdUnavailable."""
        if self._watch is not None and boottime_s() - self._read_at < _READ_EVERY_S and not self._changed(self._watch):
            return known
        asked = boottime_s()
        kvs, revision = self._etcd.range(self._prefix)
        self._read_at, self.changed_at = asked, max((kv.mod_revision for kv in kvs), default=0)
        if self._watch is None:
            self._watch = self._etcd.watch(self._prefix, start_revision=revision + 1)
        return known.updated(asked, revision, {kv.key.removeprefix(self._prefix): Order(assignment, kv.version)
                                               for assignment, kv in readable(kvs, Assignment)})

    def _changed(self, watch: Watch) -> bool:
        """Waits for a change, for ``_TURN_S`` at most."""
        try:
            changed = watch.get(_TURN_S) is not None
            while changed and watch.get(0.0) is not None:
                pass
            return changed
        except ElasticRLError as e:  # mostly Compacted: it was interrupted, and a compaction overtook it meanwhile
            log.info("the watch of the assignments is opened again: %s", e)
            self.close()
            return True

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


class _StatusWriter:
    """Writes the status of a host under one registration."""

    def __init__(self, writer: FencedWriter, key: str, held: _Registration) -> None:
        self._writer, self._key, self._held = writer, key, held
        self._written: HostStatus | None = None
        self._checked_at = float("-inf")

    def write(self, status: HostStatus | None, changed_at: int) -> None:
        """Writes the status where it has changed. ``changed_at``: revision of the newest change of an assignment, which
        the leader wants to see observed. Raises Fenced when the registration was replaced, and LeaseLost."""
        if status is None or status.registration != self._held.revision:
            return
        now, before = boottime_s(), self._written
        if (before is None or before.replace(observed_revision=status.observed_revision) != status
                or before.observed_revision < changed_at <= status.observed_revision):
            self._writer.write(Op.put(self._key, status.encode(), self._held.lease.id))
            self._written, self._checked_at = status, now
        elif now - self._checked_at >= _CHECK_EVERY_S:
            self._writer.require()
            self._checked_at = now
