"""Names and addresses of the hosts that `up --hosts` makes."""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl import config
from elastic_rl.errors import ConfigError, PreflightFailed
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.test_hosts import cluster_hosts, isolated_hosts
from elastic_rl.host.test_hosts.cluster_hosts import ClusterHosts, HostsRecord
from elastic_rl.host.test_hosts.naming import (
    MOST_HOSTS,
    bridge_name,
    choose_subnet,
    host_names,
    is_of_tag,
    link_name,
    tag_of,
)

folders = st.text("abc/", min_size=1, max_size=12).map(lambda text: Path("/runs", text.strip("/")))
networks = st.builds(lambda a, b, length: str(IPv4Network((f"198.{18 + a}.{b}.0", length), strict=False)),
                     st.integers(0, 1), st.integers(0, 255), st.integers(16, 32))


@given(folders, folders, st.integers(1, MOST_HOSTS))
def test_interfaces_of_two_clusters_have_names_that_fit_and_differ(one: Path, other: Path, number: int) -> None:
    tag = tag_of(one)
    for name in (bridge_name(tag), link_name(tag, number)):
        assert len(name) <= 15 and is_of_tag(name, tag)
        assert is_of_tag(name, tag_of(other)) == (one == other)


@given(folders, st.lists(networks, max_size=40), st.integers(1, MOST_HOSTS))
def test_subnet_is_one_that_no_route_leads_to(folder: Path, routes: list[str], number: int) -> None:
    try:
        subnet = choose_subnet(tag_of(folder), ["default", "fe80::/64", *routes])
    except PreflightFailed:
        assert sum(IPv4Network(route).num_addresses for route in routes) >= 1 << 17
        return
    assert not any(subnet.network.overlaps(IPv4Network(route)) for route in routes)
    addresses = {subnet.address(number), subnet.of_machine, *(subnet.address(n) for n in range(1, number))}
    assert len(addresses) == number + 1


def test_clusters_that_are_started_at_once_try_different_subnets_first() -> None:
    assert choose_subnet("000001", []) != choose_subnet("000002", [])


@pytest.mark.parametrize("count", [-1, 0, MOST_HOSTS + 1])
def test_number_of_hosts_has_bounds(count: int) -> None:
    with pytest.raises(ConfigError, match="cannot have"):
        host_names(count)
    assert host_names(2) == ["host-1", "host-2"]


def hosts_in(run_dir: Path) -> ClusterHosts:
    return ClusterHosts(Cluster(config.parse({"run_dir": str(run_dir), "cluster": "lab"})), print)


def test_hosts_that_cannot_be_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a /tmp of its own"):
        hosts_in(Path("/tmp/no-such-folder")).up(2)
    with pytest.raises(ConfigError, match="of a cluster with a name"):
        ClusterHosts(Cluster(config.parse({"run_dir": str(tmp_path)})), print).up(2)
    assert not Path("/tmp/no-such-folder").exists() and not [*tmp_path.iterdir()]


def test_command_for_hosts_that_are_not_there_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those of the cluster would take it for one of test hosts from then on."""
    hosts = hosts_in(tmp_path)
    for command in (hosts.power_off, hosts.power_on, hosts.cut):
        with pytest.raises(ConfigError, match="has no hosts on this machine"):
            command("host-1")
    assert hosts.down() == []
    monkeypatch.setattr(cluster_hosts, "require", lambda: None)
    monkeypatch.setattr(cluster_hosts, "PRIVATE", ())
    monkeypatch.setattr(isolated_hosts, "routes", lambda: ["198.18.0.0/15"])
    with pytest.raises(PreflightFailed, match="routes to all"):
        hosts.up(2)
    assert not hosts.are_beside and not [*tmp_path.iterdir()]
    hosts._paths.test_hosts.mkdir(parents=True)
    assert not hosts.are_beside


def test_down_of_the_hosts_says_what_a_host_was_not_taken_down_for(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = hosts_in(tmp_path)
    path = hosts._paths.test_hosts_record
    path.parent.mkdir(parents=True)
    path.write_bytes(HostsRecord(count=2, subnet="198.18.3.0/24").encode())
    hosts._paths.test_host("host-2").write_text("no folder")
    with pytest.raises(ConfigError, match="host-2: .* is not a folder"):
        hosts.down()


def test_damaged_record_is_an_error_that_down_can_live_with(tmp_path: Path) -> None:
    hosts = hosts_in(tmp_path)
    assert hosts.record is None and not hosts.are_beside
    path = hosts._paths.test_hosts_record
    path.parent.mkdir(parents=True)
    path.write_bytes(HostsRecord(count=2, subnet="198.18.3.0/24").encode())
    assert hosts.record == HostsRecord(count=2, subnet="198.18.3.0/24") and hosts.are_beside
    path.write_text('{"count": 2, "subnet": "x"}')
    assert hosts.are_beside
    with pytest.raises(ConfigError, match="damaged") as e:
        hosts.all()
    assert "elastic-rl down --cluster=lab" in e.value.hint
