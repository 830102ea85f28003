"""HTTP clients of this project's own services. They ignore the environment: a proxy named there (HTTP_PROXY) would get
tokens and sign-in links of services that it is not for, and .netrc would replace the token of a request.

Without TLS, nothing is sent to a process of another user of this host (``net.listeners``): each client names, as
``users``, those beside this user and root whose service it may be, or None for a service of anybody. Where somebody
else has the port, httpx.ConnectError says so, as of a service that is not there.

No answer is unpacked: a few bytes could stand for any number, of which a limit on the answer's size would see nothing
before they are in memory. Compression is not asked for, and an answer that has it all the same is an
httpx.DecodingError.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from elastic_rl.errors import PortTaken
from elastic_rl.net.listeners import check_async_connection, check_connection


def request(method: str, url: str | httpx.URL, *, users: Collection[int] | None = (), verify: Any = None,
            hooks: Sequence[Any] = (), timeout: Any = 5.0, **more: Any) -> httpx.Response:
    """One request with a connection of its own. ``hooks``: called with it before it is sent. Raises httpx.HTTPError,
    and what they raise."""
    with _client_for(url, users=users, verify=verify, timeout=timeout, event_hooks={"request": hooks}) as own:
        return own.request(method, url, **more)


@contextmanager
def stream(method: str, url: str, *, users: Collection[int] | None = (), verify: Any = None, timeout: Any = 5.0,
           **more: Any) -> Iterator[httpx.Response]:
    """Sends a request as ``request`` does, with an answer that is read piece by piece."""
    with (_client_for(url, users=users, verify=verify, timeout=timeout) as own,
          own.stream(method, url, **more) as answer):
        yield answer


def _client_for(url: str | httpx.URL, *, verify: Any, **more: Any) -> httpx.Client:
    return client(**(_without_tls(url) if verify is None else {"verify": verify}), **more)


def _without_tls(url: str | httpx.URL) -> dict[str, bool]:
    """httpx reads all trusted certificates for each connection, 20 ms of a core, also for one without TLS. Such a
    connection must not follow redirects, which could lead to one with TLS."""
    return {"verify": False} if str(url).startswith("http://") else {}


def client(*, users: Collection[int] | None = (), event_hooks: Mapping[str, Sequence[Any]] | None = None, **more: Any
           ) -> httpx.Client:
    """A client with pooled connections; the caller closes it. With a ``base_url`` it is for that service only."""
    return httpx.Client(trust_env=False, event_hooks=_hooks(event_hooks, _check(users), _refuse_packed),
                        **{**_without_tls(more.get("base_url", "")), **more})


def async_client(*, users: Collection[int] | None = (), event_hooks: Mapping[str, Sequence[Any]] | None = None,
                 **more: Any) -> httpx.AsyncClient:
    """A client as ``client`` makes it, for asyncio."""
    return httpx.AsyncClient(trust_env=False,
                             event_hooks=_hooks(event_hooks, _async_check(users), _async_refuse_packed), **more)


def _hooks(given: Mapping[str, Sequence[Any]] | None, check: Any, refuse_packed: Any) -> dict[str, list[Any]]:
    hooks = {event: list(hooks) for event, hooks in (given or {}).items()}
    return {**hooks, "request": [check, *hooks.get("request", ())],
            "response": [refuse_packed, *hooks.get("response", ())]}


def _refuse_packed(response: httpx.Response) -> None:
    if (encoding := response.headers.get("Content-Encoding", "identity").strip().lower()) != "identity":
        raise httpx.DecodingError(f"the answer is compressed ({encoding[:20]}), which was not asked for",
                                  request=response.request)


async def _async_refuse_packed(response: httpx.Response) -> None:
    _refuse_packed(response)


def _ask(request: httpx.Request, trace: Any) -> None:
    request.headers["Accept-Encoding"] = "identity"
    if trace is not None:
        request.extensions = {"trace": trace, **request.extensions}


def _check(users: Collection[int] | None) -> Any:
    """A request hook. A ``trace`` that the request has already, or gets from a later hook, checks in its place."""
    def trace(event: str, info: Mapping[str, Any]) -> None:
        try:
            check_connection(event, info, users=users or ())
        except PortTaken as e:
            raise httpx.ConnectError(e.message) from e

    def check(request: httpx.Request) -> None:
        _ask(request, trace if users is not None and request.url.scheme == "http" else None)

    return check


def _async_check(users: Collection[int] | None) -> Any:
    async def trace(event: str, info: Mapping[str, Any]) -> None:
        try:
            await check_async_connection(event, info, users=users or ())
        except PortTaken as e:
            raise httpx.ConnectError(e.message) from e

    async def check(request: httpx.Request) -> None:
        _ask(request, trace if users is not None and request.url.scheme == "http" else None)

    return check
