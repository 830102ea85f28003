"""What SGLang makes of the sampling options: a real server with its tokenizer, as a pool has it that reads text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.text_model import make_tokenizer_folder
from support.waiting import PATIENCE_S

from elastic_rl import config
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import Sample
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.scoring import ScoreRequest
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import RequestRefused
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK

PROMPT = (40, 41, 42)
FREE = Sampling(24, 1.0)


class Engine:
    def __init__(self, folder: Path, *, seeded: bool) -> None:
        cfg = config.parse({"engine": {"seeded_sampling": "on" if seeded else "off", "max_total_tokens": 4096}})
        model = make_model_dir(folder / "model", cfg, make_tokenizer_folder(folder / "tokenizer"))
        self.tokenizer = ModelTokenizer(str(model))
        self.server = SGLangServer(str(model), host=LOOPBACK, cfg=cfg.engine, device=cfg.device, seed=1,
                                   log=folder / "log", tag=JobPaths(folder).file_tag("options"), reads_text=True)

    def ask(self, sampling: Sampling, n: int) -> list[Sample]:
        return asyncio.run(self._call(lambda client: client.generate(PROMPT, sampling, n)))

    def logprobs(self, sample: Sample) -> list[float]:
        """Those of the whole distribution at temperature 1, for each token of the response."""
        [scores] = asyncio.run(self._call(lambda client: client.score(
            [ScoreRequest((*PROMPT, *sample.response_ids), len(PROMPT))], 2)))
        return scores.logprobs.tolist()

    async def _call(self, call):
        client = GenerateClient(self.server.url, timeout_s=PATIENCE_S, retries=3)
        try:
            return await call(client)
        finally:
            await client.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(tmp_path_factory.mktemp("options"), seeded=False)
    made.server.start()
    yield made
    made.server.close()


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.05}, {"min_p": 0.9}])
def test_fewer_tokens_are_sampled_and_log_probs_are_those_of_all(engine: Engine, options: dict) -> None:
    free, samples = engine.ask(FREE, 24), engine.ask(replace(FREE, **options), 24)
    first = {s.response_ids[0] for s in samples}
    assert len(first) < len({s.response_ids[0] for s in free})
    sample = max(samples, key=lambda s: len(s.response_ids))
    [segment] = sample.segments
    assert list(segment.logprobs) == pytest.approx(engine.logprobs(sample), abs=2e-2)


def test_penalty_changes_what_is_sampled(engine: Engine) -> None:
    [often] = engine.ask(replace(FREE, frequency_penalty=-2.0, top_k=8), 1)
    [seldom] = engine.ask(replace(FREE, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=2.0), 1)
    assert len(set(seldom.response_ids)) == len(seldom.response_ids)
    assert often.finish_reason in ("stop", "length")


def test_response_ends_with_the_text_that_stops_it(engine: Engine) -> None:
    stops, samples = ("4", "8"), engine.ask(replace(FREE, max_new_tokens=56, stop=("4", "8")), 16)
    texts = [engine.tokenizer.decode(sample.response_ids) for sample in samples]
    assert any(stop in text for text in texts for stop in stops)
    for sample, text in zip(samples, texts, strict=True):
        before = engine.tokenizer.decode(sample.response_ids[:-1])
        assert not any(stop in before for stop in stops), "it went on after the text"
        by_text, by_token = any(stop in text for stop in stops), sample.response_ids[-1] in engine.tokenizer.eos_ids
        assert sample.finish_reason == ("stop" if by_text or by_token else "length")
        assert sum(len(s.logprobs) for s in sample.segments) == len(sample.response_ids)


def test_min_p_with_seeds_is_refused_and_the_engine_lives(tmp_path: Path) -> None:
    engine = Engine(tmp_path, seeded=True)
    engine.server.start()
    try:
        with pytest.raises(RequestRefused, match="min_p with seeded sampling"):
            engine.ask(replace(FREE, min_p=0.1, seed=3), 2)
        assert engine.ask(replace(FREE, top_p=0.9, seed=3), 2) == engine.ask(replace(FREE, top_p=0.9, seed=3), 2)
    finally:
        engine.server.close()
