"""A real router before engines that only answer: which one is asked, and for how long."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic_rl.data.samples import Sample
from elastic_rl.engine import router as engine_router
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.router import RouterClient, RouterProcess


class Engine(ThreadingHTTPServer):
    """Answers as SGLang does, after ``takes_s`` seconds, with its own number as the version."""

    daemon_threads = True

    def __init__(self, number: int, takes_s: float = 0.0) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send({"model_path": "m", "is_generation": True})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                time.sleep(takes_s)
                self._send([{"output_ids": [5], "meta_info": {
                    "finish_reason": {"type": "stop"}, "weight_version": str(number),
                    "output_token_logprobs": [[-0.5, 5, None]]}} for _ in body["input_ids"]])

            def _send(self, value: Any) -> None:
                raw = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def test_router_waits_as_long_as_its_clients_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended long requests after a time of its own, and sent them again."""
    monkeypatch.setattr(engine_router, "_LONGER_THAN_CLIENT_S", 0.0)
    engine = Engine(1, takes_s=3.0)

    def answer(limit_s: float) -> int:
        router = RouterProcess(host="127.0.0.1", log=tmp_path / "router.log", request_timeout_s=limit_s)
        try:
            router.start()
            RouterClient(router.url).add(engine.url, 30.0)
            return httpx.post(f"{router.url}/generate", json={"input_ids": [[1]]}, timeout=60.0).status_code
        finally:
            router.stop()

    try:
        assert answer(1.0) >= 500, "this router has a shorter limit than its client"
        assert answer(60.0) == 200
    finally:
        engine.shutdown()
        engine.server_close()


def test_turns_of_a_conversation_reach_one_engine(tmp_path: Path) -> None:
    engines = [Engine(1), Engine(2)]
    router = RouterProcess(host="127.0.0.1", log=tmp_path / "router.log", request_timeout_s=10.0, sticky=True)
    try:
        router.start()
        listed = RouterClient(router.url)
        for engine in engines:
            listed.add(engine.url, 30.0)

        async def turns(count: int) -> list[set[int]]:
            client = GenerateClient(router.url, timeout_s=10.0, retries=8)

            async def one(route: str, turn: int) -> list[Sample]:
                return await client.generate([1] * (turn + 1), Sampling(4), 1, route)

            try:
                found: list[set[int]] = [set() for _ in range(16)]
                for turn in range(count):
                    said = await asyncio.gather(*(one(f"conversation {i}", turn) for i in range(len(found))))
                    for versions, samples in zip(found, said, strict=True):
                        versions.add(samples[0].oldest_version)
                return found
            finally:
                await client.close()

        before = asyncio.run(turns(4))
        assert all(len(versions) == 1 for versions in before)
        assert {1, 2} == set.union(*before), "the conversations are spread"
        engines[0].shutdown()
        engines[0].server_close()
        listed.remove(engines[0].url, 30.0)
        assert asyncio.run(turns(2)) == [{2}] * 16
    finally:
        router.stop()
        for engine in engines:
            engine.server_close()
