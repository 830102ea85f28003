"""The address of this host."""

from __future__ import annotations

from elastic_rl.net.addresses import LOOPBACK

_RAY_HEAD_LOOPBACK, _RAY_LOOPBACK = "127.0.0.2", "127.0.0.3"


def ray_head_address(own: str) -> str:
    """The address of Ray's head on a host that others reach at ``own``. ``ray start`` replaces 127.0.0.1 by the
    machine's address, and keeps other addresses of loopback."""
    return _RAY_HEAD_LOOPBACK if own == LOOPBACK else own


def ray_address(own: str) -> str:
    """The address of Ray's worker on such a host. It has another one than a head beside it, since a process that
    connects finds its node by the address."""
    return _RAY_LOOPBACK if own == LOOPBACK else own


def own_address() -> str:
    """The address of the servers of the compute plane: Ray, routers, engines, trainer ranks. Everything that is
    recorded of them has it. They are all on one host so far, on loopback, so that nobody else can reach them; where
    etcd, the coordinators and the DCS nodes listen is another matter (``LocalHost.address``)."""
    return LOOPBACK
