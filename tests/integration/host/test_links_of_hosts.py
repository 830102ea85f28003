"""The network between test hosts under each of its faults, measured by datagrams from one to the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.hosts import isolated_hosts
from support.waiting import wait_until

from elastic_rl.host.test_hosts.bridge import interfaces
from elastic_rl.host.test_hosts.impaired_link import Impairment
from elastic_rl.host.test_hosts.isolated_hosts import IsolatedHosts
from elastic_rl.host.test_hosts.link_probe import arrivals, silent_connection

COUNT = 50


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IsolatedHosts]:
    with isolated_hosts("abc", tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture(autouse=True)
def healthy(hosts: IsolatedHosts) -> Iterator[None]:
    yield
    for name in hosts.names:
        hosts.heal(name)
    for one, other in ("ab", "ba", "ac", "bc"):
        assert arrived(hosts, one, other) == COUNT, "healed"


def arrived(hosts: IsolatedHosts, sender: str, receiver: str) -> int:
    return arrivals(hosts, sender, receiver, count=COUNT).arrived


def test_host_that_is_cut_off_neither_hears_nor_is_heard(hosts: IsolatedHosts) -> None:
    hosts.cut("b")
    assert hosts.is_cut("b")
    assert (arrived(hosts, "a", "b"), arrived(hosts, "b", "a"), arrived(hosts, "a", "c")) == (0, 0, COUNT)


def test_blocked_way_loses_what_goes_one_way_alone(hosts: IsolatedHosts) -> None:
    hosts.block("a", "b")
    assert (arrived(hosts, "a", "b"), arrived(hosts, "b", "a"), arrived(hosts, "a", "c")) == (0, COUNT, COUNT)


@pytest.mark.parametrize("impairment", [Impairment(delay_s=0.08), Impairment(loss=0.3),
                                        Impairment(bytes_per_s=32 << 10)], ids=str)
def test_impaired_link_is_late_lossy_or_slow_both_ways(hosts: IsolatedHosts, impairment: Impairment) -> None:
    hosts.impair("b", impairment)
    for one, other in ("ab", "ba"):
        found = arrivals(hosts, one, other, count=COUNT, pause_s=0.0005)
        assert (found.arrived == COUNT) == (not impairment.loss) and found.arrived > 0
        assert found.delay_s >= impairment.delay_s
        assert not impairment.bytes_per_s or found.bytes_per_s <= 1.2 * impairment.bytes_per_s
    assert arrived(hosts, "a", "c") == COUNT


def test_link_whose_carrier_was_killed_is_dead_until_it_is_healed(hosts: IsolatedHosts) -> None:
    hosts.impair("b", Impairment(delay_s=0.01))
    device = hosts.bridge.impairment(2)
    [carrier] = [p for p in psutil.Process().children() if device in p.cmdline()]
    carrier.kill()
    wait_until(lambda: device not in interfaces(), what="the end of its device")
    assert arrived(hosts, "a", "b") == 0


def test_power_cut_leaves_the_connections_of_others_open_and_silent(hosts: IsolatedHosts, tmp_path: Path) -> None:
    script = "import socket; s = socket.create_server(('', 7)); print('on', flush=True); c, _ = s.accept(); c.recv(1)"
    server = psutil.Popen([*hosts.inside("b"), "python3", "-c", script], stdout=-1)
    assert server.stdout.readline()
    with silent_connection(hosts, "a", "b", 7) as is_silent:
        hosts.power_off("b")
        server.wait(60)
        assert is_silent() and hosts.init("b") is None
        hosts.power_on("b")
    server.stdout.close()
