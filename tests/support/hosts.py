"""Hosts with networks of their own on this machine: the product's test hosts, and namespaces on two bridges, one of
which can be cut."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest

from elastic_rl.errors import PreflightFailed
from elastic_rl.host.test_hosts.bridge import Bridge, ip, routes
from elastic_rl.host.test_hosts.isolated_hosts import IsolatedHosts, require
from elastic_rl.host.test_hosts.naming import bridge_name, choose_subnet, link_name


def require_namespaces() -> None:
    """Skips the test where no test host can be made."""
    try:
        require()
    except PreflightFailed as e:
        pytest.skip(str(e))


@dataclass(frozen=True)
class Host:
    """A namespace with one link to each network."""

    name: str
    address: str
    """The host's address in the network of the clients."""
    address_to_etcd: str
    """The host's address in the other network, whose link can be cut."""

    @property
    def inside(self) -> list[str]:
        """What a command line begins with that runs there; it becomes the command, under the same pid."""
        return ["ip", "netns", "exec", self.name]

    def reaches(self, endpoint: str) -> bool:
        """Whether a connection from there to ``host:port`` can be made."""
        host, _, port = endpoint.rpartition(":")
        return subprocess.run([*self.inside, "timeout", "1", "bash", "-c", f"</dev/tcp/{host}/{port}"],
                              capture_output=True).returncode == 0


class TwoNetworks:
    """Two networks that reach this machine and every host: one to etcd, one for the clients. The hosts share everything
    else with this machine. Skips the test where none can be made."""

    def __init__(self) -> None:
        self._hosts = dict[str, int]()

    def __enter__(self) -> Self:
        require_namespaces()
        self._tag = secrets.token_hex(3)
        self._to_etcd, self._clients = (_bridge(secrets.token_hex(3)) for _ in range(2))
        try:
            self._to_etcd.make()
            self._clients.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._hosts:
            with contextlib.suppress(PreflightFailed):
                ip("netns", "del", f"{self._tag}-{name}")
        for bridge in (self._to_etcd, self._clients):
            bridge.remove()

    @property
    def etcd_address(self) -> str:
        """This machine's own in the network to etcd."""
        return self._to_etcd.subnet.of_machine

    @property
    def client_address(self) -> str:
        """This machine's own in the network of the clients."""
        return self._clients.subnet.of_machine

    def host(self, name: str) -> Host:
        """A new host, connected to both."""
        number = self._hosts[name] = len(self._hosts) + 1
        space = f"{self._tag}-{name}"
        ip("netns", "add", space)
        host = Host(space, self._clients.subnet.address(number), self._to_etcd.subnet.address(number))
        self._to_etcd.connect(number, space, host.inside, "s0")
        self._clients.connect(number, space, host.inside, "c0")
        return host

    def cut_from_etcd(self, name: str) -> None:
        """Takes the host's link to etcd down; what is on its way, and what is sent then, is lost and nobody is told."""
        self._to_etcd.cut(self._hosts[name])

    def heal(self, name: str) -> None:
        self._to_etcd.heal(self._hosts[name])


def _bridge(tag: str) -> Bridge:
    """One whose network no other has now."""
    return Bridge(bridge_name(tag), choose_subnet(tag, routes()), lambda number: link_name(tag, number))


class IsolatedHost:
    """One of the product's test hosts, outside of any cluster."""

    def __init__(self, hosts: IsolatedHosts, name: str) -> None:
        self._hosts, self.name, self.address = hosts, name, hosts.address(name)

    @property
    def inside(self) -> list[str]:
        """What a command line begins with that runs there."""
        return self._hosts.inside(self.name)

    def processes(self) -> list[psutil.Process]:
        return self._hosts.processes(self.name)

    def power_on(self) -> None:
        self._hosts.power_on(self.name)

    def power_off(self) -> None:
        """Ends everything there at once, as a power cut does. No error when it is off."""
        self._hosts.power_off(self.name)

    def cut(self) -> None:
        self._hosts.cut(self.name)

    def heal(self) -> None:
        self._hosts.heal(self.name)


@contextlib.contextmanager
def isolated_hosts(names: Sequence[str], logs: Path) -> Iterator[IsolatedHosts]:
    """Hosts that are on, and off at the end, whatever happens. Skips the test where none can be made."""
    require_namespaces()
    hosts = IsolatedHosts.new(secrets.token_hex(3), names, logs)
    try:
        hosts.bridge.make()
        for name in names:
            hosts.power_on(name)
        yield hosts
    finally:
        hosts.remove()
