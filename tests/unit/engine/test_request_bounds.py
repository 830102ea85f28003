"""An engine's HTTP server closes connections whose requests it has answered before their bodies ended, and has limits
on headers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from support.endless_bodies import (
    LARGE_HEADERS,
    NOT_HTTP,
    closes_endless_chunks,
    closes_endless_headers,
    closes_slow_body,
    problem_of,
)
from support.waiting import wait_until
from uvicorn.protocols.http import auto

from elastic_rl.engine.sglang import request_bounds
from elastic_rl.net.addresses import free_port
from elastic_rl.net.request_bounds import HEADER_BYTES


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuses ``/refused`` at once, as without a key; echoes the size of any other body."""
    size, more = 0, scope["path"] != "/refused"
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 401 if scope["path"] == "/refused" else 200,
                "headers": [(b"content-length", b"%d" % len(b"%d" % size))]})
    await send({"type": "http.response.body", "body": b"%d" % size})


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(auto, "AutoHTTPProtocol", auto.AutoHTTPProtocol)  # restored after the test
    request_bounds.install()
    server = uvicorn.Server(uvicorn.Config(_app, port=free_port(), log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, what="the server")
    yield server.config.port
    server.should_exit = True
    thread.join(60)


@pytest.mark.parametrize("closes", [closes_endless_chunks, closes_slow_body])
def test_connection_whose_body_does_not_end_is_closed_with_the_answer(port: int, closes: object) -> None:
    assert closes(("127.0.0.1", port), "/refused")  # type: ignore[operator]


def test_whole_requests_keep_their_connection(port: int) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        for size in (0, 1, 3 << 20):
            assert client.post("/echo", content=b"x" * size).text == str(size)
        refused = client.post("/refused", content=b"x")
        assert refused.status_code == 401 and "connection" not in refused.headers


@pytest.mark.parametrize("kind", list(LARGE_HEADERS))
def test_headers_beyond_their_limit_are_refused_however_they_arrive(port: int, kind: str) -> None:
    assert problem_of(("127.0.0.1", port), LARGE_HEADERS[kind])["status"] == 431


def test_headers_within_their_limit_are_taken_whole(port: int) -> None:
    answer = httpx.post(f"http://127.0.0.1:{port}/echo", headers={"a": "b" * (HEADER_BYTES - 500)}, content=b"abc")
    assert answer.text == "3"


@pytest.mark.parametrize("piece", [b"x-a: b\r\n", b"x"], ids=["many", "one"])
def test_headers_and_trailers_without_an_end_close_their_connection(port: int, piece: bytes) -> None:
    assert closes_endless_headers(("127.0.0.1", port), piece=piece)
    assert closes_endless_chunks(("127.0.0.1", port), "/echo", chunk=b"0\r\n" + piece * 100)


@pytest.mark.parametrize("request_", NOT_HTTP)
def test_what_is_no_http_is_answered_as_a_problem(port: int, request_: bytes) -> None:
    assert problem_of(("127.0.0.1", port), request_)["status"] == 400


@pytest.mark.parametrize("begin", [b"", b"GET /", b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx\r\n",
                                   b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nxGET"])
def test_headers_have_to_be_there_in_time(port: int, begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bounds, "HEADERS_S", 2.0 if begin.startswith(b"POST") else 0.1)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(begin)
        answer = b""
        try:
            while piece := sock.recv(4096):
                answer += piece
        except ConnectionResetError:
            pass
    assert (b" 200 " in answer) == begin.startswith(b"POST")


def test_request_that_takes_long_to_answer_keeps_its_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generating takes minutes: the limit is for headers alone."""
    monkeypatch.setattr(request_bounds, "HEADERS_S", 2.0)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nx")
        with pytest.raises(TimeoutError):
            sock.settimeout(2.5)
            sock.recv(10)
        sock.settimeout(60)
        sock.sendall(b"y")
        assert b" 200 " in sock.recv(4096)
