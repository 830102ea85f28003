"""Which hosts a part of the compute plane may be placed on, by their labels. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from urllib.parse import urlsplit

from elastic_rl.config import HostSelector, selector_text
from elastic_rl.driver.hosts_of_ray import OFFERED, RayHosts

_GIB = 1 << 30
_NAMED = 3
"""Hosts that a text names."""


@dataclass(frozen=True)
class Selection:
    """Where something may be placed now."""

    avoid: frozenset[str] = frozenset()
    """Without a selector: names of the hosts on which it is not placed."""
    among: frozenset[str] | None = None
    """With one: names of the hosts on one of which it is placed; None: on any."""
    waits_for: str = ""
    """Why there is no such host now; empty where there is one."""

    def allows_more_than(self, before: Selection) -> bool:
        """Whether what waits for room by an earlier selection should be placed again: it may go to other hosts now, or
        not any more to some."""
        return not self.avoid <= before.avoid or self.among != before.among


def select(selector: HostSelector, hosts: RayHosts) -> Selection:
    """The hosts that are ready, have joined Ray and have all labels of the selector; without one, whichever Ray has,
    but for those that take nothing more. What runs already stays where it is, whatever becomes of its host's labels."""
    if not selector:
        return Selection(avoid=hosts.closed)
    matching = {name for name, labels in hosts.labels.items() if selector.items() <= labels.items()}
    if among := frozenset(matching & hosts.open):
        return Selection(among=among)
    wanted = selector_text(selector)
    if not matching:
        return Selection(among=among, waits_for=f"no host has {wanted}: label one (`elastic-rl node --label`), or "
                         "change the host_selector")
    if matching <= hosts.closed:
        return Selection(among=among, waits_for=f"hosts with {wanted} are cordoned, drained or lost: {_some(matching)}")
    return Selection(among=among, waits_for=f"hosts with {wanted} have not joined the run yet: "
                     f"{_some(matching - hosts.closed)}")


def beyond_every_host(request: Mapping[str, float], hosts: RayHosts, among: Collection[str] | None = None) -> str:
    """Why what asks for so much of Ray's resources is never placed as the hosts are, however little runs there; empty
    where a host offers as much, and where nothing is known of any. ``among``: names of the hosts on one of which it is
    to be; None: on any."""
    offers = {name: hosts.nodes[name].offers for name in (hosts.open & hosts.nodes.keys() if among is None else
                                                          hosts.nodes.keys() & set(among)) if hosts.nodes[name].offers}
    wanted = {name: amount for name, amount in request.items() if name in OFFERED}
    if not offers or any(all(offer.get(name, 0.0) >= amount for name, amount in wanted.items())
                         for offer in offers.values()):
        return ""
    best = sorted(offers, key=lambda host: ([-offers[host].get(name, 0.0) for name in wanted], host))
    has = "; ".join(f"{host} has {_amounts({name: offers[host].get(name, 0.0) for name in wanted})}"
                    for host in best[:_NAMED])
    return f"no host offers {_amounts(wanted)}: {has}; ask for less, or add a machine that has as much"


def _amounts(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount / _GIB:.1f} GiB" if name == "memory" else f"{name} {amount:g}"
                     for name, amount in amounts.items())


class Fate(Enum):
    """What becomes of an external engine."""

    SERVED = auto()
    WAITS = auto()
    """It is not begun now; one that is served goes on."""
    LEAVES = auto()
    """Its registration ends; one that is served is drained before."""
    LOST = auto()
    """Its registration ends, and its host has ended: nothing there can be asked to leave."""


@dataclass(frozen=True)
class ExternalPlace:
    """What becomes of an external engine, whose server stays on its host, and why."""

    fate: Fate = Fate.SERVED
    reason: str = ""
    """Empty where it is served."""

    @property
    def ends(self) -> bool:
        """Whether its registration ends."""
        return self.fate in (Fate.LEAVES, Fate.LOST)

    @property
    def waits_for(self) -> str:
        """Why it is not begun now; empty where it is."""
        return self.reason if self.fate is Fate.WAITS else ""


def place_external(url: str, host: str, run_host: str, hosts: RayHosts) -> ExternalPlace:
    """Whether the server at ``url`` on a host can be served from there. ``run_host``: name of the host of the driver
    and the routers."""
    if host in hosts.lost:
        return ExternalPlace(Fate.LOST, f"its host {host} is lost, or has left the cluster")
    if host in hosts.drains:
        return ExternalPlace(Fate.LEAVES, f"its host {host} is drained")
    if host != run_host and urlsplit(url).scheme != "https":
        return ExternalPlace(Fate.WAITS, f"{url} is on {host} and the routers are on {run_host}: requests, and the "
                             "job's key, would cross the network in the clear; start the server with a certificate of "
                             "the cluster and register it as https://")
    if host in hosts.closed:
        return ExternalPlace(Fate.WAITS, f"its host {host} is cordoned, or not ready")
    if host == run_host:
        return ExternalPlace()
    if host not in hosts.open or host not in hosts.nodes:
        return ExternalPlace(Fate.WAITS, f"its host {host} has not joined the run")
    # The run may be on the host again, so what the routers cannot reach from elsewhere waits, and does not end.
    # The runner asks there whether the server is its own host's, and the router sends requests from elsewhere: only
    # the address of the host in the cluster means the same server to both, which a name or that of a bridge may not.
    if (address := hosts.nodes[host].address) != urlsplit(url).hostname:
        return ExternalPlace(Fate.WAITS, f"{url} has not the address of {host} in the cluster: register the server "
                             f"with {address}, or have the run on {host}")
    return ExternalPlace()


def _some(names: Collection[str]) -> str:
    named = sorted(names)[:_NAMED]
    return ", ".join(named) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
