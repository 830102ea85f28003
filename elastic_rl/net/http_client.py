"""HTTP clients of this project's own services. They ignore the environment: a proxy named there (HTTP_PROXY) would get
tokens and sign-in links of services that it is not for, and .netrc would replace the token of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import httpx


def request(method: str, url: str | httpx.URL, *, hooks: Sequence[Callable[[httpx.Request], None]] = (), **more: Any
            ) -> httpx.Response:
    """One request with a connection of its own. ``hooks``: called with it before it is sent. Raises httpx.HTTPError,
    and what they raise."""
    if hooks:
        trust = {"verify": more.pop("verify")} if "verify" in more else _without_tls(url)
        with client(event_hooks={"request": list(hooks)}, **trust) as own:
            return own.request(method, url, **more)
    return httpx.request(method, url, trust_env=False, **{**_without_tls(url), **more})


def stream(method: str, url: str, **more: Any) -> AbstractContextManager[httpx.Response]:
    """Sends a request as ``request`` does, with an answer that is read piece by piece."""
    return httpx.stream(method, url, trust_env=False, **{**_without_tls(url), **more})


def _without_tls(url: str | httpx.URL) -> dict[str, bool]:
    """httpx reads all trusted certificates for each connection, 20 ms of a core, also for one without TLS. Such a
    connection must not follow redirects, which could lead to one with TLS."""
    return {"verify": False} if str(url).startswith("http://") else {}


def client(**more: Any) -> httpx.Client:
    """A client with pooled connections; the caller closes it. With a ``base_url`` it is for that service only."""
    return httpx.Client(trust_env=False, **{**_without_tls(more.get("base_url", "")), **more})


def async_client(**more: Any) -> httpx.AsyncClient:
    """A client as ``client`` makes it, for asyncio."""
    return httpx.AsyncClient(trust_env=False, **more)
