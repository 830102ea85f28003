"""Hosts with networks of their own on this machine: namespaces on bridges, whose links can be cut one by one."""

from __future__ import annotations

import os
import secrets
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import psutil
import pytest


@dataclass(frozen=True)
class Host:
    """A namespace with one link to each network."""

    name: str
    address: str
    """In the network of the clients."""
    address_to_etcd: str
    """In the other one, whose link can be cut."""

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
    """Two networks that reach this machine and every host: one to etcd, one for the clients. Skips the test where none
    can be made. ``etcd_address``: this machine's own in the first."""

    def __init__(self) -> None:
        tag, number = secrets.token_hex(2), 1 + secrets.randbelow(250)
        self._tag, self._made, self._hosts = f"rl{tag}", list[list[str]](), dict[str, int]()
        self._subnets = {"s": f"10.201.{number}", "c": f"10.202.{number}"}
        self.etcd_address = f"{self._subnets['s']}.1"

    def __enter__(self) -> Self:
        if os.geteuid() or not self._try("ip", "netns", "add", f"{self._tag}-try"):
            pytest.skip("no network namespace can be made here (needs root and CAP_SYS_ADMIN)")
        self._run("ip", "netns", "del", f"{self._tag}-try")
        try:
            for side, subnet in self._subnets.items():
                self._make(["link", self._bridge(side)], "ip", "link", "add", self._bridge(side), "type", "bridge")
                self._run("ip", "address", "add", f"{subnet}.1/24", "dev", self._bridge(side))
                self._run("ip", "link", "set", self._bridge(side), "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._made:
            kind, name = self._made.pop()
            self._try("ip", kind, "del", name)

    def host(self, name: str) -> Host:
        """A new host, connected to both."""
        number = len(self._hosts) + 2
        space = f"{self._tag}-{name}"
        self._hosts[name] = number
        self._make(["netns", space], "ip", "netns", "add", space)
        self._run("ip", "-n", space, "link", "set", "lo", "up")
        for side, subnet in self._subnets.items():
            outer = self._link(name, side)
            self._make(["link", outer], "ip", "link", "add", outer, "type", "veth", "peer", "name", f"{side}0",
                       "netns", space)
            self._run("ip", "link", "set", outer, "master", self._bridge(side), "up")
            self._run("ip", "-n", space, "address", "add", f"{subnet}.{number}/24", "dev", f"{side}0")
            self._run("ip", "-n", space, "link", "set", f"{side}0", "up")
        return Host(space, *(f"{self._subnets[side]}.{number}" for side in ("c", "s")))

    def cut_from_etcd(self, name: str) -> None:
        """Takes the host's link to etcd down; what is on its way, and what is sent then, is lost and nobody is told."""
        self._run("ip", "link", "set", self._link(name, "s"), "down")

    def heal(self, name: str) -> None:
        self._run("ip", "link", "set", self._link(name, "s"), "up")

    def _bridge(self, side: str) -> str:
        return f"{self._tag}-{side}"

    def _link(self, name: str, side: str) -> str:
        return f"{self._tag}{side}{self._hosts[name]}"

    def _make(self, made: list[str], *command: str) -> None:
        self._run(*command)
        self._made.append(made)

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=10)

    def _try(self, *command: str) -> bool:
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0


class IsolatedHost:
    """A host of ``TwoNetworks`` that shares neither processes, mounts, names nor memory with others: its namespaces for
    them, its /dev/shm and its /tmp are its own. Skips the test where they cannot be made."""

    def __init__(self, host: Host) -> None:
        self.address = host.address
        self._outer = subprocess.Popen(
            [*host.inside, "unshare", "--pid", "--mount", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc",
             "bash", "-c", f"hostname {host.name} && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp && "
                           "echo up && exec sleep infinity"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._outer.stdout
        if self._outer.stdout.readline() != b"up\n":
            self._outer.wait()
            pytest.skip("no pid, mount, ipc and uts namespaces can be made here (needs CAP_SYS_ADMIN)")
        (self._init,) = psutil.Process(self._outer.pid).children()

    @property
    def inside(self) -> list[str]:
        """What a command line begins with that runs there."""
        return ["nsenter", "--target", str(self._init.pid), "--mount", "--uts", "--ipc", "--net", "--pid"]

    def processes(self) -> list[psutil.Process]:
        space = os.readlink(f"/proc/{self._init.pid}/ns/pid")
        return [p for p in psutil.process_iter() if _pid_namespace(p) == space]

    def power_off(self) -> None:
        """Ends everything there at once, as a power cut does. No error when it is off."""
        with suppress(psutil.NoSuchProcess):
            self._init.kill()
        self._outer.wait()


def _pid_namespace(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    except OSError:
        return ""
