"""Registrations of engines that someone else runs: which servers may be registered, on which hosts, and under which
key."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from elastic_rl.config.secrets import HIDDEN
from elastic_rl.coordinator.hosts.view import get_host
from elastic_rl.coordinator.problems import Problem
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.cluster_records import HostPhase
from elastic_rl.etcd.decoding import decode_all, readable
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Engine, ExternalEngine

_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
_SCHEMES = ("http", "https")
_CLOSED = {
    HostPhase.CORDONED: "is cordoned, so it takes nothing more: uncordon it first",
    HostPhase.DRAINING: "is drained, so it takes nothing more: uncordon it first",
    HostPhase.LEFT: "has left the cluster: start its agent, or uncordon it, first",
    HostPhase.LOST: "is lost: start its agent first"}
"""Why no engine is registered on a host in a phase. What is only suspected, or joins, may be ready in a moment."""


def normalized_url(url: str) -> str:
    """The URL in the one form in which it is stored: IP addresses as ``ipaddress`` writes them, IPv4-mapped ones as
    IPv4, and 127.0.0.1 for localhost. Raises a 422 problem unless it is http://HOST:PORT or https://HOST:PORT, and for
    other spellings of an address: numeric forms, trailing dots, and loopback addresses other than 127.0.0.1 and ::1."""
    try:
        parts = urlsplit(url)
        host, port = _canonical_host(parts.hostname or ""), parts.port or 0
    except ValueError:  # an invalid port, half an IPv6 address
        host, port, parts = "", 0, urlsplit("")
    plain = parts.path in ("", "/") and not (parts.query or parts.fragment or "@" in parts.netloc)
    if parts.scheme not in _SCHEMES or not host or not port or not plain or not url.isascii() or not url.isprintable():
        # What is before an @ may be a password, also in a URL that urlsplit finds no user in.
        shown = f"{HIDDEN}@{url.rpartition('@')[2]}" if "@" in url else url
        raise Problem(422, "invalid", "The request is not valid",
                      "url must be http://HOST:PORT, or https://HOST:PORT, with a host name or an IP address in its "
                      f"usual form, not {shown!r}",
                      errors=[{"pointer": "/url", "detail": "http://HOST:PORT or https://HOST:PORT"}])
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def server_of(url: str) -> tuple[str, int]:
    """What two URLs of one server have in common: address and port, whichever loopback address it is."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if (address := _address(host)) is not None:
        host = str(_LOOPBACK if address.is_loopback else address)
    return host, parts.port or 0


def _canonical_host(host: str) -> str:
    """Raises ValueError for other spellings of an address, and for what is no address of one server."""
    address = _address(host)
    if address is None:
        if not _NAME.fullmatch(host) or _NUMERIC.fullmatch(host.rpartition(".")[2]) or host.endswith(".localhost"):
            raise ValueError(host)
        return host
    if address.is_unspecified or address.is_multicast:
        raise ValueError(host)
    if address.version == 4 and address.is_loopback and address != _LOOPBACK:
        raise ValueError(host)
    return str(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host in lower case is; None for a name."""
    if host == "localhost":
        return _LOOPBACK
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def free_registration(etcd: EtcdClient, keys: Keys, url: str, limit: int) -> KeyValue | None:
    """The registration under this URL if it has ended; None where there is none. Raises a 409 problem for a server that
    is registered or is the pool's own already, under any spelling of its address, and where ``limit`` external engines
    are registered."""
    kvs = etcd.range(keys.external_engines_prefix())[0]
    registered = [r for r, _ in decode_all(kvs, ExternalEngine, {})]
    taken = {server_of(r.url): r.engine for r in registered if not r.ended}
    for engine, _ in decode_all(etcd.range(keys.engines_prefix())[0], Engine, {}):
        if not engine.state.ended:
            taken.setdefault(server_of(engine.url), engine.id)
    if (server := server_of(url)) in taken:
        raise Problem(409, "conflict", "The server is registered already", f"{url} is engine {taken[server]}")
    if sum(not r.ended for r in registered) >= limit:
        raise Problem(409, "conflict", "There are too many external engines",
                      f"{limit} are registered, which is coordinator.max_engines; drain one first")
    return next((kv for kv in kvs if kv.key == keys.external_engine(url)), None)


def require_open_host(etcd: EtcdClient, keys: ClusterKeys, name: str) -> None:
    """Raises a 404 problem for a host that the cluster does not have, and a 409 problem for one that takes nothing
    more."""
    host = get_host(etcd, keys, name)
    if host.phase in _CLOSED:
        raise Problem(409, "conflict", "The host takes no engine", f"host {name} {_CLOSED[host.phase]}")


def registration_of(etcd: EtcdClient, keys: Keys, engine_id: str) -> KeyValue | None:
    """The registration of an external engine, if it still stands."""
    return next((kv for registration, kv in readable(etcd.range(keys.external_engines_prefix())[0], ExternalEngine)
                 if registration.engine == engine_id and not registration.ended), None)
