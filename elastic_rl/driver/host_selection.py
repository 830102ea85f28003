"""Which hosts a part of the compute plane may be placed on, by their labels. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from elastic_rl.config import HostSelector, selector_text
from elastic_rl.driver.hosts_of_ray import RayHosts

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
        """Whether what waits for room by an earlier selection should be placed anew: it may go to other hosts now, or
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


def _some(names: Collection[str]) -> str:
    named = sorted(names)[:_NAMED]
    return ", ".join(named) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
