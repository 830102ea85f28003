"""Which user listens on a port of this host, for requests that carry a secret.

A server of ours binds its port seconds after its command line has shown it to every user of the host, and leaves it
when it ends. Another user could listen there meanwhile, and would be given a token with the next request. So each new
connection without TLS is looked at before anything is sent. It may lead to a process of this user, of root, and of
those who have the secret anyway, as the owner of a file with a token. What another host listens with cannot be seen
here: over a network only TLS keeps a secret from who has taken an address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import socket
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from elastic_rl.errors import PortTaken

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_LISTEN = "0A"
_ROOT = 0
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def listener_uids(host: str, port: int) -> set[int] | None:
    """Users whose processes listen on this port of an IP address of this host, or on it of all addresses. None where
    the kernel does not say, as in a sandbox whose tables are empty."""
    wanted = _plain(ipaddress.ip_address(host.partition("%")[0]))
    try:
        listening = [one for table in _TABLES if table.exists() for one in _listening(table)]
    except OSError:
        return None
    if not listening:
        return None
    return {uid for at, bound, uid in listening if bound == port and (at == wanted or at.is_unspecified)}


def require_own_listener(host: str, port: int, users: Collection[int] = ()) -> bool:
    """Whether a process of this user, of root or of one of ``users`` listens there, or the kernel does not say. Raises
    PortTaken for one of another user."""
    uids = listener_uids(host, port)
    if uids is None:
        return True
    if others := uids - {os.geteuid(), _ROOT, *users}:
        raise PortTaken(f"user {_user_name(min(others))} listens at {host}:{port}, where a service of this user should "
                        "be: the request and its secret were not sent",
                        hint="another user of this host has taken the port: have that process ended, and start the "
                             "service again; of a service that is another user's, name the user by owning the file "
                             "with the token, or use TLS")
    return bool(uids)


def owners(*files: Path | str) -> set[int]:
    """The users who own these files, and so know the secrets in them."""
    found = set()
    for file in filter(None, map(str, files)):
        with contextlib.suppress(OSError):  # who reads it says why it cannot be read
            found.add(Path(file).expanduser().stat().st_uid)
    return found


def check_socket(connected: socket.socket, users: Collection[int] = ()) -> None:
    """Checks a TCP connection before anything is sent on it. Raises PortTaken where it leads to another user's process
    on this host, and ConnectionRefusedError where nobody listens any more."""
    _check(connected.getpeername(), connected.getsockname(), users)


def check_connection(event: str, info: Mapping[str, Any], *, users: Collection[int] = ()) -> None:
    """Checks connections as httpx's extension ``trace``. Raises PortTaken for a new connection to another user's
    process on this host, and httpx.ConnectError where nobody listens any more."""
    if stream := _opened(event, info):
        try:
            _check_stream(stream, users)
        except BaseException:
            stream.close()
            raise


async def check_async_connection(event: str, info: Mapping[str, Any], *, users: Collection[int] = ()) -> None:
    """Checks connections as ``check_connection`` does, for asyncio."""
    if stream := _opened(event, info):
        try:
            _check_stream(stream, users)
        except BaseException:
            await stream.aclose()
            raise


def check_connections(request: httpx.Request) -> None:
    """A request hook of an httpx client: ``check_connection`` for each connection that it opens."""
    request.extensions = {**request.extensions, "trace": check_connection}


def _opened(event: str, info: Mapping[str, Any]) -> Any:
    return info["return_value"] if event == "connection.connect_tcp.complete" else None


def _check_stream(stream: Any, users: Collection[int]) -> None:
    try:
        _check(stream.get_extra_info("server_addr"), stream.get_extra_info("client_addr"), users)
    except ConnectionRefusedError as e:
        raise httpx.ConnectError(str(e)) from e


def _check(server: tuple[Any, ...], client: tuple[Any, ...], users: Collection[int]) -> None:
    (host, port), own = server[:2], client[0]
    # A connection to an address of this host comes from the same one, or from another loopback address.
    here = host == own or _plain(ipaddress.ip_address(host.partition("%")[0])).is_loopback
    if here and not require_own_listener(host, port, users):
        raise ConnectionRefusedError(f"nobody listens at {host}:{port} any more")


def _listening(table: Path) -> Iterator[tuple[_Address, int, int]]:
    """Address, port and user of each socket that listens, from a table of proc(5)'s ``/proc/net/tcp``."""
    with table.open(encoding="utf-8") as lines:
        next(lines, None)
        for fields in map(str.split, lines):
            if fields[3] != _LISTEN:
                return  # Linux lists those that listen first; thousands of connections may follow
            address, _, port = fields[1].partition(":")
            yield _to_address(address), int(port, 16), int(fields[7])


def _to_address(text: str) -> _Address:
    """Reads the kernel's form: words of 32 bits, each as this machine has it in memory."""
    words = (int(text[at:at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8))
    return _plain(ipaddress.ip_address(b"".join(words)))


def _plain(address: _Address) -> _Address:
    """An IPv4 address that is written as an IPv6 one in its own form."""
    return getattr(address, "ipv4_mapped", None) or address


def _user_name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)
