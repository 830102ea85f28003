"""An engine's HTTP server closes connections whose requests it has answered before their bodies ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from support.endless_bodies import closes_endless_chunks, closes_slow_body
from support.waiting import wait_until
from uvicorn.protocols.http import auto

from elastic_rl.engine.sglang import unread_bodies
from elastic_rl.net.addresses import free_port


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
    unread_bodies.install()
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
