"""The key of a job goes to no process of another user that listens where an engine or a router should."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from support import http_servers

from elastic_rl.config import DeviceConfig, EngineConfig
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.engine.server.external_server import ExternalServer
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import EngineFailed, PortTaken, RouterUnavailable
from elastic_rl.host import listeners
from elastic_rl.host.listeners import check_connections, listener_uids, require_own_listener
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.net import http_client
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.net.engine_key import EngineAccess

KEY = "0123456789abcdef" * 4


class Listener(HTTPServer):
    """Answers everything, and keeps what it was asked."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Answer)
        self.asked: list[str | None] = []
        self.url = f"http://{address[0]}:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Listener

    def do_GET(self) -> None:
        self.server.asked.append(self.headers["Authorization"])
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"workers": []}')

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Listener]:
    with http_servers.serving(Listener(("127.0.0.1", 0))) as server:
        yield server


@pytest.fixture
def foreign(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Listener:
    """As if another user had started it."""
    monkeypatch.setattr(os, "geteuid", lambda own=os.geteuid(): own + 1)
    return listener


@pytest.mark.parametrize(("family", "bound", "asked"), [
    (socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
    (socket.AF_INET6, "::1", "::1"), (socket.AF_INET6, "::", "::1"), (socket.AF_INET6, "::", "127.0.0.1")])
def test_user_of_a_listening_socket_is_found(family: socket.AddressFamily, bound: str, asked: str) -> None:
    with socket.socket(family) as s:
        try:
            s.bind((bound, 0))
        except OSError:
            pytest.skip("this host has no IPv6")
        port = s.getsockname()[1]
        assert listener_uids(asked, port) == set() and not require_own_listener(asked, port), "it does not listen yet"
        s.listen()
        assert listener_uids(asked, port) == {os.geteuid()} and require_own_listener(asked, port)
        assert bound in ("0.0.0.0", "::") or listener_uids("127.0.0.9", port) == set()


def test_kernel_that_does_not_say_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(listeners, "_TABLES", (tmp_path / "none",))
    assert listener_uids("127.0.0.1", 1) is None and require_own_listener("127.0.0.1", 1)


def test_socket_of_another_user_is_refused_beside_one_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    own = os.geteuid()
    table.write_text("  sl  local_address rem_address   st\n" + "".join(
        f"   0: {address} 00000000:0000 {state} 0:0 00:0 0 {uid} 0 1\n" for address, state, uid in (
            ("0100007F:1F90", "0A", own), ("00000000:1F90", "0A", own + 7), ("0100007F:1F91", "01", own + 7))))
    monkeypatch.setattr(listeners, "_TABLES", (table,))
    with pytest.raises(PortTaken, match=r"127\.0\.0\.1:8080.*were not sent"):
        require_own_listener("127.0.0.1", 0x1F90)
    assert not require_own_listener("127.0.0.1", 0x1F91), "a connection is no listener"


def test_router_client_sends_the_key_to_this_user_only(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RouterClient(listener.url, access=EngineAccess(KEY)).workers() == {}
    assert listener.asked == [f"Bearer {KEY}"]
    monkeypatch.setattr(os, "geteuid", lambda own=os.geteuid(): own + 1)
    with pytest.raises(RouterUnavailable, match="were not sent"):
        RouterClient(listener.url, access=EngineAccess(KEY)).workers()
    assert len(listener.asked) == 1


def test_start_of_a_router_says_that_its_port_is_taken(foreign: Listener, tmp_path: Path) -> None:
    router = RouterProcess(ServiceFiles(tmp_path), "router", epoch=1, host="127.0.0.1", log=tmp_path / "log",
                           request_timeout_s=1.0)
    router._url = foreign.url
    with pytest.raises(PortTaken):
        router._live()
    assert not foreign.asked


def test_generate_client_sends_nothing_to_another_user(foreign: Listener) -> None:
    async def run() -> None:
        client = GenerateClient(foreign.url, timeout_s=30.0, retries=2, access=EngineAccess(KEY))
        try:
            await client.generate([1], Sampling(1), 1)
        finally:
            await client.close()

    with pytest.raises(PortTaken):
        asyncio.run(run())
    assert not foreign.asked


def test_start_of_an_engine_on_a_taken_port_ends_its_process(
        foreign: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "elastic_rl.engine.server.sglang_server"
    monkeypatch.setattr(f"{module}.read_key", lambda _: KEY)
    monkeypatch.setattr(f"{module}.free_port", lambda _: foreign.server_port)
    monkeypatch.setattr(f"{module}.python", lambda *_: ["python", "-c", "import time; time.sleep(600)"])
    server = SGLangServer("model", host=LOOPBACK, cfg=EngineConfig(), device=DeviceConfig(type="cpu"),
                          log=tmp_path / "log", seed=1, tag="test-listeners", key_file=tmp_path / "engine.key")
    with pytest.raises(EngineFailed, match="were not sent"):
        server.start()
    assert server.pid == 0 and not foreign.asked
    assert server.probe() is False and not foreign.asked, "one that has ended leaves its port to others"
    server.close()


def test_external_engine_may_be_of_another_user(foreign: Listener) -> None:
    server = ExternalServer(foreign.url, "model", cfg=EngineConfig(), access=EngineAccess(KEY))
    assert server._model_info() == {"workers": []} and foreign.asked == [f"Bearer {KEY}"]
    server.close()


def test_connection_whose_listener_is_gone_is_no_answer(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "listener_uids", lambda *_: set())
    with http_client.client(event_hooks={"request": [check_connections]}) as client, pytest.raises(httpx.ConnectError):
        client.get(listener.url)
    assert not listener.asked
