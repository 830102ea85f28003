"""Our HTTP clients: none goes by a proxy of the environment, or reads certificates that it does not need."""

from __future__ import annotations

import ast
import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from support import http_servers

from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.net import http_client

ROOT = Path(__file__).resolve().parents[3] / "elastic_rl"
_MAKERS = {"get", "post", "put", "patch", "delete", "head", "options", "request", "stream", "Client", "AsyncClient"}


class _Server(HTTPServer):
    requests: list[str]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[tuple[_Server, _Server]]:
    made = _Server(("127.0.0.1", 0), _Handler), _Server(("127.0.0.1", 0), _Handler)
    for server in made:
        server.requests = []
        http_servers.serve(server)
    yield made
    for server in made:
        http_servers.close(server)


def test_proxy_of_the_environment_gets_nothing(servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch
                                               ) -> None:
    api, proxy = servers
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    AdminClient(ClusterInfo("j", [], [f"http://127.0.0.1:{api.server_port}"], "")).get("")
    assert (api.requests, proxy.requests) == (["/v1/jobs/j"], [])


def test_only_http_client_makes_clients() -> None:
    wrong = []
    for file in ROOT.rglob("*.py"):
        if "bench" in file.relative_to(ROOT).parts or file.name == "http_client.py" or "httpx" not in file.read_text():
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="httpx"), attr=name)) if name in _MAKERS:
                    wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} httpx.{name}")
    assert wrong == []


def test_clients_read_trusted_certificates_for_tls_only_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tls.trust("") is tls.trust("")

    def read(*_: object, **__: object) -> ssl.SSLContext:
        raise AssertionError("the trusted certificates were read")

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", read)
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", read)
    tls._trust_of_the_system.cache_clear()
    http_client.client(base_url="http://127.0.0.1:9").close()
    with pytest.raises(EtcdUnavailable):  # since nobody listens there
        AdminClient(ClusterInfo("j", [], ["http://127.0.0.1:9"], "", ""), retry_budget_s=0.0).get("")
    with pytest.raises(AssertionError):
        http_client.client(base_url="https://127.0.0.1:9")


def test_certificates_that_a_caller_trusts_are_used_whatever_the_base_url(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, object] = {}
    monkeypatch.setattr(httpx, "Client", lambda **given: made.update(given))
    own = ssl.create_default_context()
    http_client.client(base_url="http://127.0.0.1:9", verify=own)
    assert made["verify"] is own


def test_packed_answer_is_refused_before_it_is_unpacked() -> None:
    """A reward service's 800 bytes were 1.2 GiB in memory, beside a limit of 4 MiB."""
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["Accept-Encoding"])
        return httpx.Response(200, stream=_Unread(), headers={"Content-Encoding": "gzip"})

    async def ask() -> None:
        async with http_client.async_client(transport=httpx.MockTransport(handle)) as client:
            await client.get("http://a")

    with http_client.client(transport=httpx.MockTransport(handle)) as client, pytest.raises(
            httpx.DecodingError, match="compressed"):
        client.get("http://a", headers={"Accept-Encoding": "gzip"})
    with pytest.raises(httpx.DecodingError, match="compressed"):
        asyncio.run(ask())
    assert asked == ["identity"] * 2


class _Unread(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("it is read")

    def __aiter__(self) -> AsyncIterator[bytes]:
        raise AssertionError("it is read")
