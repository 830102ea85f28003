"""A deterministic engine: what a sample gets does not depend on the others that the engine works on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from elastic_rl.config import DeviceConfig, EngineConfig, parse
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.host.leftovers import file_tag

PROMPTS = [[5, 6, 3, 4, 7], [7, 5], [4, 4, 4, 6, 7, 3, 5, 5, 6], [3, 6], [6, 5, 4]]
SAMPLING = Sampling(max_new_tokens=12, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    tmp = tmp_path_factory.mktemp("deterministic")
    model = make_model_dir(tmp / "model", parse({"job": "deterministic", "run_dir": str(tmp)}))
    server = SGLangServer(str(model), cfg=EngineConfig(), device=DeviceConfig(type="cpu"), log=tmp / "engine.log",
                          seed=1, tag=file_tag(tmp, "engine", "test"), deterministic=True)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def drawn(server: SGLangServer, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of a sample of each prompt, asked for in one request."""
    body = {"input_ids": prompts, "return_logprob": True, "sampling_params": SAMPLING.params()}
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status()
    answers: list[dict[str, Any]] = reply.json()
    return [(a["output_ids"], [entry[0] for entry in a["meta_info"]["output_token_logprobs"]]) for a in answers]


def test_sample_has_the_same_bits_alone_and_among_others(server: SGLangServer) -> None:
    """On this machine a product of up to three rows differs from that of more in its last bits."""
    together = drawn(server, PROMPTS)
    assert [drawn(server, [prompt])[0] for prompt in PROMPTS] == together
    assert drawn(server, PROMPTS[::-1]) == together[::-1]
