"""Names and addresses of test hosts. Pure.

The names of links, which all clusters of a machine share, follow from the folder of the cluster: a command finds what
an earlier one has made there, also where its record is lost.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Self

from elastic_rl.errors import ConfigError, PreflightFailed

MOST_HOSTS = 200
"""The most hosts of one cluster: the network has 253 addresses for hosts."""
_POOL = IPv4Network("198.18.0.0/15")
"""Addresses for tests of networks (RFC 2544), which no network of an organisation has."""
_MACHINE = 254
"""Last part of the address of the machine itself in each network."""
_PREFIX = "erl"
_TAG_CHARS = 6


def host_names(count: int) -> list[str]:
    """host-1, which has the cluster's etcd and coordinators, host-2 and so on. Raises ConfigError."""
    if not 1 <= count <= MOST_HOSTS:
        raise ConfigError(f"a cluster cannot have {count} hosts on this machine", hint=f"give 1 to {MOST_HOSTS}")
    return [f"host-{number}" for number in range(1, count + 1)]


def tag_of(folder: Path) -> str:
    """What tells the links of a cluster, whose folder this is, from those of the machine's other clusters."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:_TAG_CHARS]


def bridge_name(tag: str) -> str:
    return _PREFIX + tag


def link_name(tag: str, number: int) -> str:
    """The machine's end of the link of a host; at most 15 characters, as for any interface."""
    return f"{_PREFIX}{tag}-{number}"


def is_of_tag(interface: str, tag: str) -> bool:
    """Whether an interface of the machine is a bridge or link of the tag's."""
    return interface == bridge_name(tag) or interface.startswith(f"{bridge_name(tag)}-")


@dataclass(frozen=True)
class Subnet:
    """The network of the hosts of one cluster."""

    network: IPv4Network

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        return cls(IPv4Network(text))

    @property
    def of_machine(self) -> str:
        """The address of the machine itself."""
        return str(self.network[_MACHINE])

    def address(self, number: int) -> str:
        """The address of the host with a number, from 1 on."""
        return str(self.network[number])

    def with_length(self, address: str) -> str:
        """An address as ``ip address`` takes it."""
        return f"{address}/{self.network.prefixlen}"


def choose_subnet(tag: str, routes: Iterable[str]) -> Subnet:
    """A network that none of the machine's routes leads to. ``routes``: destinations, as ``ip route`` names them. Which
    one is tried first follows from the tag, so that two clusters that are started at once get different ones. Raises
    PreflightFailed where all are taken."""
    taken = [network for text in routes if (network := _network(text)) is not None]
    candidates = list(_POOL.subnets(new_prefix=24))
    first = int(tag, 16) % len(candidates)
    for candidate in (*candidates[first:], *candidates[:first]):
        if not any(candidate.overlaps(each) for each in taken):
            return Subnet(candidate)
    raise PreflightFailed(f"this machine has routes to all of {_POOL}, where test hosts have their addresses",
                          hint="`ip route` shows them; take down what they are for")


def _network(text: str) -> IPv4Network | None:
    """The destination of a route; None for the default route, and for what is none."""
    try:
        return IPv4Network(text, strict=False) if text != "default" else None
    except ValueError:
        return None
