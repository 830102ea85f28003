"""Addresses and ports of this host: which are free, and under which others reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from collections import deque
from collections.abc import Iterable

import psutil

from elastic_rl.errors import PreflightFailed

LOOPBACK = "127.0.0.1"
UNSPECIFIED = ("", "0.0.0.0", "::")
"""What a server binds that listens on all addresses of its host."""
_ELSEWHERE = {socket.AF_INET: "198.51.100.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849), which no machine has: the route to them is the default route."""
_PORTS = range(20_000, 30_000)
"""Ports below those that Linux gives to outgoing connections (from 32768 on), one of which could take a server's port
before the server binds it, and below those of Kubernetes' services (30000 to 32767)."""
_PORT_TRIES = 100
_given_ports: deque[tuple[int, socket.socket]] = deque(maxlen=256)
"""Ports that were given out, each with what claims it."""


def is_ip_address(name: str) -> bool:
    """Whether a name is an IP address, and no host name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_port(host: str, port: int) -> str:
    """``HOST:PORT`` as endpoints and URLs have it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port that is free now, and that neither this process nor another one of this project on this host, which
    still runs, was given lately: a server may bind it many seconds later. A foreign process may take it before that,
    but no outgoing connection does. Raises OSError for a host that is not this one."""
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as claimed, socket.socket(_family(host)) as s:
            claim = claimed.enter_context(socket.socket(socket.AF_UNIX))
            claim.bind(f"\0elastic-rl/port/{port}")  # an abstract name, which ends with this process
            s.bind((host, port))
            if len(_given_ports) == _given_ports.maxlen:
                _given_ports.popleft()[1].close()
            _given_ports.append((port, claim))
            claimed.pop_all()
            return port
    with socket.socket(_family(host)) as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def reachable_address(bound: str, peers: Iterable[str] = ()) -> str:
    """The IP address under which other hosts reach a server of this process.

    That is ``bound``, the address the server listens on, unless it stands for all of them ("", 0.0.0.0, ::). Then it is
    the local address of the route to one of ``peers`` (``host:port``, such as etcd's endpoints), else of the default
    route, else of any interface that is up, and loopback only on a machine that has nothing else. The host name is not
    looked up: Debian resolves it to 127.0.1.1. No packet is sent.
    """
    if bound not in UNSPECIFIED:
        return bound
    families = [socket.AF_INET, socket.AF_INET6] if bound == "::" else [socket.AF_INET]
    for family in families:
        for host in [*(peer.rpartition(":")[0].strip("[]") for peer in peers), _ELSEWHERE[family]]:
            found = _source_address(family, host)
            if found and not ipaddress.ip_address(found).is_loopback:
                return found
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    for family in families:
        for name, addresses in psutil.net_if_addrs().items():
            for found in (a.address for a in addresses if a.family == family and name in up):
                address = ipaddress.ip_address(found.partition("%")[0])
                if not address.is_loopback and not address.is_link_local:
                    return found
    return LOOPBACK


def interface_of(address: str) -> str:
    """Name of the network interface of this machine that has the IP address; empty when none has."""
    wanted, ip = ipaddress.ip_address(address), (socket.AF_INET, socket.AF_INET6)
    return next((name for name, addresses in psutil.net_if_addrs().items() if any(
        a.family in ip and ipaddress.ip_address(a.address.partition("%")[0]) == wanted for a in addresses)), "")


def _source_address(family: socket.AddressFamily, host: str) -> str:
    """The address that packets from here to a host would carry; empty when there is no route or no such host."""
    try:
        target = socket.getaddrinfo(host, 9, family, socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def require_port_free(host: str, port: int, *, setting: str) -> None:
    """Raises PreflightFailed, naming the setting, when the port cannot be bound."""
    with socket.socket(_family(host)) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as e:
            raise PreflightFailed(
                f"port {port} on {host} cannot be bound ({setting}): {e.strerror}",
                hint=f"stop what listens there (`ss -ltnp 'sport = :{port}'`) or set another {setting}") from e


def require_address(host: str, *, setting: str) -> None:
    """Raises PreflightFailed, naming the setting, when no server of this machine can listen on ``host``."""
    try:
        with socket.socket(_family(host)) as s:
            s.bind((host, 0))
    except (OSError, UnicodeError) as e:  # a name that no DNS could have is a UnicodeError
        raise PreflightFailed(f"{setting}={host} is no address of this machine: {getattr(e, 'strerror', None) or e}",
                              hint=f"set {setting} to one that `ip addr` lists, or to {LOOPBACK}") from e
