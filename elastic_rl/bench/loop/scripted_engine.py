"""A process that answers /generate as our engines do, at once, whatever is asked: what reads the answers is the limit.
"""

from __future__ import annotations

import asyncio
import functools
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from elastic_rl.bench.workers import serve
from elastic_rl.engine import packed_answers
from elastic_rl.engine.client import parse_sample
from elastic_rl.host.address import own_address

TOKENS, SHORT_TOKENS, SAMPLES = 8192, 1024, 8
"""Tokens of a response, and samples of a group."""
VERSION = 1
"""The weight version of all answers."""
_VOCABULARY = 1 << 15
_ROUNDS = 30


def answer(tokens: int) -> dict[str, Any]:
    """One answer of so many tokens, as SGLang has it."""
    draw = random.Random(tokens)
    ids = [draw.randrange(_VOCABULARY) for _ in range(tokens)]
    return {"text": "x" * 4 * tokens, "output_ids": ids, "meta_info": {
        "id": "0" * 32, "finish_reason": {"type": "length", "length": tokens}, "weight_version": str(VERSION),
        "weight_versions": [{"version": str(VERSION), "start": 0, "end": tokens}],
        "output_token_logprobs": [(-draw.random(), token, None) for token in ids]}}


@functools.cache
def _response(sequences: int, tokens: int) -> bytes:
    body = packed_answers.pack([answer(tokens)] * sequences)
    return (f"HTTP/1.1 200 OK\r\nContent-Type: {packed_answers.MEDIA_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
            .encode() + body)


class _Connection(asyncio.Protocol):
    """Requests of one connection, one after the other."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while (end := self._unread.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._unread[:end]).lower()
            size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            if len(self._unread) < end + 4 + size:
                return
            asked = orjson.loads(self._unread[end + 4:end + 4 + size])
            del self._unread[:end + 4 + size]
            self._transport.write(_response(len(asked["input_ids"]), asked["sampling_params"]["max_new_tokens"]))


def start() -> Mapping[str, Any]:
    """Serves in a thread. Answers with the URL."""
    listening, ports = threading.Event(), list[int]()

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Connection, own_address(), 0)
        ports.append(server.sockets[0].getsockname()[1])
        listening.set()
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(run()), daemon=True).start()
    listening.wait(30.0)
    return {"url": f"http://{own_address()}:{ports[0]}"}


def parse() -> Mapping[str, float]:
    """Tokens a second of this process, see ``rollout_rate.Parsed``."""
    answers = [answer(TOKENS)] * SAMPLES
    packed, json = packed_answers.pack(answers), orjson.dumps(answers)
    return {"packed": _rate(lambda: [parse_sample(one) for one in packed_answers.unpack(packed)]),
            "json": _rate(lambda: orjson.loads(json))}


def _rate(read: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.thread_time()
        read()
        best = min(best, time.thread_time() - began)
    return TOKENS * SAMPLES / best


if __name__ == "__main__":
    serve({"start": start, "parse": parse})
