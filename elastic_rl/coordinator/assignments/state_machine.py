"""Assignments: which host is to hold a singleton. Pure; the time is that of the leader clock.

A singleton that ends is restarted in place by the agent of its host. It moves, which begins its next generation, when

- its host is lost, or has booted since: nothing of it runs there, or what does is cut off;
- its host drains, and its holder agrees or the drain's deadline has passed;
- it ended again after ``restarts_in_place`` restarts;
- it says that its work is done while it is wanted: what it has said of that was lost, as with an older copy of etcd.

It moves only to a host that is *fit* (READY, by its agent's own word). Where there is none, the assignment stays as it
is, with its generation, and says what it waits for: then the agent that returns adopts what runs. A host that is
cordoned keeps what it holds, as a node of Kubernetes does.

The transition that must NOT exist: a move for any other reason, above all back to a host because it has returned, or
because it has less to do. Each move ends a driver. Two hosts whose network comes and goes would hand one driver to and
fro, each time after minutes of start-up, and the job would never do a step. Moves because of failures wait longer and
longer, and prefer hosts on which the singleton has not failed lately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.etcd.cluster_records import Assignment, FailedHost, HostPhase, HostState, RunState, ServiceStatus
from elastic_rl.runtime.backoff import doubled_s
from elastic_rl.runtime.words import counted

_HOME_S = 30.0
"""A singleton waits for its home no longer than this while that is about to be ready, or is not heard."""


@dataclass(frozen=True)
class AssignmentLimits:
    """When and how often a singleton moves because it keeps ending. Times are seconds of the leader clock."""

    restarts_in_place: int = 3
    """It moves when it has ended once more after so many restarts in a row on one host."""
    move_backoff_initial_s: float = 60.0
    """Shortest time between two such moves; each further one waits twice as long, up to ``move_backoff_max_s``."""
    move_backoff_max_s: float = 900.0
    remember_s: float = 3600.0
    """For so long a host counts as one on which it failed."""
    remember: int = 8
    """So many such moves are remembered."""


@dataclass(frozen=True)
class Singleton:
    """A process of which the cluster is to run exactly one."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    movable: bool = False
    """Whether its holder loses nothing when it moves now, so that a drain need not wait."""
    home: str = ""
    """The host that it goes to where that is fit; empty for none."""


@dataclass(frozen=True)
class AssignableHost:
    """A host as it matters to assignments."""

    state: HostState
    fit: bool
    changing: bool = False
    """Whether ``state`` is about to change, such as that of a lost host that has registered again."""
    assigned: int = 0
    """Number of singletons that are assigned to it."""
    service: ServiceStatus | None = None
    """What its agent reports about the singleton in question."""


@dataclass(frozen=True)
class Decision:
    """``assignment``: the one that begins the next generation; None: the present one stays. ``waits_for``: what keeps
    the singleton from moving, or from having a host at all; empty when it waits for nothing."""

    assignment: Assignment | None = None
    waits_for: str = ""


def decide(wanted: Singleton, now: Assignment, generation: int, hosts: Mapping[str, AssignableHost], leader_s: float,
           limits: AssignmentLimits) -> Decision:
    """Who is to hold a singleton. ``now``: the present assignment, an empty one before the first. ``generation``: its
    number."""
    failed = [f for f in now.failed if 0 <= leader_s - f.at_s < limits.remember_s]
    holder = hosts.get(now.host)
    if not now.host:
        return _move(wanted, now, hosts, failed, "no host held it", leader_s)
    if holder is None:
        return _move(wanted, now, hosts, failed, f"host {now.host} is unknown", leader_s)
    if holder.changing:
        return Decision(waits_for=f"the state of host {now.host} is about to change")
    if holder.state.incarnation != now.incarnation:
        return _move(wanted, now, hosts, failed, f"host {now.host} has booted", leader_s)
    if holder.state.phase is HostPhase.LOST:
        return _move(wanted, now, hosts, failed, f"host {now.host} is lost", leader_s)
    if holder.state.phase is HostPhase.DRAINING:
        if leader_s < holder.state.drain_deadline_s and not wanted.movable:
            return Decision(waits_for=f"host {now.host} drains: waits for its holder to agree, or for the deadline")
        return _move(wanted, now, hosts, failed, f"host {now.host} drains", leader_s)
    if _of_generation(holder.service, generation) is RunState.COMPLETED:
        return _move(wanted, now, hosts, failed, "it has completed, and is wanted", leader_s)
    if _keeps_ending(holder.service, generation, limits):
        return _move_failed(wanted, now, hosts, failed, leader_s, limits)
    return Decision()


def released(now: Assignment, reason: str) -> Assignment:
    """The next generation of a singleton that no host is to hold: the last holder is fenced off."""
    return Assignment(reason=reason, failed=now.failed)


def _of_generation(service: ServiceStatus | None, generation: int) -> RunState | None:
    """The state of a singleton's present generation, as its host reports it."""
    return service.state if service is not None and service.generation == generation else None


def _keeps_ending(service: ServiceStatus | None, generation: int, limits: AssignmentLimits) -> bool:
    return (service is not None and _of_generation(service, generation) is RunState.ENDED
            and service.restarts >= limits.restarts_in_place)


def _move_failed(wanted: Singleton, now: Assignment, hosts: Mapping[str, AssignableHost], failed: list[FailedHost],
                 leader_s: float, limits: AssignmentLimits) -> Decision:
    pause_s = doubled_s(len(failed), limits.move_backoff_initial_s, limits.move_backoff_max_s)
    if failed and leader_s < failed[-1].at_s + pause_s:
        return Decision(waits_for=f"it keeps ending, on host {now.host} after {failed[-1].host}")
    failed = [*failed, FailedHost(host=now.host, at_s=leader_s)][-limits.remember:]
    return _move(wanted, now, {i: h for i, h in hosts.items() if i != now.host}, failed,
                 f"it ended on host {now.host} after {counted(limits.restarts_in_place, 'restart')}", leader_s)


def _move(wanted: Singleton, now: Assignment, hosts: Mapping[str, AssignableHost], failed: list[FailedHost],
          reason: str, leader_s: float) -> Decision:
    home, avoided = hosts.get(wanted.home), {f.host for f in failed}
    if (home is not None and not home.fit and wanted.home not in (now.host, *avoided)
            and home.state.phase in (HostPhase.JOINING, HostPhase.SUSPECTED)
            and 0 <= leader_s - home.state.since_s < _HOME_S):
        return Decision(waits_for=f"waits for host {wanted.home}, which has its files")
    host = _best(hosts, wanted.home, avoided)
    if host is None:
        return Decision(waits_for=f"{reason}; no other host is fit to take it" if now.host else "no host is READY")
    return Decision(Assignment(host=host, incarnation=hosts[host].state.incarnation, arguments=dict(wanted.arguments),
                               reason=reason, failed=failed))


def _best(hosts: Mapping[str, AssignableHost], home: str, avoided: Iterable[str]) -> str | None:
    fit = [name for name, host in hosts.items() if host.fit and not host.changing]
    return min(fit, key=lambda name: (name in avoided, name != home, hosts[name].assigned, name), default=None)
