"""Hosts of a cluster whose etcd is this test's own: there is one cluster in an etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.etcd_server import EtcdServers
    from support.host_agents import Hosts

    from elastic_rl.etcd.client import EtcdClient


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[EtcdServers]:
    """One member, that the test may stop."""
    from support.etcd_server import EtcdServers

    out = EtcdServers(tmp_path / "etcd", 1)
    try:
        yield out.start()
    finally:
        out.close()


@pytest.fixture
def own_etcd(own_servers: EtcdServers) -> Iterator[EtcdClient]:
    from elastic_rl.etcd.client import EtcdClient

    with EtcdClient(own_servers.endpoints, call_timeout_s=2.0) as connected:
        yield connected


@pytest.fixture
def host(own_etcd: EtcdClient, tmp_path: Path) -> Iterator[Hosts]:
    """Makes a host by its name, without an agent."""
    from support.host_agents import HostUnderTest

    made: list[HostUnderTest] = []

    def make(name: str = "h1", folder: str = "", ttl_s: float = 60.0) -> HostUnderTest:
        made.append(HostUnderTest(own_etcd, tmp_path / (folder or name), name, ttl_s))
        return made[-1]

    yield make
    for each in made:
        each.close()
