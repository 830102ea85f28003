"""The address of this host."""

from __future__ import annotations

from elastic_rl.net.addresses import LOOPBACK


def own_address() -> str:
    """The address under which others reach the servers of this host that have no setting for it: etcd, Ray, routers,
    engines, trainer ranks. Everything that is recorded of them has it. A cluster has one host so far, whose servers
    are on loopback, so that nobody else can reach them."""
    return LOOPBACK
