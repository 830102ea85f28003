"""Connections of the HTTP server: those without an authenticated request do not keep others out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from support.certificates import Authority
from support.endless_bodies import (
    LARGE_HEADERS,
    NOT_HTTP,
    closes_endless_chunks,
    closes_endless_headers,
    closes_slow_body,
    problem_of,
)
from support.waiting import wait_until

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api.listening import bind, make_server
from elastic_rl.net import http_connections, http_server
from elastic_rl.net.http_connections import Connection, IdleConnections, Limits
from elastic_rl.net.problem_details import TYPE_PREFIX
from elastic_rl.net.request_bounds import HEADER_BYTES, UNREAD_BYTES, UNREAD_CHUNKS, UnreadBody

_CLIENT_HELLO = bytes.fromhex("160301020001")


# -- which ones are closed ---------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 30)), max_size=80))
def test_idle_connections_stay_within_their_limits(steps: list[tuple[str, int]]) -> None:
    idle, present = IdleConnections(Limits(idle=8, idle_per_address=3)), dict[int, str]()
    for step, conn in steps:
        address = f"h{conn % 5}"
        if step == "remove":
            idle.remove(conn)
            present.pop(conn, None)
        elif conn not in present:
            counts = Counter(present.values())
            for evicted in idle.add(conn, address):
                assert evicted == next(c for c in present if present[c] == present[evicted]), "its address's oldest"
                assert present[evicted] == address or counts[present[evicted]] == max(counts.values())
                del present[evicted]
            present[conn] = address
        assert len(idle) == len(present) <= 8
        assert all(sum(h == host for h in present.values()) <= 3 for host in present.values())


# -- a server ----------------------------------------------------------------------------------------------------------
class Api:
    """A server in a thread; an application that answers /healthz at once, holds /held until ``go``, and, as to callers
    with a token, answers /refused at once and /read with the size of the body."""

    def __init__(self, limits: Limits, **settings: object) -> None:
        cfg = CoordinatorConfig.model_validate({"host": "0.0.0.0", "request_timeout_s": 60.0, **settings})
        self.listener = bind("0.0.0.0", 0)
        self.port = self.listener.getsockname()[1]
        self.go, self.held = threading.Event(), 0
        self._server = make_server(self._answer, cfg, limits)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets=[self.listener])))
        self._thread.start()
        self.sockets: list[socket.socket] = []

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/held":
            connection: Connection = scope["state"]["connection"]
            connection.busy()
            self.held += 1
            while not self.go.is_set():
                await asyncio.sleep(0.01)
        body = b"ok"
        if scope["path"] in ("/refused", "/read"):
            scope["state"]["connection"].busy()
        if scope["path"] == "/read":
            size, more = 0, True
            while more:
                message = await receive()
                size, more = size + len(message["body"]), message["more_body"]
            body = str(size).encode()
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(source, 0))
        self.sockets.append(sock)
        return sock

    def close(self) -> None:
        self.go.set()
        for sock in self.sockets:
            sock.close()
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api(Limits(idle=40, idle_per_address=10))
    yield made
    made.close()


def closed(sock: socket.socket) -> bool:
    """Whether a connection ends; reads what comes before."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_idle_server_ends_as_soon_as_another_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_DATE_S", 3600.0)  # between two dates it waits for nothing else
    server = Api(Limits(idle=40, idle_per_address=10))
    assert httpx.get(f"http://127.0.0.1:{server.port}/healthz", timeout=20).headers["date"]
    server.close()


def test_idle_connections_do_not_keep_out_a_request(api: Api) -> None:
    silent = [api.connect(f"127.0.0.{2 + i % 10}") for i in range(200)]
    assert httpx.get(f"http://127.0.0.1:{api.port}/healthz", timeout=20).text == "ok"
    assert closed(silent[0])
    last = silent[-1]
    last.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert last.recv(1000).startswith(b"HTTP/1.1 200"), "the newest one is served"


def test_idle_connections_of_an_address_are_limited(api: Api) -> None:
    other = api.connect("127.0.0.9")
    silent = [api.connect() for _ in range(15)]
    assert all(closed(sock) for sock in silent[:5])
    for sock in (other, silent[5]):
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_connection_with_an_authenticated_request_is_not_closed_for_others(api: Api) -> None:
    working = api.connect()
    working.sendall(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
    wait_until(lambda: api.held == 1, what="the request")
    silent = [api.connect() for _ in range(30)]
    assert closed(silent[0])
    api.go.set()
    assert working.recv(1000).startswith(b"HTTP/1.1 200")
    # Afterwards it is an idle one again, and the newest.
    for _ in range(15):
        api.connect()
    assert closed(working)


# -- bodies that nobody reads -----------------------------------------------------------------------------------------
@given(st.lists(st.integers(1, UNREAD_BYTES // 4), max_size=2 * UNREAD_CHUNKS))
def test_unread_body_is_bounded_in_bytes_and_chunks(sizes: list[int]) -> None:
    body, total = UnreadBody(), 0
    for n, size in enumerate(sizes, 1):
        total += size
        assert body.take(size) == (total <= UNREAD_BYTES and n <= UNREAD_CHUNKS)


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"8000\r\n" + b"x" * 0x8000 + b"\r\n"], ids=["small", "large"])
def test_endless_body_without_credentials_closes_its_connection(api: Api, chunk: bytes) -> None:
    assert closes_endless_chunks(("127.0.0.1", api.port), "/healthz", chunk=chunk)
    assert httpx.get(f"http://127.0.0.1:{api.port}/healthz", timeout=20).text == "ok"


def test_body_without_credentials_has_to_end_within_the_request_timeout() -> None:
    api = Api(Limits(), request_timeout_s=0.5)
    try:
        assert closes_slow_body(("127.0.0.1", api.port), "/healthz")
        assert httpx.get(f"http://127.0.0.1:{api.port}/healthz", timeout=20).text == "ok"
    finally:
        api.close()


@pytest.mark.parametrize("pieces", [[b"x" * 1000] * 4000, [b"x" * (8 << 20)]], ids=["chunks", "bytes"])
def test_large_bodies_of_authenticated_requests_are_read_and_refused_with_an_answer(api: Api, pieces: list[bytes]
                                                                                    ) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{api.port}", timeout=60) as client:
        assert client.post("/read", content=iter(pieces)).text == str(sum(map(len, pieces)))
        assert client.post("/refused", content=iter(pieces)).text == "ok"
        assert client.post("/refused", content=b"".join(pieces)).text == "ok"
        assert client.get("/healthz").text == "ok"


# -- headers, and what is no HTTP --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", list(LARGE_HEADERS))
def test_headers_beyond_their_limit_are_refused_however_they_arrive(api: Api, kind: str) -> None:
    problem = problem_of(("127.0.0.1", api.port), LARGE_HEADERS[kind])
    assert problem["status"] == 431 and problem["type"] == TYPE_PREFIX + "headers-too-large"
    assert str(HEADER_BYTES) in problem["detail"]


def test_headers_within_their_limit_are_taken_whole(api: Api) -> None:
    value = "b" * (HEADER_BYTES - 500)
    assert httpx.get(f"http://127.0.0.1:{api.port}/healthz", headers={"a": value}, timeout=20).text == "ok"


@pytest.mark.parametrize("piece", [b"x-a: b\r\n", b"x"], ids=["many", "one"])
def test_headers_without_an_end_close_their_connection(api: Api, piece: bytes) -> None:
    assert closes_endless_headers(("127.0.0.1", api.port), piece=piece)
    assert httpx.get(f"http://127.0.0.1:{api.port}/healthz", timeout=20).text == "ok"


@pytest.mark.parametrize("request_", NOT_HTTP)
def test_what_is_no_http_is_answered_as_a_problem_and_not_logged(api: Api, request_: bytes,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    try:
        problem = problem_of(("127.0.0.1", api.port), request_)
    finally:
        logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert (problem["status"], problem["type"]) == (400, TYPE_PREFIX + "malformed")
    assert not caplog.records, "a stranger could fill the disk"


@pytest.fixture(scope="module")
def tls_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority(folder, "authority")
    identity = authority.issue("api", hosts=["127.0.0.1"])
    return {"tls_cert": str(identity.cert), "tls_key": str(identity.key), "tls_ca": str(authority.cert)}


def test_unfinished_tls_handshakes_do_not_keep_out_a_request(tls_settings: dict[str, str]) -> None:
    api = Api(Limits(idle=40, idle_per_address=10), **tls_settings)
    try:
        silent = [api.connect(f"127.0.0.{2 + i % 10}") for i in range(100)]
        for sock in silent:
            with contextlib.suppress(OSError):  # those that are closed already
                sock.sendall(_CLIENT_HELLO)
        trust = ssl.create_default_context(cafile=tls_settings["tls_ca"])
        assert httpx.get(f"https://127.0.0.1:{api.port}/healthz", verify=trust, timeout=20).text == "ok"
        assert closed(silent[0])
    finally:
        api.close()


def test_tls_handshake_has_to_end_within_the_request_timeout(tls_settings: dict[str, str]) -> None:
    api = Api(Limits(), **tls_settings, request_timeout_s=0.5)
    try:
        silent = api.connect()
        silent.sendall(_CLIENT_HELLO)
        assert closed(silent)
    finally:
        api.close()


@pytest.mark.parametrize("path", ["healthz", "held"])
@pytest.mark.parametrize("at_once", [True, False])
def test_bodies_that_are_not_http_leave_no_traceback(api: Api, caplog: pytest.LogCaptureFixture, path: str,
                                                     at_once: bool) -> None:
    """``at_once``: the body comes with its request; else while this is being answered, or after that."""
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    try:
        for held in range(1, 11):
            sock = api.connect()
            sock.sendall(f"POST /{path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
                         + b"z\r\n" * at_once)
            if path == "held":
                wait_until(lambda held=held: api.held == held, what="the request")  # type: ignore[misc]
            elif not at_once:
                assert sock.recv(1000).startswith(b"HTTP/1.1 200")
            if not at_once:
                sock.sendall(b"z\r\n")
            assert closed(sock)
        api.go.set()
        assert httpx.get(f"http://127.0.0.1:{api.port}/healthz", timeout=20).text == "ok"
        api.close()
    finally:
        logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert [r.getMessage() for r in caplog.records if r.exc_info or r.levelno >= logging.ERROR] == []


def test_failures_to_accept_are_logged_once_and_end(api: Api, monkeypatch: pytest.MonkeyPatch,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    refused, accepts = 0, socket.socket.accept

    def accept(listener: socket.socket) -> tuple[socket.socket, object]:
        nonlocal refused
        if listener is not api.listener:  # of another server in this process
            return accepts(listener)
        refused += 1
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(http_connections, "_LOG_INTERVAL_S", float("inf"))  # however long three failures take here
    monkeypatch.setattr(http_connections, "_ACCEPT_RETRY_S", 0.01)
    with caplog.at_level(logging.ERROR), monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", accept)
        raw = socket.socket()
        raw.settimeout(60)
        raw.connect(("127.0.0.1", api.port))
        api.sockets.append(raw)
        wait_until(lambda: refused >= 3, what="failures")
    assert len([r for r in caplog.records if "cannot be accepted" in r.message]) == 1
    assert not any(r.exc_info for r in caplog.records)
    raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert raw.recv(1000).startswith(b"HTTP/1.1 200")
