"""Where a request comes from: checks against foreign web pages. Pure.

A page of another site can make a browser send requests to any address that the browser reaches, loopback included. It
cannot choose the headers looked at here:

- ``Host`` names the address that the browser believes to talk to. Under DNS rebinding that is the page's own name.
- ``Sec-Fetch-Site`` says how the page is related to that address (https and loopback only; Fetch Metadata).
- ``Origin`` names the page. Browsers send it with every request but a GET or HEAD to the page's own site.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Self
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.net.addresses import is_ip_address

_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^:\[\]@/?#\s]+)(:\d{0,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_OWN_SITE = ("same-origin", "none")
"""``none``: typed into the address bar, or opened from a bookmark."""
_READS = ("GET", "HEAD", "OPTIONS")


class ServedHosts:
    """The host names and addresses under which a replica may be reached."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names``: host names; ``*`` in them stands for any text."""
        self._names = {name.lower().rstrip(".") for name in names if name}

    @classmethod
    def from_config(cls, cfg: CoordinatorConfig) -> Self:
        return cls(["localhost", socket.gethostname(), cfg.host, cfg.advertise_host, *cfg.allowed_hosts])

    def check(self, headers: Headers) -> None:
        """Raises a 421 problem unless the request is for one of them. Any IP address will do: a browser that was sent
        to an address, and not to a name, cannot have been sent there by DNS."""
        name = host_name(headers.get("host", ""))
        if name and (is_ip_address(name) or any(fnmatchcase(name, served) for served in self._names)):
            return
        raise Problem(421, Kind.UNKNOWN_HOST, "The replica does not serve this host name",
                      f"the request is for host {name or headers.get('host', '')!r}; add the name to "
                      "coordinator.allowed_hosts if clients shall use it")


def host_name(header: str) -> str:
    """The name or address in a Host header, in lower case and without the port; "" for what is neither."""
    matched = _HOST.fullmatch(header.strip())
    return matched["name"].strip("[]").lower().rstrip(".") if matched else ""


def check_origin(method: str, headers: Headers, *, cookie: bool) -> None:
    """Raises a 403 problem for a request that a page of another site, or of another port, has sent.

    ``cookie``: whether the request is let in by a cookie. Browsers attach that by themselves, so a change then has to
    say that it comes from our own page. SameSite keeps other sites out as well, but takes every port of a host, and so
    every program of a machine, for one site.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None and site not in _OWN_SITE:
        raise _cross_site(f"Sec-Fetch-Site is {site}")
    if origin is not None and not _is_own(origin, headers.get("host", "")):
        raise _cross_site(f"Origin is {origin}")
    if cookie and method not in _READS and site is None and origin is None:
        raise _cross_site("a change with a session cookie needs an Origin header, which browsers send")


def _cross_site(detail: str) -> Problem:
    return Problem(403, Kind.CROSS_SITE, "The request comes from another site", detail)


def _is_own(origin: str, host: str) -> bool:
    """Whether an Origin is that of our own page: the scheme may be a TLS proxy's, host and port may not differ."""
    try:
        parts = urlsplit(origin)
    except ValueError:  # such as half an IPv6 address
        return False
    port = _DEFAULT_PORTS.get(parts.scheme)
    return port is not None and bool(host) and (
        parts.netloc.lower().removesuffix(port) == host.strip().lower().removesuffix(port))
