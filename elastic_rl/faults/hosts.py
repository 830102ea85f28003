"""Faults of the hosts of a cluster in namespaces of this machine (``host.test_hosts``), and of what runs on them.

A fault lasts until the control plane has reported it, or for a time where there is nothing to report; ``healed`` ends
it then. ``restore`` finds what was done to hosts, also by another process; processes that are stopped are noted
(``undo``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum

import psutil

from elastic_rl.config import Config
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.errors import ElasticRLError, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import Assignment, HostPhase, HostState, HostStatus, RunState, driver_of
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import DcsNode, Leader
from elastic_rl.faults.context import INJECT_TIMEOUT_S, Fault, FaultContext, VictimTaken, command, stopped
from elastic_rl.faults.undo import UndoRegistry
from elastic_rl.host.test_hosts.cluster_hosts import ClusterHosts
from elastic_rl.host.test_hosts.impaired_link import Impairment
from elastic_rl.host.test_hosts.isolated_hosts import IsolatedHosts
from elastic_rl.host.test_hosts.link_probe import Arrivals, arrivals, silent_connection
from elastic_rl.runtime.waiting import wait_until

_COORDINATOR, _ETCD = "elastic_rl.coordinator.service", "etcd --name "
_NO_MAJORITY_S = 20.0
"""Longer than any election of etcd, and than every lease."""
_AWAY = (HostPhase.JOINING, HostPhase.SUSPECTED, HostPhase.LOST)


class FaultNotSeen(ElasticRLError):
    """A fault was injected, and what it should do was not seen to happen."""


class Victim(StrEnum):
    """The host that a fault is of, by what it does when the fault begins."""

    LEADER = "leader"
    """Its coordinator leads."""
    ETCD_LEADER = "etcd_leader"
    """Its member of etcd leads."""
    HOLDER = "holder"
    """It has the run of the job."""
    BYSTANDER = "bystander"
    """None of those, where there is one."""


class HostsContext(FaultContext):
    """The hosts of a cluster with a job, what its etcd has of them, and which of them have a fault now."""

    def __init__(self, hosts: ClusterHosts, cfg: Config, etcd: EtcdClient, api: AdminClient, control_hosts: int, *,
                 undo: UndoRegistry | None = None, works: Callable[[int, int], bool] = lambda generation, since: True
                 ) -> None:
        """``etcd``: a client beside the hosts, of all members, which soon says that none answers. ``control_hosts``:
        how many hosts have a member and a coordinator. ``undo``: as of any context. ``works``: whether the run
        that was assigned in a generation has done something since a revision of etcd."""
        super().__init__(cfg, etcd, Keys(cfg.job), api, undo=undo)
        self.hosts, self.cluster_keys, self.control_hosts = hosts, ClusterKeys(cfg.cluster_name), control_hosts
        self._works = works
        self._names = {host.address: host.name for host in hosts.all()}
        self._taken_hosts, self._lock = set[str](), threading.Lock()

    @property
    def isolated(self) -> IsolatedHosts:
        return self.hosts.isolated

    @property
    def names(self) -> list[str]:
        return [*self._names.values()]

    def others(self, host: str) -> list[str]:
        """The other hosts, those without a fault first: what another fault does to a host is no witness of this one."""
        with self._lock:
            return sorted((name for name in self.names if name != host), key=lambda name: name in self._taken_hosts)

    # -- victims ------------------------------------------------------------------------------------------------------
    def take_host(self, victim: Victim) -> str:
        """A host that is this victim now and has no other fault, which it has from now on; "" while there is none."""
        with self._lock:
            found = next((name for name in self.candidates(victim) if name not in self._taken_hosts), "")
            if found:
                self._taken_hosts.add(found)
            return found

    def owns(self, process: psutil.Process) -> bool:
        """Whether a process is on one of the hosts, whose folders differ, and with them the marks."""
        return any(process in self.isolated.processes(name) for name in self.names)

    def release(self, host: str) -> None:
        with self._lock:
            self._taken_hosts.discard(host)

    def candidates(self, victim: Victim) -> list[str]:
        """Raises EtcdUnavailable."""
        match victim:
            case Victim.LEADER:
                found = [self.leader_host()]
            case Victim.ETCD_LEADER:
                found = [self.etcd_leader()]
            case Victim.HOLDER:
                found = [self.holder()]
            case Victim.BYSTANDER:
                busy = {self.leader_host(), self.etcd_leader(), self.holder()}
                found = sorted(self.names, key=lambda name: name in busy)
        return [name for name in found if name in self.names]

    def leader_host(self) -> str:
        """The host whose coordinator leads; "" while none does."""
        leads = readable_one(self.leads(), Leader)
        return self._host_of(leads.url) if leads else ""

    def leads(self) -> KeyValue | None:
        """The candidacy that leads."""
        candidates = self.etcd.range(self.cluster_keys.leader_prefix())[0]
        return min(candidates, key=lambda kv: kv.create_revision, default=None)

    def etcd_leader(self) -> str:
        return next((self._host_of(s.endpoint) for s in self.etcd.statuses() if s.is_leader), "")

    def holder(self) -> str:
        """The host that the run is assigned to; "" while it is to none."""
        held = readable_one(self.etcd.get(self.cluster_keys.assignment(driver_of(self.cfg.job))), Assignment)
        return held.host if held is not None else ""

    def names_on(self, host: str) -> list[str]:
        """What the product calls a host and what it has of the cluster and of the job. Raises EtcdUnavailable."""
        address = self.isolated.address(host)
        leaders = readable(self.etcd.range(self.cluster_keys.leader_prefix())[0], Leader)
        nodes = readable(self.etcd.range(self.keys.dcs_nodes_prefix())[0], DcsNode)
        return [host, *(leader.replica for leader, _ in leaders if self._host_of(leader.url) == host),
                *(node.id for node, _ in nodes if node.host == address),
                *(endpoint for endpoint in self.etcd.endpoints if endpoint.startswith(f"{address}:"))]

    def _host_of(self, url: str) -> str:
        return next((name for address, name in self._names.items() if f"/{address}:" in f"/{url}"), "")

    # -- how the cluster is -------------------------------------------------------------------------------------------
    def phase(self, host: str) -> HostPhase | None:
        """Raises EtcdUnavailable."""
        state = readable_one(self.etcd.get(self.cluster_keys.host_state(host)), HostState)
        return state.phase if state is not None else None

    def missing(self, *, run: bool = True, since: int = 0) -> str:
        """What the cluster does not have that it has without faults; "": nothing. ``run``: whether the run of the job
        has to be there, and to have done something since a revision of etcd. Raises EtcdUnavailable."""
        for name in self.names:
            phase = self.phase(name)
            if phase is None or phase in _AWAY or self.etcd.get(self.cluster_keys.host(name)) is None:
                return f"host {name}, which is {phase or 'unknown'}"
        members = self.etcd.members()
        if len(members) < self.control_hosts or any(member.is_learner or not member.name for member in members):
            return "the vote of a member of etcd"
        if silent := [status.endpoint for status in self.etcd.statuses() if status.error]:
            return f"the member of etcd at {', '.join(silent)}"
        if len(self.etcd.range(self.cluster_keys.leader_prefix())[0]) < self.control_hosts:
            return "a coordinator"
        return "" if not run or self.runs_on(self.holder(), since) else "the run"

    def runs_on(self, host: str, since: int = 0) -> bool:
        """Whether the run is assigned to the host, its agent says that it runs, and it has worked since a revision.
        Raises EtcdUnavailable."""
        assigned = self.etcd.get(self.cluster_keys.assignment(driver_of(self.cfg.job)))
        held = readable_one(assigned, Assignment)
        status = readable_one(self.etcd.get(self.cluster_keys.host_status(host)), HostStatus) if host else None
        run = status.services.get(driver_of(self.cfg.job)) if status is not None else None
        return (assigned is not None and held is not None and held.host == host and run is not None
                and run.state is RunState.RUNNING and run.generation == assigned.version
                and self._works(assigned.version, since))

    def processes_on(self, host: str, part: str) -> list[psutil.Process]:
        """The processes on a host with a word in their command line."""
        return [process for process in self.isolated.processes(host) if part in command(process)]


def restore(hosts: ClusterHosts) -> None:
    """Ends every fault of the hosts: what is stopped goes on, what is cut off, blocked or impaired has its network
    again, what is off comes back, and the cluster has it then. Raises as ``ClusterHosts.up``."""
    isolated = hosts.isolated
    for name in isolated.names:
        for process in isolated.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_STOPPED:
                    process.resume()
    if any(isolated.init(name) is None for name in isolated.names):
        hosts.up()
        return
    for name in isolated.names:
        hosts.heal(name)


class HostFault(Fault):
    """A fault of one host, which others no longer hear."""

    look_s = 0.25
    """Least time between two looks at the cluster, each of which is many calls of etcd, or reads all processes."""
    until: tuple[HostPhase, ...] = (HostPhase.LOST,)
    """Phases of the host by which the leader reports it."""
    kind = ""

    def __init__(self, context: HostsContext, victim: Victim) -> None:
        self.context, self.victim = context, victim
        self.name, self.state, self.host = f"{victim}_host_{self.kind}", victim.value, ""
        self._ended, self._unanswered_since, self._look_at = False, 0.0, 0.0
        self._over_at: int | None = None
        """The revision at which etcd answered first after the end of the fault: what the run did before proves nothing.
        """

    def inject(self) -> tuple[str, str]:
        self._ended, self.host = False, ""  # it is begun again where etcd did not answer
        self.host = wait_until(lambda: self.context.take_host(self.victim), timeout_s=INJECT_TIMEOUT_S, poll_s=0.1,
                               what=f"the host that is the {self.victim}")
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_once)  # whatever ends the beginning
            self._prepare()
            target = f"{self.victim} on {', '.join(self.context.names_on(self.host))}"
            witness = self._begin()
            undo.pop_all()
        return target, witness

    def _striking(self) -> AbstractContextManager[None]:
        """In the block the host is struck, which is still the victim."""
        return self.context.striking(f"{self.name} of {self.host}", self._look)

    def _look(self) -> None:
        """Gives the host back and raises VictimTaken where it is the victim no more. Raises EtcdUnavailable."""
        if self.host not in self.context.candidates(self.victim):
            self._ended = True  # nothing was begun
            self.context.release(self.host)
            raise VictimTaken(f"{self.host} is the {self.victim} no more")

    def give_up(self) -> None:
        """Ends the fault where nobody waits for its detection or for the recovery from it any more."""
        if self.host:
            self._end_once()

    def detected(self) -> bool:
        try:
            phase = self.context.phase(self.host)
        except EtcdUnavailable:
            # It elects a leader; or, with another one's fault, there is no majority, and nothing can be reported.
            self._unanswered_since = self._unanswered_since or time.monotonic()
            return time.monotonic() >= self._unanswered_since + _NO_MAJORITY_S
        self._unanswered_since = 0.0
        return phase in self.until

    def healed(self) -> bool:
        self._end_once()
        try:
            if self._over_at is None:
                self._over_at = self.context.etcd.revision()
            return self._is_due() and not self.context.missing(since=self._over_at)
        except EtcdUnavailable:
            return False

    def _is_due(self) -> bool:
        """Whether it is time for another look."""
        now = time.monotonic()
        if due := now >= self._look_at:
            self._look_at = now + self.look_s
        return due

    def _end_once(self) -> None:
        if not self._ended:
            self._end()
            self._ended = True
            self.context.release(self.host)

    def _prepare(self) -> None:
        """Reads what it needs to know before anything is done. Raises EtcdUnavailable."""

    @abstractmethod
    def _begin(self) -> str:
        """Begins the fault, within ``_striking`` or after ``_look``, and returns its witness, which is looked for
        outside of that: others wait for a strike. Raises FaultNotSeen, and as ``_look``."""

    def _end(self) -> None:
        self.context.hosts.heal(self.host)

    def _other(self) -> str:
        """Another host, which is on."""
        isolated = self.context.isolated
        return next(name for name in self.context.others(self.host) if isolated.init(name) is not None)

    def _probed(self, *, sends: bool, hears: bool) -> str:
        """The witness that what the host sends to another one arrives, or not, and the same of what that one sends."""
        other, isolated = self._other(), self.context.isolated
        there, back = arrivals(isolated, self.host, other), arrivals(isolated, other, self.host)
        if bool(there.arrived) != sends or bool(back.arrived) != hears:
            raise FaultNotSeen(f"{self.name}: {self.host} to {other}: {there}; back: {back}")
        return f"{self.host} to {other}: {there}; back: {back}"


class LastingFault(HostFault):
    """A fault that lasts for a time, about which the control plane need not report anything."""

    may_go_unnoticed = True

    def __init__(self, context: HostsContext, victim: Victim, seconds: float) -> None:
        super().__init__(context, victim)
        self.seconds, self._until = seconds, 0.0

    def inject(self) -> tuple[str, str]:
        found = super().inject()
        self._until = time.monotonic() + self.seconds
        return found

    def detected(self) -> bool:
        return False

    def healed(self) -> bool:
        return time.monotonic() >= self._until and super().healed()


class HostCut(HostFault):
    """A host is off the network; everything on it runs on."""

    kind = "cut"

    def _begin(self) -> str:
        with self._striking():
            self.context.hosts.cut(self.host)
        return self._probed(sends=False, hears=False)


class HostApart(HostFault):
    """A partition of the hosts in two: this one, and the others. Clients beside the hosts reach both."""

    kind = "apart"

    def _begin(self) -> str:
        with self._striking():
            for other in self.context.others(self.host):
                for one, two in ((self.host, other), (other, self.host)):
                    with contextlib.suppress(PreflightFailed):  # another fault: it is off
                        self.context.hosts.block(one, two)
        return self._probed(sends=False, hears=False)


class HostDeaf(HostFault):
    """What a host sends to others arrives, and nothing comes back."""

    kind = "deaf"

    def _begin(self) -> str:
        with self._striking():
            for other in self.context.others(self.host):
                with contextlib.suppress(PreflightFailed):
                    self.context.hosts.block(other, self.host)
        return self._probed(sends=True, hears=False)


class HostMute(HostFault):
    """A host hears what others send, and nothing that it sends to them arrives."""

    kind = "mute"

    def _begin(self) -> str:
        with self._striking():
            for other in self.context.others(self.host):
                self.context.hosts.block(self.host, other)
        return self._probed(sends=False, hears=True)


class HostPoweredOff(HostFault):
    """A power cut. Nobody is told: connections of others to the host stay half-open. Then its power returns."""

    kind = "powered_off"

    def _begin(self) -> str:
        isolated = self.context.isolated
        with silent_connection(isolated, self._other(), self.host, self._port()) as is_silent:
            on_it = len(isolated.processes(self.host))
            with self._striking():
                self.context.hosts.power_off(self.host)
            if not is_silent() or isolated.init(self.host) is not None:
                raise FaultNotSeen(f"{self.host} was powered off, and said that its connections have ended")
        return f"{on_it} processes of {self.host} have ended; a connection to it is open, and silent"

    def _port(self) -> int:
        """A port of the host on which its member of etcd listens."""
        address = self.context.isolated.address(self.host)
        return int(next(e for e in self.context.etcd.endpoints if e.startswith(f"{address}:")).rpartition(":")[2])

    def _end(self) -> None:
        if self.context.isolated.init(self.host) is None:
            self.context.hosts.power_on(self.host)


class LinkImpaired(LastingFault):
    """A host's link is slow, late or lossy for a time."""

    def __init__(self, context: HostsContext, victim: Victim, kind: str, impairment: Impairment, seconds: float
                 ) -> None:
        self.kind = kind
        super().__init__(context, victim, seconds)
        self.impairment = impairment

    def _begin(self) -> str:
        other = self._other()
        before = self._measure(other)
        with self._striking():
            self.context.hosts.impair(self.host, self.impairment)
        now = self._measure(other)
        spec = self.impairment
        if (now.delay_s < spec.delay_s or (spec.loss and now.arrived == now.sent)
                or (spec.bytes_per_s and not now.bytes_per_s <= 1.5 * spec.bytes_per_s)):
            raise FaultNotSeen(f"{self.name}: {other} to {self.host}: {now}; before: {before}")
        return f"{spec} for {self.seconds:g} s; {other} to {self.host}: {now}; before: {before}"

    def _measure(self, other: str) -> Arrivals:
        return arrivals(self.context.isolated, other, self.host, count=100, pause_s=0.001)


class ProcessKilled(HostFault):
    """kill -9 of a process on a host, which its agent restarts."""

    def __init__(self, context: HostsContext, victim: Victim, part: str) -> None:
        self.kind = f"{'etcd' if part == _ETCD else 'coordinator'}_killed"
        super().__init__(context, victim)
        self.part, self._led = part, 0

    def _prepare(self) -> None:
        leads = self.context.leads()
        self._led = leads.create_revision if leads is not None else 0

    def _begin(self) -> str:
        if not (found := self.context.processes_on(self.host, self.part)):
            raise VictimTaken(f"no {self.part} runs on {self.host}")
        return "; ".join([*(self.context.kill(process.pid, self._look) for process in found[:1]),
                          *(self.context.kill(process.pid) for process in found[1:])])

    def detected(self) -> bool:
        """Whether another process is in its place, and, where it led, another candidacy does."""
        if not self._is_due():
            return False
        try:
            leads = self.context.leads()
        except EtcdUnavailable:
            return False
        return bool(self.context.processes_on(self.host, self.part)) and leads is not None and (
            self.part != _COORDINATOR or leads.create_revision > self._led)

    def _end(self) -> None:
        pass


def coordinator_killed(context: HostsContext, victim: Victim) -> ProcessKilled:
    """The death of a coordinator."""
    return ProcessKilled(context, victim, _COORDINATOR)


def etcd_killed(context: HostsContext, victim: Victim) -> ProcessKilled:
    """The death of a member of etcd."""
    return ProcessKilled(context, victim, _ETCD)


class EtcdQuorumStopped(LastingFault):
    """SIGSTOP of so many members of etcd for a while that the others are no majority: connections stay, and nothing
    answers."""

    kind = "etcd_quorum_stopped"

    def __init__(self, context: HostsContext, seconds: float) -> None:
        super().__init__(context, Victim.ETCD_LEADER, seconds)
        self.name, self._stopped = self.kind, contextlib.ExitStack()
        self._hosts: Sequence[str] = ()
        """The hosts whose members are stopped."""

    def _prepare(self) -> None:
        spare = [*self.context.candidates(Victim.BYSTANDER), *self.context.names]
        majority = self.context.control_hosts // 2 + 1
        self._hosts = [self.host, *dict.fromkeys(name for name in spare if name != self.host)][:majority]

    def _begin(self) -> str:
        found = [process for host in self._hosts for process in self.context.processes_on(host, _ETCD)]
        self._stopped.enter_context(stopped(self.context, *found[:1], look=self._look))
        self._stopped.enter_context(stopped(self.context, *found[1:]))
        try:
            self.context.etcd.revision()
        except EtcdUnavailable:
            return f"the members of etcd on {', '.join(self._hosts)} were stopped; etcd does not answer"
        raise FaultNotSeen(f"etcd answers without its members on {', '.join(self._hosts)}")

    def _end(self) -> None:
        self._stopped.close()
