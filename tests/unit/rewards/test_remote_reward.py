"""The reward ``remote`` against a real HTTP service that answers wrongly, slowly, too much, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import http_servers
from support.waiting import wait_until

from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.net.addresses import free_port
from elastic_rl.rewards.base import Reward
from elastic_rl.rewards.registry import close_reward, make_reward

PROMPT = Prompt((1, 2), "1+1=", metadata={"answer": "2", "kind": "sum"})


class Service:
    """Answers each request by ``answer(request body) -> (status, body)`` and keeps what it got."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.answer: Callable[[dict[str, Any]], tuple[int, bytes]] = self.lengths
        self.at_once = self.most_at_once = 0
        self.packed = False
        lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                with lock:
                    service.at_once += 1
                    service.most_at_once = max(service.most_at_once, service.at_once)
                try:
                    body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                    with lock:
                        service.bodies.append(body)
                        service.tokens.append(self.headers["Authorization"])
                    status, answer = service.answer(body)
                finally:
                    with lock:
                        service.at_once -= 1
                self.send_response(status)
                if service.packed:
                    answer = gzip.compress(answer)
                    self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                try:
                    self.wfile.write(answer)
                except OSError:
                    pass

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/score"
        http_servers.serve(self.server)

    @staticmethod
    def lengths(body: dict[str, Any]) -> tuple[int, bytes]:
        return 200, json.dumps({"rewards": [len(s["text"]) for s in body["samples"]]}).encode()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    http_servers.close(made.server)


def _rewards(service: Service, *texts: str, prompt: Prompt = PROMPT, **options: Any) -> list[Reward]:
    reward = make_reward("remote", {"urls": [service.url], **options})
    try:
        return list(asyncio.run(reward(prompt, [Sample((Segment((7,)),), text=t) for t in texts])))  # type: ignore[arg-type]
    finally:
        close_reward(reward)


def test_samples_are_posted_in_batches_and_rewarded_in_order(service: Service) -> None:
    found = _rewards(service, "", "a", "bb", "ccc", "dddd", batch_samples=2, concurrency=2)
    assert [r.value for r in found] == [0, 1, 2, 3, 4]
    assert sorted(len(body["samples"]) for body in service.bodies) == [1, 2, 2]
    assert service.bodies[0]["prompt"] == {
        "text": "1+1=", "question": "1+1=", "metadata": {"answer": "2", "kind": "sum"}, "answers": ["2"]}
    assert service.bodies[0]["samples"][0].keys() == {"text", "finish_reason"}
    _rewards(service, "a", send_token_ids=True)
    assert service.bodies[-1]["samples"][0]["token_ids"] == [7] and service.bodies[-1]["prompt"]["token_ids"] == [1, 2]


def test_metadata_arrive_as_they_are(service: Service) -> None:
    metadata = {"answer": None, "n": 2**70, "small": 1e-7, "text": "ä\ud83d", "null": None}
    _rewards(service, "a", prompt=Prompt((1,), "x", metadata=metadata))
    assert service.bodies[0]["prompt"]["metadata"] == metadata and service.bodies[0]["prompt"]["answers"] == []
    with pytest.raises(PluginFailed, match="metadata are no JSON: a number is nan"):
        _rewards(service, "a", prompt=Prompt((1,), "x", metadata={"n": float("nan")}))


def test_no_more_requests_than_allowed_are_sent_at_once(service: Service) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, bytes]:
        wait_until(lambda: service.most_at_once >= 3, what="three requests at once")
        time.sleep(0.1)  # in which a fourth one would come
        return service.lengths(body)

    service.answer = slow
    _rewards(service, *"abcdefgh", batch_samples=1, concurrency=3)
    assert service.most_at_once == 3


def test_packed_answer_fails_the_group_at_once(service: Service) -> None:
    service.packed = True
    with pytest.raises(PluginFailed, match="compressed"):
        _rewards(service, "a", attempts=3)
    assert len(service.bodies) == 1


def test_parts_come_with_the_reward(service: Service) -> None:
    service.answer = lambda body: (200, b'{"rewards": [{"value": 0.5, "parts": {"style": 1}}]}')
    assert _rewards(service, "a") == [Reward(0.5, {"style": 1.0})]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_busy_service_is_tried_again(service: Service, status: int) -> None:
    def fails_once(body: dict[str, Any]) -> tuple[int, bytes]:
        return (status, b"busy") if len(service.bodies) == 1 else service.lengths(body)

    service.answer = fails_once
    assert _rewards(service, "abc") == [Reward(3.0)] and len(service.bodies) == 2
    service.answer = lambda body: (status, b"always busy")
    with pytest.raises(PluginFailed, match=f"answers {status}: always busy, also when tried 2 times"):
        _rewards(service, "abc", attempts=2)


def test_service_that_is_away_is_left_for_the_next(service: Service) -> None:
    away = f"http://127.0.0.1:{free_port()}/"
    assert _rewards(service, "abc", urls=[away, service.url]) == [Reward(3.0)]
    with pytest.raises(PluginFailed, match="cannot be reached"):
        _rewards(service, "abc", urls=[away], attempts=1)


@pytest.mark.parametrize(("status", "answer", "named"), [
    (400, b"what?", "refuses the request with 400: what?"), (302, b"", "refuses the request with 302"),
    (200, b"no json", "answers no"), (200, b"[]", "answers no"), (200, b'{"rewards": 1}', "answers no"),
    (200, b'{"rewards": ["1"]}', "answers no"), (200, b'{"rewards": [true]}', "answers no"),
    (200, b'{"rewards": [NaN]}', "answers no"), (200, b'{"rewards": [{"parts": {}}]}', "answers no"),
    (200, b'{"rewards": [1, 2]}', "answers 2 rewards for 1 sample"), (200, b"\xff\xfe", "answers no"),
    (200, b"x" * (3 << 20), "more than max_answer_mb=1")])
def test_wrong_answer_is_not_asked_for_again(service: Service, status: int, answer: bytes, named: str) -> None:
    service.answer = lambda body: (status, answer)
    with pytest.raises(PluginFailed, match=named):
        _rewards(service, "a", max_answer_mb=1)
    assert len(service.bodies) == 1


def test_slow_service_is_given_up(service: Service) -> None:
    given_up = threading.Event()
    service.answer = lambda body: (given_up.wait(300.0), service.lengths(body))[1]
    with pytest.raises(PluginFailed, match="also when tried 2 times"):
        _rewards(service, "a", timeout_s=0.2, attempts=2)
    given_up.set()


def test_limit_of_an_attempt_holds_for_an_answer_byte_by_byte(service: Service) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        def trickle() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):  # the other side gives it up
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                for _ in range(400):
                    connection.sendall(b"a")
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        with pytest.raises(PluginFailed, match="did not answer within 0.5 s"):
            _rewards(service, "a", urls=[f"http://127.0.0.1:{server.getsockname()[1]}/"], timeout_s=0.5, attempts=1)


def test_closing_gives_up_what_is_left(service: Service) -> None:
    answering, closed = threading.Event(), threading.Event()
    service.answer = lambda body: (answering.set(), closed.wait(60.0), service.lengths(body))[2]  # type: ignore[func-returns-value]
    reward = make_reward("remote", {"urls": [service.url], "timeout_s": 60.0})

    def close() -> None:
        answering.wait(60.0)
        close_reward(reward)

    threading.Thread(target=close, daemon=True).start()
    with pytest.raises(PluginFailed, match="the request was given up"):
        asyncio.run(reward(PROMPT, [Sample((), text="a")]))  # type: ignore[arg-type]
    closed.set()


def test_too_large_request_is_not_sent(service: Service) -> None:
    with pytest.raises(PluginFailed, match="larger than max_request_mb"):
        _rewards(service, "x" * (2 << 20), max_request_mb=1)
    assert not service.bodies


def test_token_is_read_from_its_file_for_each_request(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    reward = make_reward("remote", {"urls": [service.url], "token_file": str(file)})
    for token in ("first", "second"):
        file.write_text(token + "\n")
        asyncio.run(reward(PROMPT, [Sample((), text="a")]))  # type: ignore[arg-type]
    assert service.tokens == ["Bearer first", "Bearer second"]
    file.write_text("two\nlines")
    with pytest.raises(PluginFailed, match="holds no token") as failed:
        asyncio.run(reward(PROMPT, [Sample((), text="a")]))  # type: ignore[arg-type]
    assert "lines" not in str(failed.value)
    close_reward(reward)


@pytest.mark.parametrize("options", [
    {}, {"urls": []}, {"urls": ["ftp://x/"]}, {"urls": ["http://user:a-secret@x/"]}, {"urls": ["http://x/?key=a-secret"]},
    {"urls": ["http://x/"], "token_file": "/no/such/file"}, {"urls": ["http://"]}])
def test_wrong_options_are_named_without_their_values(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rollout.reward_options|/no/such/file") as failed:
        make_reward("remote", options)
    assert "a-secret" not in str(failed.value)
