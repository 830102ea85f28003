"""The router of a job with environments: turns of one conversation reach one engine, as long as that serves."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from elastic_rl.data.samples import Sample
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.router import RouterClient, RouterProcess


class Engine(ThreadingHTTPServer):
    """Answers as SGLang does, with its own number as the version."""

    daemon_threads = True

    def __init__(self, number: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._send({"model_path": "m", "is_generation": True})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
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


def test_turns_of_a_conversation_reach_one_engine(tmp_path: Path) -> None:
    engines = [Engine(1), Engine(2)]
    router = RouterProcess(host="127.0.0.1", log=tmp_path / "router.log", sticky=True)
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
