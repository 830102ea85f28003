"""A pool that serves the weights of a folder, beside the one of the policy: real servers, a router each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from support.engine_testbed import PROMPT, EngineTestbed, await_gone, sglang_files
from support.tiers import full
from support.waiting import PATIENCE_S, wait_until

from elastic_rl import config
from elastic_rl.config import PoolConfig
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import Sample
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.data.tokenizer import EOS_ID, encode
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.engine.runner import FOLDER_VERSION, EngineRunner
from elastic_rl.engine.scoring import ScoreRequest
from elastic_rl.errors import EngineFailed, PluginFailed
from elastic_rl.etcd.records import EngineState
from elastic_rl.host.compute_services import router_service
from elastic_rl.host.job_secrets import engine_key_file
from elastic_rl.host.leftovers import tagged_files
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.rewards.judging import Judgement, JudgeOptions, JudgeRequest
from elastic_rl.roles.genrm import GenRmRole
from elastic_rl.roles.teacher import TeacherRole

POOL = "judge"


class Judges:
    """A pool with a model of another family than the policy's, and its first engine, ``judge-a``."""

    def __init__(self, testbed: EngineTestbed, folder: Path) -> None:
        self.testbed = testbed
        self.model_dir = make_model_dir(folder / "judge", config.parse({"seed": 7, "model": {"family": "llama"}}))
        self.router = RouterProcess(ServiceFiles(folder / "compute"), router_service(POOL), epoch=testbed.ctx.epoch,
                                    host="127.0.0.1", log=folder / "router-judge.log", request_timeout_s=60.0,
                                    key_file=partial(engine_key_file, testbed.ctx.config))
        self.router.start()
        ctx, pools = testbed.ctx, {POOL: PoolConfig(model=str(self.model_dir), engine={"max_total_tokens": 2048})}
        self.ctx = ctx.model_copy(update={
            "config": ctx.config.model_copy(update={"pools": pools}),
            "router_urls": {**ctx.router_urls, POOL: self.router.url}})
        self.model = transformers.AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32).eval()
        self.runners: dict[str, EngineRunner] = {}
        self.threads: dict[str, threading.Thread] = {}
        self.start("judge-a")

    def start(self, engine_id: str) -> None:
        self.runners[engine_id] = EngineRunner(self.ctx, engine_id, POOL)
        self.threads[engine_id] = threading.Thread(target=self.runners[engine_id].run, daemon=True)
        self.threads[engine_id].start()

    def close(self) -> None:
        for runner in self.runners.values():
            runner.stop()
        for engine_id in self.threads:
            self.await_end(engine_id)
        self.router.stop()

    def await_end(self, engine_id: str) -> None:
        """Waits until the engine's runner has returned."""
        self.threads[engine_id].join(PATIENCE_S)
        assert not self.threads[engine_id].is_alive(), f"the runner of {engine_id} has not ended"

    def workers(self) -> dict[str, bool]:
        """Whether each worker of the pool's router is healthy, by URL."""
        return RouterClient(self.router.url, access=self.testbed.access).workers()

    def ask(self, sampling: Sampling = Sampling(8, 0.0), n: int = 1) -> list[Sample]:
        """``n`` samples of ``PROMPT`` through the pool's router."""
        async def run() -> list[Sample]:
            client = GenerateClient(self.router.url, timeout_s=PATIENCE_S, retries=100, access=self.testbed.access)
            try:
                return await client.generate(PROMPT, sampling, n)
            finally:
                await client.close()

        return asyncio.run(run())

    def assert_serves(self) -> None:
        """The pool answers with the tokens of its folder."""
        [greedy] = self.ask()
        assert (list(greedy.response_ids), greedy.oldest_version) == (self.expected(), FOLDER_VERSION)

    def expected(self, prompt: Sequence[int] = PROMPT) -> list[int]:
        """What greedy decoding gives, by transformers."""
        ids = list(prompt)
        while len(ids) < len(prompt) + 8 and ids[-1] != EOS_ID:
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt):]


@pytest.fixture(scope="module")
def judges(testbed: EngineTestbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judges]:
    made = Judges(testbed, tmp_path_factory.mktemp("judges"))
    yield made
    made.close()


def test_engine_serves_the_folder_and_no_version_of_the_policy(testbed: EngineTestbed, judges: Judges) -> None:
    """It joins the router of its own pool alone."""
    engine = testbed.wait_ready("judge-a", FOLDER_VERSION)
    assert engine.checksum and engine.pool == POOL
    judges.assert_serves()
    assert judges.workers() == {engine.url: True}
    assert engine.url not in testbed.workers()

    testbed.publish(seed=11)
    looks = judges.runners["judge-a"]._next_record  # of which each is a whole pass of the runner
    for _ in range(3):
        looks = wait_until(lambda before=looks: (now := judges.runners["judge-a"]._next_record) > before and now,
                           what="a pass of the runner")
    assert testbed.record("judge-a").version == FOLDER_VERSION
    judges.assert_serves()


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
    for sequence, scores in zip(sequences, found, strict=True):
        ids = torch.tensor([sequence.token_ids])
        logprobs = judges.model(ids).logits[0, sequence.first - 1:-1].log_softmax(-1).detach()
        own = logprobs.gather(-1, ids[0, sequence.first:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(scores.logprobs), own, rtol=1e-3, atol=1e-3)
        top = logprobs.topk(3)
        torch.testing.assert_close(torch.from_numpy(scores.top_logprobs), top.values, rtol=1e-3, atol=1e-3)
        assert scores.top_ids.tolist() == top.indices.tolist()


@full(proved_in="tests/integration/engine/test_engine.py",
      why="the same of two engines that serve a folder, with a policy's engine beside them")
def test_engine_whose_server_dies_is_dead_and_the_other_one_serves(testbed: EngineTestbed, judges: Judges) -> None:
    judges.start("judge-b")
    policy = testbed.serving_engine()
    one, two = (testbed.wait_ready(name, FOLDER_VERSION) for name in judges.runners)
    assert one.checksum == two.checksum
    testbed.wait_ready(policy, testbed.publish(seed=12))
    testbed.assert_serves()
    judges.assert_serves()
    judges.runners["judge-b"]._server.condemn("killed by the test")
    testbed.wait_state("judge-b", EngineState.DEAD)
    judges.assert_serves()


def test_drained_engine_finishes_its_requests_and_leaves_nothing(testbed: EngineTestbed, judges: Judges) -> None:
    engine, runner = testbed.wait_ready("judge-a", FOLDER_VERSION), judges.runners["judge-a"]
    pids, tag = runner._server.pids, JobPaths.of(testbed.ctx.config).file_tag("judge-a")
    files = sglang_files(pids)
    assert files and files <= set(tagged_files(tag)), "SGLang made files that no sweep would find"
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(judges.ask, Sampling(50, 1.0), 16)
        wait_until(lambda: answers.done() or runner._server.in_flight(), what="a request in flight", poll_s=0.005)
        runner.drain()
    assert len(answers.result()) == 16 and all(a.finish_reason in ("length", "stop") for a in answers.result())
    judges.await_end("judge-a")
    assert testbed.record("judge-a") is None and engine.url not in judges.workers()
    assert testbed.events("judge-a")[-1].kind == "engine.stopped"
    await_gone(pids)
    assert not any(f.exists() for f in files) and not tagged_files(tag)
