"""The address that a process tells others, on machines with several networks, one, and none."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.hosts import Host, TwoNetworks

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api.listening import advertised
from elastic_rl.errors import PreflightFailed
from elastic_rl.net.addresses import free_port, reachable_address, require_port_free


def on(host: Host, program: str) -> str:
    """What a Python program prints in a process of that host."""
    return subprocess.run([*host.inside, sys.executable, "-c", program], check=True, capture_output=True, text=True,
                          timeout=60).stdout.strip()


def address_on(host: Host, bound: str, *peers: str) -> str:
    return on(host, f"from elastic_rl.net.addresses import reachable_address as r; print(r({bound!r}, {peers!r}))")


@pytest.fixture(scope="module")
def networks() -> Iterator[TwoNetworks]:
    with TwoNetworks() as made:
        yield made


@pytest.fixture(scope="module")
def host(networks: TwoNetworks) -> Host:
    return networks.host("a")


def test_wildcard_bind_is_advertised_with_the_address_of_the_route_to_etcd(networks: TwoNetworks, host: Host) -> None:
    in_etcd_network = networks.etcd_address.rpartition(".")[0]
    url = on(host, "from elastic_rl.config import CoordinatorConfig; from elastic_rl.coordinator.api import listening; "
             f"print(listening.advertised(CoordinatorConfig(host='0.0.0.0'), 80, ['{networks.etcd_address}:2379']))")
    assert url.startswith(f"http://{in_etcd_network}.")
    of_clients = networks.client_address
    assert address_on(host, "0.0.0.0", "no-such-host.invalid:2379", f"{of_clients}:2379") == host.address
    assert address_on(host, "::", f"{of_clients}:2379") == host.address


def test_loopback_etcd_does_not_make_a_machine_with_a_network_advertise_loopback(
        networks: TwoNetworks, host: Host) -> None:
    own = {host.address, networks.etcd_address.rpartition(".")[0] + "." + host.address.rpartition(".")[2]}
    assert address_on(host, "0.0.0.0", "127.0.0.1:2379") in own, "there is no default route on this host"


def test_loopback_is_advertised_where_there_is_nothing_else(networks: TwoNetworks) -> None:
    alone = networks.host("alone")
    for side in ("s0", "c0"):
        subprocess.run(["ip", "-n", alone.name, "link", "set", side, "down"], check=True, timeout=10)
    assert address_on(alone, "0.0.0.0", "127.0.0.1:2379", "10.201.0.1:2379") == "127.0.0.1"


def test_bound_and_configured_addresses_are_advertised_as_they_are() -> None:
    assert reachable_address("10.1.2.3", ["192.0.2.1:2379"]) == "10.1.2.3"
    assert advertised(CoordinatorConfig(host="127.0.0.1"), 80, []) == "http://127.0.0.1:80"
    assert advertised(CoordinatorConfig(host="::1"), 80, []) == "http://[::1]:80"
    assert advertised(CoordinatorConfig(host="0.0.0.0", advertise_host="api.example"), 80, []) == "http://api.example:80"


def test_ports_of_ipv6_addresses_are_checked_too() -> None:
    with (socket.create_server(("::1", 0), family=socket.AF_INET6) as taken,
          pytest.raises(PreflightFailed, match="Address already in use")):
        require_port_free("::1", taken.getsockname()[1], setting="coordinator.ports")
    require_port_free("::1", free_port("::1"), setting="coordinator.ports")
