"""The name and the addresses of this host."""

from __future__ import annotations

from elastic_rl.config import Config
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.addresses import LOOPBACK

_RAY_LOOPBACK = "127.0.0.2"


def host_address(cfg: Config) -> str:
    """The address at which other hosts of the job's cluster reach the servers of this one: Ray, routers and engines
    listen there, and what is recorded of them has it. Loopback where the cluster is one host without an address. Raises
    ConfigError for a damaged file."""
    return LocalHost.of(ClusterPaths.of(cfg)).address


def host_name(cfg: Config) -> str:
    """The name of this host in the job's cluster. Raises ConfigError for a damaged file."""
    return LocalHost.of(ClusterPaths.of(cfg)).name


def own_address() -> str:
    """The address of servers that only processes of this host use: those of the queue, and of trainer ranks and their
    rendezvous where all of them are on the host of the driver."""
    return LOOPBACK


def ray_address(own: str) -> str:
    """The address of Ray's nodes on a host that others reach at ``own``. ``ray start`` replaces 127.0.0.1 by the
    machine's address, and keeps other addresses of loopback."""
    return _RAY_LOOPBACK if own == LOOPBACK else own
