"""A bridge of this machine, and links from it into network namespaces: a network whose links can be cut one by one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Sequence

import psutil

from elastic_rl.errors import PreflightFailed
from elastic_rl.host.test_hosts.naming import Subnet

_IP_S = 10.0
"""Longest wait for ``ip``, which takes milliseconds."""
AS_ROOT = "run it as root, with CAP_SYS_ADMIN and CAP_NET_ADMIN; in a container, one that is started with --privileged"


def ip(*arguments: str, inside: Sequence[str] = ()) -> str:
    """What ``ip`` prints. ``inside``: what a command line begins with that runs in another namespace. Raises
    PreflightFailed."""
    try:
        done = subprocess.run([*inside, "ip", *arguments], capture_output=True, encoding="utf-8", errors="replace",
                              timeout=_IP_S)
    except FileNotFoundError as e:
        raise PreflightFailed(f"the program {e.filename} is not installed",
                              hint="install iproute2, which has ip, and util-linux, which has nsenter") from e
    except subprocess.TimeoutExpired as e:
        raise PreflightFailed(f"`ip {' '.join(arguments)}` has not ended in {_IP_S:g} s") from e
    if done.returncode:
        raise PreflightFailed(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip() or done.returncode}",
                              hint=AS_ROOT if "not permitted" in done.stderr else "")
    return done.stdout


def routes() -> list[str]:
    """The destinations of the routes of this machine. Raises PreflightFailed."""
    return [str(route["dst"]) for route in json.loads(ip("-json", "-4", "route", "show", "table", "all") or "[]")
            if "dst" in route]


def interfaces() -> list[str]:
    """Names of the network interfaces of this machine."""
    return sorted(psutil.net_if_stats())


class Bridge:
    """``link``: the name of the machine's end of a host's link, by the host's number."""

    def __init__(self, name: str, subnet: Subnet, link: Callable[[int], str]) -> None:
        self.name, self.subnet, self.link = name, subnet, link

    def make(self) -> None:
        """Makes the bridge where it is not, or not complete. Raises PreflightFailed."""
        if self.name not in interfaces():
            ip("link", "add", self.name, "type", "bridge")
        ip("address", "replace", self.subnet.with_length(self.subnet.of_machine), "dev", self.name)
        ip("link", "set", self.name, "up")

    def connect(self, number: int, netns: str, inside: Sequence[str], device: str) -> None:
        """Gives a host its link, where that is not there, or not complete. ``netns``: its network namespace, by name
        or by the pid of a process; ``inside``: what a command line begins with that runs there; ``device``: the host's
        end of the link. A link that is cut is healed. Raises PreflightFailed."""
        link = self.link(number)
        try:
            ip("link", "show", device, inside=inside)
        except PreflightFailed:  # what there is on this side is of a host that has ended
            with contextlib.suppress(PreflightFailed):  # it goes by itself, and may be gone now
                ip("link", "del", link)
            ip("link", "add", link, "type", "veth", "peer", "name", device, "netns", netns)
        address = self.subnet.with_length(self.subnet.address(number))
        ip("address", "replace", address, "dev", device, inside=inside)
        ip("link", "set", device, "up", inside=inside)
        ip("link", "set", "lo", "up", inside=inside)
        self.heal(number)

    def cut(self, number: int) -> None:
        """Takes the host's link down: what is on its way, and what is sent then, is lost, and nobody is told. Raises
        PreflightFailed."""
        ip("link", "set", self.link(number), "down")

    def impairment(self, number: int) -> str:
        """Name of the device that is in the place of the host's link on the bridge while the link is impaired
        (``impaired_link``)."""
        return f"{self.link(number)}i"

    def heal(self, number: int) -> None:
        """Ends ``cut`` and an impairment of the host's link. Raises PreflightFailed."""
        if self.impairment(number) in interfaces():
            with contextlib.suppress(PreflightFailed):  # it goes with its process, and may be gone now
                ip("link", "del", self.impairment(number))
        ip("link", "set", self.link(number), "master", self.name, "up")

    def is_on_bridge(self, device: str) -> bool:
        master = os.path.realpath(f"/sys/class/net/{device}/master")
        return os.path.basename(master) == self.name

    def is_cut(self, number: int) -> bool:
        """Whether the host has a link, and it is down."""
        found = psutil.net_if_stats().get(self.link(number))
        return found is not None and not found.isup

    def remove(self) -> None:
        """Removes the bridge. The links of hosts end with their network namespaces. Raises PreflightFailed."""
        if self.name in interfaces():
            ip("link", "del", self.name)
