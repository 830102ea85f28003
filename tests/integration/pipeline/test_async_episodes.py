"""Episodes of an environment in the fully asynchronous schedule: the real rollout role and the process of the
environment, with an engine over HTTP that serves the trainer's newest version in each turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.actor_runs import WAIT_S
from support.cluster_files import make_secret
from support.etcd_server import EtcdServers
from support.scripted_engine import Engine
from support.simulated_job import Roles, SimulatedJob
from support.text_model import make_tokenizer_folder
from support.waiting import wait_until

from elastic_rl.config import ROLLOUT_POOL, Stream
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.engine.generation import Answers, PromptRequest
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import StepMetrics, Version, VersionState
from elastic_rl.roles.rollout import GenerationRequest, RolloutRole, decoded

MODULE = '''
from elastic_rl.environments.base import Message, Observation

class Quiz:
    def __init__(self): self.turns, self.right = 0, False
    async def step(self, text):
        self.turns += 1
        self.right = self.right or text == "four"
        return Observation((Message("tool", "go on"),), self.right * 0.5, done=self.turns == 2)
    async def close(self): pass

def make(options, context):
    return lambda prompt, seed: Quiz()
'''


class EpisodeRoles(Roles):
    """Samples are those of the rollout role."""

    rollout: RolloutRole
    loop: asyncio.AbstractEventLoop

    def generate(self, prompts: Sequence[PromptRequest], min_version: int,  # type: ignore[override]
                 in_probation: bool = False) -> list[Answers]:
        async def answers() -> list[Answers]:
            return [decoded(some) async for some in self.rollout.generate(
                GenerationRequest(tuple(prompts), min_version, in_probation),
                fencing.current_term(self.rollout.etcd, self.rollout.ctx.keys))]

        return asyncio.run_coroutine_threadsafe(answers(), self.loop).result(WAIT_S)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """The first sample of a group is right in its first turn, and no other."""
    made = Engine(ModelTokenizer(make_tokenizer_folder(tmp_path / "model")))
    made.says = lambda turn, index: "so it is" if turn else "two" if index else "four"
    yield made
    made.close()


@pytest.fixture
def job(engine: Engine, etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedJob]:
    (tmp_path / "own_quiz.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name, count in (("questions", 90), ("exam", 4)):
        rows = ({"messages": [{"role": "user", "content": f"{name} {i}."}]} for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = SimulatedJob(etcd, etcd_servers.endpoints, keys, tmp_path, **{
        "train.schedule": "fully_async", "train.max_staleness": "1", "train.eval_every_steps": "100",
        "sft.max_steps": "0", "rollout.groups_per_request": "1",
        "rollout.environment": "own_quiz:make", "rollout.reward": "environment",
        "engine.request_timeout_s": str(2 * WAIT_S),
        "engine.drain_timeout_s": str(2 * WAIT_S), "model.path": str(tmp_path / "model"), "data.source": "jsonl",
        "data.options": json.dumps({
            "paths": str(tmp_path / "questions.jsonl"), "eval_paths": str(tmp_path / "exam.jsonl"),
            "messages_key": "messages", "max_prompt_tokens": 60, "max_response_tokens": 100})})
    made.roles = roles = EpisodeRoles(made.trainer, etcd, keys)

    def serves() -> int:
        version = Version(stream=Stream.POLICY, number=made.trainer.version, state=VersionState.COMMITTED,
                          epoch=made.ctx.epoch)
        etcd.put(keys.stream_head(Stream.POLICY), version.encode())  # as whoever has published it
        return version.number

    engine.version = serves
    make_secret(made.cfg)
    roles.rollout = RolloutRole(made.ctx.model_copy(update={
        "router_urls": {ROLLOUT_POOL: engine.url}, "model_dir": str(tmp_path / "model")}))
    roles.loop = asyncio.new_event_loop()
    thread = threading.Thread(target=roles.loop.run_forever, daemon=True)
    thread.start()
    with contextlib.ExitStack() as closing:
        closing.callback(roles.rollout.close)
        closing.callback(thread.join, WAIT_S)
        closing.callback(roles.loop.call_soon_threadsafe, roles.loop.stop)
        closing.callback(made.close)
        yield made


def test_episodes_are_trained_exactly_once_and_stale_ones_are_played_again(job: SimulatedJob, engine: Engine) -> None:
    """The second turn of an episode waits while two steps are trained; it is of the newest version then, and the first
    turn is too old."""
    release, held, begun = threading.Event(), list[str](), dict[str, list[int]]()
    lock = threading.Lock()

    def hold(turn: int, prompt: str) -> None:
        question = prompt.partition("<|end|>")[0]
        with lock:
            if turn == 0:
                begun.setdefault(question, []).append(job.trainer.version)
            holds = turn == 1 and "questions" in question and not held
            if holds:
                held.append(question)
        if holds:
            release.wait(WAIT_S)

    engine.before_turn = hold
    errors = job.start_actor()
    wait_until(lambda: job.trainer.progress.step >= 2, what="two steps without it")
    assert held
    release.set()
    job.finish()
    job.assert_exactly_once()
    assert errors == []
    versions = begun[held[0]]
    assert len(versions) == 4 and versions[0] == versions[1] < versions[2] == versions[3], "two samples, twice"
    metrics = [StepMetrics.decode(kv.value) for kv in job.etcd.range(job.keys.steps_prefix())[0]]
    assert sum(m.update["groups_stale"] for m in metrics) >= 1
    assert max(m.staleness for m in metrics) == 1 == max(m.update["staleness_max"] for m in metrics)
    for _, batch in job.trainer.trained:
        for tokens, mask, first in zip(
                batch.by_sample("tokens"), batch.by_sample("loss_mask"), ("four", "two") * 8, strict=True):
            written = engine.tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=False)
            assert written == f"{first}<|end|>so it is<|end|>", "what the environment said is not trained on"
