"""Keys and tokens go to no process of another user that listens where a service of this user should."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from fastapi import Request
from support import http_servers

from elastic_rl.config import DeviceConfig, EngineConfig
from elastic_rl.coordinator.api.auth import Role
from elastic_rl.coordinator.api.authentication import Caller
from elastic_rl.coordinator.api.forwarding import Forwarder
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.client.event_stream import EventFollower
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.security import Security
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.engine.server.external_server import ExternalServer
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import EngineFailed, EtcdUnavailable, NodeUnavailable, PluginFailed, PortTaken, RouterUnavailable
from elastic_rl.etcd.records import DcsNode, Leader
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.net import http_client, listeners
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.net.engine_key import EngineAccess
from elastic_rl.net.listeners import check_connections, listener_uids, require_own_listener
from elastic_rl.rewards.base import RewardContext, RewardFn
from elastic_rl.rewards.remote import Remote

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
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"workers": []}')

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listener() -> Iterator[Listener]:
    with http_servers.serving(Listener(("127.0.0.1", 0))) as server:
        yield server


OTHER = 54_321
"""A user that is neither this one nor root."""


def _belongs_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    real = listeners._listening
    monkeypatch.setattr(listeners, "_listening", lambda table: ((at, port, OTHER) for at, port, _ in real(table)))


@pytest.fixture
def foreign(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Listener:
    """A listener that another user seems to have started."""
    _belongs_to_another(monkeypatch)
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
    own = os.geteuid() or OTHER + 1
    monkeypatch.setattr(os, "geteuid", lambda: own)
    table.write_text("  sl  local_address rem_address   st\n" + "".join(
        f"   0: {address} 00000000:0000 {state} 0:0 00:0 0 {uid} 0 1\n" for address, state, uid in (
            ("0100007F:1F90", "0A", own), ("00000000:1F90", "0A", own + 7), ("0100007F:1F91", "01", own + 7))))
    monkeypatch.setattr(listeners, "_TABLES", (table,))
    with pytest.raises(PortTaken, match=r"127\.0\.0\.1:8080.*were not sent"):
        require_own_listener("127.0.0.1", 0x1F90)
    assert require_own_listener("127.0.0.1", 0x1F90, {own + 7}), "who knows the secret"
    monkeypatch.setattr(os, "geteuid", lambda: own + 7)
    table.write_text(table.read_text().replace(f" {own} ", " 0 "))
    assert require_own_listener("127.0.0.1", 0x1F90), "root reads every secret"
    assert not require_own_listener("127.0.0.1", 0x1F91), "a connection is no listener"


def test_router_client_sends_the_key_to_this_user_only(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RouterClient(listener.url, access=EngineAccess(KEY)).workers() == {}
    assert listener.asked == [f"Bearer {KEY}"]
    _belongs_to_another(monkeypatch)
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


# -- tokens of the admin API, of trainers and of the checkpoint service ------------------------------------------------
@pytest.fixture
def token_file(tmp_path: Path) -> str:
    (file := tmp_path / "token").write_text(KEY)
    return str(file)


def test_token_of_an_operator_goes_to_no_other_user(foreign: Listener, token_file: str) -> None:
    info = ClusterInfo("j", [], [foreign.url], token_file)
    with pytest.raises(EtcdUnavailable, match=rf"user {OTHER} listens at.*were not sent"):
        AdminClient(info, retry_budget_s=0.0).get("")
    with pytest.raises(EtcdUnavailable, match="were not sent"):
        next(iter(EventFollower(info, limit=1, patience_s=0.0)))
    assert not foreign.asked


def test_command_goes_on_with_the_replica_whose_port_nobody_has_taken(
        listener: Listener, token_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with http_servers.serving(Listener(("127.0.0.1", 0))) as taken:
        real = listeners._listening
        monkeypatch.setattr(listeners, "_listening", lambda table: (
            (at, port, OTHER if port == taken.server_port else uid) for at, port, uid in real(table)))
        client = AdminClient(ClusterInfo("j", [], [taken.url, listener.url], token_file))
        client._send("GET", "/v1/jobs/j")
        assert not taken.asked and listener.asked == [f"Bearer {KEY}"] and client.url == listener.url


def test_service_of_the_owner_of_the_token_file_is_asked(
        foreign: Listener, token_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a cluster that systemd runs, whose file a person may read: that user knows the token."""
    assert listeners.owners(token_file, token_file + ".none", "") == {Path(token_file).stat().st_uid}
    monkeypatch.setattr("elastic_rl.coordinator.client.admin_client.owners", lambda *_: {OTHER})
    AdminClient(ClusterInfo("j", [], [foreign.url], token_file))._send("GET", "/v1/jobs/j")
    assert foreign.asked == [f"Bearer {KEY}"]


def test_follower_sends_no_token_to_who_has_taken_the_port_of_the_leader(foreign: Listener) -> None:
    forwarder = Forwarder("b", timeout_s=10.0)
    request = Request({"type": "http", "method": "POST", "path": "/v1/jobs/j/pools", "raw_path": b"/v1/jobs/j/pools",
                       "query_string": b"", "headers": [(b"authorization", f"Bearer {KEY}".encode())],
                       "state": {"caller": Caller("operator", Role.OPERATOR)}})
    try:
        with pytest.raises(Problem, match="were not sent") as refused:
            forwarder.send(request, b"", Leader(replica="a", url=foreign.url, pid=1))
    finally:
        forwarder.close()
    assert refused.value.kind is Kind.NO_LEADER and not foreign.asked


def test_node_of_another_user_gets_no_token(foreign: Listener) -> None:
    node = DcsNode(id="n", host="127.0.0.1", port=foreign.server_port, pid=1, arena_path="/x", arena_bytes=1)
    with pytest.raises(NodeUnavailable, match="were not sent"):
        NodeConnection(node, "j", io_timeout_s=10.0, security=Security(KEY))
    assert not foreign.asked


def _make(*_: object) -> RewardFn:
    raise AssertionError("it makes no other reward")


def test_reward_service_of_another_user_gets_prompts_and_no_token(foreign: Listener, token_file: str) -> None:
    """Without a token, whoever listens at the address of the settings may reward."""
    for token, expected in (("", [None]), (token_file, [])):
        foreign.asked.clear()
        context = RewardContext("reward.options", make=_make)
        reward = Remote({"urls": [foreign.url], "attempts": 1, "token_file": token}, context)
        with pytest.raises(PluginFailed):  # it is no reward service
            asyncio.run(reward(Prompt((1,), text="p"), [Sample((), text="a")]))
        reward.close()
        assert foreign.asked == expected


@pytest.mark.parametrize("how", ["request", "stream", "client", "async_client"])
def test_each_client_names_the_users_whose_service_it_asks(foreign: Listener, how: str) -> None:
    def ask(users: set[int] | None) -> int:
        if how == "request":
            return http_client.request("GET", foreign.url, users=users).status_code
        if how == "stream":
            with http_client.stream("GET", foreign.url, users=users) as answer:
                return answer.status_code
        if how == "client":
            with http_client.client(users=users) as client:
                return client.get(foreign.url).status_code

        async def ask_async() -> int:
            async with http_client.async_client(users=users) as client:
                return (await client.get(foreign.url)).status_code

        return asyncio.run(ask_async())

    with pytest.raises(httpx.ConnectError, match="were not sent"):
        ask(set())
    assert not foreign.asked
    assert ask({OTHER}) == ask(None) == 200


_LISTENS = """
import os, socket
os.setgid(65534)
os.setuid(65534)
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1], flush=True)
if s.accept()[0].recv(1):
    print("asked", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_port_that_another_user_has_taken_is_found(token_file: str) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", _LISTENS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        with pytest.raises(EtcdUnavailable, match=r"\(65534\) listens at.*were not sent"):
            AdminClient(ClusterInfo("j", [], [url], token_file), retry_budget_s=0.0).get("")
    finally:
        process.kill()
        assert process.communicate()[0] == ""
