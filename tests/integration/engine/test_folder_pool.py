"""A pool that serves the weights of a folder, beside the one of the policy: real servers, a router each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine_testbed import PROMPT, EngineTestbed
from support.tiers import full
from transformers import AutoModelForCausalLM

from elastic_rl import config
from elastic_rl.config import PoolConfig
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import Sample
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.data.tokenizer import EOS_ID, encode
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.router import RouterProcess
from elastic_rl.engine.runner import FOLDER_VERSION, EngineRunner
from elastic_rl.engine.scoring import ScoreRequest
from elastic_rl.errors import EngineFailed, PluginFailed
from elastic_rl.etcd.records import EngineState
from elastic_rl.rewards.judging import Judgement, JudgeOptions, JudgeRequest
from elastic_rl.roles.genrm import GenRmRole
from elastic_rl.roles.teacher import TeacherRole

POOL = "judge"


class Judges:
    """Two engines of a pool with a model of another family than the policy's."""

    def __init__(self, testbed: EngineTestbed, folder: Path) -> None:
        self.testbed = testbed
        self.model_dir = make_model_dir(folder / "judge", config.parse({"seed": 7, "model": {"family": "llama"}}))
        self.router = RouterProcess(host="127.0.0.1", log=folder / "router-judge.log", request_timeout_s=60.0,
                                    key_file=testbed.ctx.config.engine_key_file)
        self.router.start()
        ctx, pools = testbed.ctx, {POOL: PoolConfig(model=str(self.model_dir), engine={"max_total_tokens": 2048})}
        self.ctx = ctx.model_copy(update={
            "config": ctx.config.model_copy(update={"pools": pools}),
            "router_urls": {**ctx.router_urls, POOL: self.router.url}})
        self.runners = {name: EngineRunner(self.ctx, name, POOL) for name in ("judge-a", "judge-b")}
        self.threads = [threading.Thread(target=runner.run, daemon=True) for runner in self.runners.values()]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        for runner in self.runners.values():
            runner.stop()
        for thread in self.threads:
            thread.join(60)
        self.router.stop()

    def ask(self) -> tuple[list[int], int]:
        """Tokens, by greedy decoding, and their version."""
        async def run() -> tuple[list[int], int]:
            client = GenerateClient(self.router.url, timeout_s=60, retries=4, key=self.testbed.key)
            try:
                [sample] = await client.generate(PROMPT, Sampling(8, 0.0), 1)
            finally:
                await client.close()
            return list(sample.response_ids), sample.oldest_version

        return asyncio.run(run())

    def expected(self, prompt: Sequence[int] = PROMPT) -> list[int]:
        """What greedy decoding gives, by transformers."""
        model = AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        ids = list(prompt)
        while len(ids) < len(prompt) + 8 and ids[-1] != EOS_ID:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt):]


@pytest.fixture(scope="module")
def judges(testbed: EngineTestbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judges]:
    made = Judges(testbed, tmp_path_factory.mktemp("judges"))
    yield made
    made.close()


def test_engines_serve_the_folder_and_no_version_of_the_policy(testbed: EngineTestbed, judges: Judges) -> None:
    one, two = (testbed.wait_ready(name, FOLDER_VERSION) for name in judges.runners)
    assert one.checksum and (one.checksum, one.pool) == (two.checksum, POOL)
    assert judges.ask() == (judges.expected(), FOLDER_VERSION)

    policy = testbed.serving_engine()
    version = testbed.publish(seed=11)
    testbed.wait_ready(policy, version)
    testbed.assert_serves()
    assert testbed.record("judge-a").version == FOLDER_VERSION
    assert judges.ask() == (judges.expected(), FOLDER_VERSION)


def test_role_judges_by_what_the_model_answers(testbed: EngineTestbed, judges: Judges) -> None:
    testbed.wait_ready("judge-a", FOLDER_VERSION)
    options = JudgeOptions(pool=POOL, chat_template=False, prompt="{question}{response}", verdict=r"([0-9])", low=0,
                           high=9, max_tokens=8, max_prompt_tokens=20, read_cut_answers=True)
    responses = [f"{n}" for n in range(10)] + ["<eos>7", "1" * 20]
    tokenizer = ModelTokenizer(judges.model_dir)
    answers = [tokenizer.decode(judges.expected(encode(f"1+1={n}"))) for n in range(10)]
    assert len(set(answers)) > 1, "else the test would not see which response an answer is about"

    role = GenRmRole(judges.ctx)
    try:
        strict, found = asyncio.run(judged_twice(role, JudgeRequest(options, "1+1=", "", tuple(responses))))
    finally:
        role.close()
    for one, text in zip(found, answers, strict=False):
        digits = [c for c in text if c.isdecimal()]
        assert one == Judgement(int(digits[-1]) / 9 if digits else 0.0, 0.0 if digits else 1.0)
    [plain] = tokenizer.encode_batch(["1+1= 7"], special_tokens=True)  # without the token that ends a turn
    [last] = [c for c in tokenizer.decode(judges.expected(plain)) if c.isdecimal()][-1:] or [""]
    assert found[10] == (Judgement(int(last) / 9, 0.0) if last else Judgement(0.0, 1.0))
    assert found[-1] == Judgement(0.0, 1.0), "its question is too long"
    cut_off = [judges.expected(encode(f"1+1={n}"))[-1] != EOS_ID for n in range(10)]
    assert any(cut_off)
    assert strict[:10] == [Judgement(0.0, 1.0) if cut else one for cut, one in zip(cut_off, found, strict=False)]


async def judged_twice(role: GenRmRole, request: JudgeRequest) -> tuple[list[Judgement], list[Judgement]]:
    """The judgements, the first without answers that were cut off. Those of the second time come from the role's
    memory, and the judge is asked for one token, so that it is known whether it works."""
    whole = request.options.model_copy(update={"read_cut_answers": False})
    strict = await role.judge(replace(request, options=whole), 0)
    found = await role.judge(request, 0)
    client, asked = role._pool(POOL).client, []
    generate = client.generate

    async def counted(prompt: Sequence[int], sampling: Sampling, n: int) -> list[Sample]:
        asked.append(sampling.max_new_tokens)
        return await generate(prompt, sampling, n)

    client.generate = counted  # type: ignore[method-assign]
    assert await role.judge(request, 0) == found and asked == [1]
    assert await role.judge(JudgeRequest(request.options, "", "", ()), 0) == [] and asked == [1, 1]
    await client.close()
    client._url = "http://127.0.0.1:9/generate"  # nothing answers there
    for again in (request, JudgeRequest(request.options, "", "", ())):
        with pytest.raises(EngineFailed):
            await role.judge(again, 0)
    with pytest.raises(EngineFailed):
        await role.judge(JudgeRequest(request.options, "2+2=", "", ("4",)), 0)
    with pytest.raises(PluginFailed, match="no pool 'other'"):
        await role.judge(JudgeRequest(request.options.model_copy(update={"pool": "other"}), "", "", ("4",)), 0)
    return strict, found


def test_role_gives_the_log_probs_of_a_teacher(testbed: EngineTestbed, judges: Judges) -> None:
    testbed.wait_ready("judge-a", FOLDER_VERSION)
    sequences = [ScoreRequest(tuple(ids), first) for ids, first in (
        (encode("1+1=02"), 4), (encode("31+17=048"), 6), ((5, 6), 1))]
    algorithm = config.AlgorithmConfig(name="on_policy_distillation", teacher=POOL)
    role = TeacherRole(judges.ctx.model_copy(update={"config": judges.ctx.config.model_copy(
        update={"algorithm": algorithm})}))
    try:
        found = asyncio.run(role.score(sequences, 3, 0))
    finally:
        role.close()
    model = AutoModelForCausalLM.from_pretrained(judges.model_dir, dtype=torch.float32).eval()
    for sequence, scores in zip(sequences, found, strict=True):
        ids = torch.tensor([sequence.token_ids])
        logprobs = model(ids).logits[0, sequence.first - 1:-1].log_softmax(-1).detach()
        own = logprobs.gather(-1, ids[0, sequence.first:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(scores.logprobs), own, rtol=1e-3, atol=1e-3)
        top = logprobs.topk(3)
        torch.testing.assert_close(torch.from_numpy(scores.top_logprobs), top.values, rtol=1e-3, atol=1e-3)
        assert scores.top_ids.tolist() == top.indices.tolist()


@full(proved_in="tests/integration/engine/test_engine.py tests/integration/engine/test_engine_failures.py",
      why="the same of an engine that serves a folder")
def test_engine_whose_server_dies_is_dead_and_the_other_one_serves(testbed: EngineTestbed, judges: Judges) -> None:
    for name in judges.runners:
        testbed.wait_ready(name, FOLDER_VERSION)
    judges.runners["judge-b"]._server.condemn("killed by the test")
    testbed.wait_state("judge-b", EngineState.DEAD)
    assert judges.ask() == (judges.expected(), FOLDER_VERSION)


@full(proved_in="tests/integration/engine/test_engine.py tests/integration/engine/test_engine_failures.py",
      why="the same of an engine that serves a folder")
def test_engine_drains(testbed: EngineTestbed, judges: Judges) -> None:
    testbed.wait_ready("judge-a", FOLDER_VERSION)
    judges.runners["judge-a"].drain()
    judges.threads[0].join(60)
    assert testbed.record("judge-a") is None
