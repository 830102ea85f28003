"""What a host agent has to do about the singletons of the cluster. Pure: no clock, no process, no etcd.

An agent carries out the assignments that name its host. It adopts what runs already, so that its own restart changes
nothing. It ends what is over, and what it may no longer run: without its lease for the lease's time to live it stops
the singletons of its host (*self-fence*), and says nothing of the services that every host runs (etcd, coordinators,
the DCS node, the Ray worker), which run on.

The transitions that must NOT exist:

- to a start while the agent cannot know that its lease is held, or by assignments that it read before it had that
  lease. An agent that was stopped for minutes believes what it read then; meanwhile its host was lost and the driver
  runs elsewhere;
- to a start beside a living process of the same singleton. The older one is ended *first*: two drivers on one host
  fight for ports and devices, and neither comes up;
- to a start of an older generation after a newer one was seen. Answers of etcd may overtake each other;
- to a start, or an adoption, for another incarnation of this host: what was assigned before the boot is over, and
  the leader assigns it again;
- from "alive, of this generation" to a stop, while the lease is held. That is the agent's restart which must cost
  nothing.

Times are seconds of one clock of this host that never goes back and counts on while the machine is suspended
(``CLOCK_BOOTTIME``). How they relate to the leader's is in ``HostTimes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.coordinator.hosts.times import HostTimes
from elastic_rl.etcd.cluster_records import Assignment


@dataclass(frozen=True)
class AgentLease:
    """The agent's lease, as it knows it without asking."""

    renewed_at: float
    """When the last answered keep-alive, or grant, was sent. Before the first: when the agent started. The lease of its
    predecessor may have ended earlier, which nobody knows; what runs is adopted, and fenced by its generation."""
    granted_at: float | None = None
    """When the agent learned that it holds the present lease; None while it knows of none."""

    def ended(self, now: float, times: HostTimes) -> bool:
        """Whether the lease is over by this host's clock."""
        return now - self.renewed_at >= times.lease_ttl_s

    def allows_start(self, now: float, times: HostTimes) -> bool:
        """Whether the lease is held now, and will be until a start is over."""
        return self.granted_at is not None and now - self.renewed_at < times.lease_ttl_s - times.start_margin_s


@dataclass(frozen=True)
class Order:
    """An assignment with its generation."""

    assignment: Assignment
    generation: int


@dataclass(frozen=True)
class KnownOrders:
    """The assignments that an agent knows, of all hosts. Keys are the names of singletons."""

    read_at: float = float("-inf")
    """When the newest reading was requested."""
    revision: int = 0
    """Revision of etcd of the newest reading."""
    orders: Mapping[str, Order] = field(default_factory=dict)

    def updated(self, read_at: float, revision: int, orders: Mapping[str, Order]) -> KnownOrders:
        """With a further reading, which may be older than one that arrived before it: generations only grow."""
        newest = {name: max((o for o in (self.orders.get(name), orders.get(name)) if o is not None),
                            key=lambda order: order.generation) for name in {*self.orders, *orders}}
        return KnownOrders(max(self.read_at, read_at), max(self.revision, revision), newest)


@dataclass(frozen=True)
class LocalSingleton:
    """A process of a singleton on this host, as the agent's files and the kernel have it."""

    name: str
    generation: int
    alive: bool
    adopted: bool = False
    """Whether this process of the agent watches it already."""
    completed: bool = False
    """It ended because its work was done."""


@dataclass(frozen=True)
class Start:
    name: str
    generation: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Stop:
    """End a process and what it has started. Repeated until it is gone."""

    name: str
    generation: int
    reason: str


@dataclass(frozen=True)
class Adopt:
    """Watch a process that runs already."""

    name: str
    generation: int


@dataclass(frozen=True)
class Wait:
    """Nothing can be done about an assignment now."""

    name: str
    reason: str


Action = Start | Stop | Adopt | Wait


def duties(host: str, incarnation: str, now: float, lease: AgentLease, known: KnownOrders,
           here: Iterable[LocalSingleton], not_before: Mapping[tuple[str, int], float], times: HostTimes
           ) -> list[Action]:
    """What the agent of a host has to do now, in this order. ``here``: processes of singletons, also those that have
    ended and were not forgotten yet. ``not_before``: when a name and generation may be started, by its restart
    policy; those that are missing at once."""
    here = list(here)
    alive = [s for s in here if s.alive]
    actions: list[Action] = []
    for service in alive:
        if reason := _why_over(service, now, lease, known, times):
            actions.append(Stop(service.name, service.generation, reason))
        elif not service.adopted and _names(known.orders.get(service.name), service.generation, host, incarnation):
            actions.append(Adopt(service.name, service.generation))
    for name, order in sorted(known.orders.items()):
        if order.assignment.host != host or any(s.name == name and s.generation == order.generation and
                                                (s.alive or s.completed) for s in here):
            continue
        if reason := _why_not(name, order, incarnation, now, lease, known, here, not_before, times):
            actions.append(Wait(name, reason))
        else:
            actions.append(Start(name, order.generation, order.assignment.arguments))
    return actions


def _names(order: Order | None, generation: int, host: str, incarnation: str) -> bool:
    """Whether an assignment is of this generation, and names this host and boot."""
    return (order is not None and order.generation == generation and order.assignment.host == host
            and order.assignment.incarnation == incarnation)


def _why_over(service: LocalSingleton, now: float, lease: AgentLease, known: KnownOrders, times: HostTimes) -> str:
    """Why a process is to end; empty while it may run."""
    if lease.ended(now, times):
        return f"the host has had no lease for {times.lease_ttl_s:g} s"
    order = known.orders.get(service.name)
    if order is None or order.generation <= service.generation:
        return ""  # not read yet, or read before this generation began
    elsewhere = f", of host {order.assignment.host}" if order.assignment.host else ""
    return f"generation {service.generation} is over: now it is {order.generation}{elsewhere}"


def _why_not(name: str, order: Order, incarnation: str, now: float, lease: AgentLease, known: KnownOrders,
             here: Iterable[LocalSingleton], not_before: Mapping[tuple[str, int], float], times: HostTimes) -> str:
    """Why an assignment to this host cannot be carried out by a start now; empty if it can."""
    if order.assignment.incarnation != incarnation:
        return "it was assigned before this host's boot; waits for the leader to assign it again"
    if not lease.allows_start(now, times):
        return "waits for the host's lease"
    if lease.granted_at is None or known.read_at < lease.granted_at:
        return "waits for the assignments to be read under the host's lease"
    newest = max((s.generation for s in here if s.name == name), default=0)
    if newest > order.generation:
        return (f"generation {order.generation} is older than {newest}, which ran here: etcd has lost assignments; end "
                "what runs here, then have it assigned again")
    for other in here:
        if other.name == name and other.alive:
            return f"waits for the end of generation {other.generation}"
    return "has ended and waits for its restart" if not_before.get((name, order.generation), now) > now else ""


def why_not_ready(lease: AgentLease, known: KnownOrders, here: Iterable[LocalSingleton]) -> str:
    """Why the host can take no singleton as far as its processes go, for its status; empty if it can."""
    if lease.granted_at is None or known.read_at < lease.granted_at:
        return "has not read the assignments since it registered"
    for service in here:
        order = known.orders.get(service.name)
        if service.alive and order is not None and service.generation < order.generation:
            return f"waits for the end of generation {service.generation} of {service.name}"
    return ""
