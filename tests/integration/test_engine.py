"""A real SGLang engine behind a real router, fed by a real checkpoint node: what is published is what is served."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from dcs_nodes import await_node, spawn_node
from transformers import AutoModelForCausalLM

from elastic_rl.config import parse
from elastic_rl.context import RunContext
from elastic_rl.coordinator import events
from elastic_rl.coordinator.epochs import raise_epoch
from elastic_rl.coordinator.records import Engine, EngineState
from elastic_rl.coordinator.store import Store
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.data.tokenizer import EOS_ID
from elastic_rl.dcs.publisher import Publisher
from elastic_rl.engine.client import GenerateClient
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.engine.runner import EngineRunner
from elastic_rl.processes import stop, wait_until

pytestmark = pytest.mark.timeout(240)

PROMPT = [5, 6, 3, 4, 7]


class Rig:
    """etcd, one DCS node, a router and one engine runner in a thread of this process."""

    def __init__(self, etcd, tmp: Path) -> None:
        config = parse({"job": f"t-{secrets.token_hex(6)}", "run_dir": str(tmp), "device": {"type": "cpu"}})
        self.store = Store(etcd.endpoints, call_timeout_s=2.0)
        self.router = RouterProcess(host="127.0.0.1", log=tmp / "router.log")
        self.router.start()
        model_dir = make_model_dir(tmp / "model", config)
        self.ctx = RunContext(config=config, etcd=etcd.endpoints, job=config.job, epoch=0, model_dir=str(model_dir),
                              router_url=self.router.url)
        epoch = raise_epoch(self.store, self.ctx.keys, "test")
        self.ctx = self.ctx.model_copy(update={"epoch": epoch.number})
        self.node = spawn_node(etcd.endpoints, self.ctx.keys, "n0", tmp)
        await_node(self.store, self.ctx.keys, self.node)
        self.publisher = Publisher(self.store, self.ctx.keys, "policy", epoch=epoch.number, owner="test",
                                   chunk_bytes=1 << 20, staging_ttl_s=10)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.runner: EngineRunner | None = None

    def run_engine(self, engine_id: str) -> threading.Thread:
        self.runner = EngineRunner(self.ctx, engine_id)
        thread = threading.Thread(target=self.runner.run, daemon=True)
        thread.start()
        return thread

    def publish(self, seed: int) -> int:
        """New random weights, kept in ``self.model`` as the reference."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for param in self.model.parameters():
                param.add_(torch.randn_like(param) * 0.2)
        return self.publisher.publish(self.model.state_dict().items(), meta={"step": seed}).number

    def record(self, engine_id: str) -> Engine | None:
        kv = self.store.get(self.ctx.keys.engine(engine_id))
        return Engine.decode(kv.value) if kv else None

    def wait_ready(self, engine_id: str, version: int) -> Engine:
        def there():
            r = self.record(engine_id)
            return r if r and r.state is EngineState.READY and r.version == version and not r.applying else None
        return wait_until(there, timeout_s=120, what=f"{engine_id} at version {version}", poll_s=0.01)

    def ask(self, n: int = 1, temperature: float = 0.0, tokens: int = 8):
        async def run():
            client = GenerateClient(self.router.url, timeout_s=60, retries=4)
            try:
                return await client.generate(PROMPT, n=n, temperature=temperature, max_new_tokens=tokens,
                                             stop_token_ids=[])
            finally:
                await client.close()
        return asyncio.run(run())

    def expected(self, tokens: int = 8) -> list[int]:
        ids = list(PROMPT)
        for _ in range(tokens):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == EOS_ID:
                break
        return ids[len(PROMPT):]

    def close(self) -> None:
        if self.runner:
            self.runner.stop()
        self.publisher.close()
        stop(self.node.pid)
        self.node.wait(10)
        self.router.stop()
        self.store.close()


@pytest.fixture(scope="module")
def rig(etcd, tmp_path_factory):
    rig = Rig(etcd, tmp_path_factory.mktemp("engine"))
    try:
        yield rig
    finally:
        rig.close()


def test_what_is_published_is_what_is_served_and_a_killed_engine_is_taken_out(rig):
    first = rig.publish(seed=1)
    thread = rig.run_engine("e0")
    ready = rig.wait_ready("e0", first)
    assert RouterClient(rig.router.url).workers() == {ready.url: True}
    [greedy] = rig.ask()
    assert (greedy.token_ids, greedy.version) == (rig.expected(), first)

    # Log-probs are those of the distribution that was sampled from.
    for sample in rig.ask(n=8, temperature=1.0):
        ids = torch.tensor([PROMPT + sample.token_ids])
        logprobs = rig.model(ids).logits[0, len(PROMPT) - 1:-1].log_softmax(-1)
        mine = logprobs.gather(1, ids[0, len(PROMPT):, None])[:, 0]
        assert torch.allclose(mine, torch.tensor(sample.logprobs), atol=1e-4)

    # A second version is followed in place, and the answers say so.
    second = rig.publish(seed=2)
    updated = rig.wait_ready("e0", second)
    assert updated.pid == ready.pid and 0 < updated.pull_apply_s < 5
    [greedy] = rig.ask()
    assert (greedy.token_ids, greedy.version) == (rig.expected(), second)
    print("pull+apply s:", ready.pull_apply_s, updated.pull_apply_s)

    # Witness of the fault: the process is gone; then the record says so and the router forgets it.
    os.kill(updated.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: rig.record("e0").state is EngineState.DEAD, timeout_s=10, what="the record of the death")
    print("noticed after s:", time.monotonic() - killed_at)
    assert time.monotonic() - killed_at < 5
    thread.join(20)
    assert not thread.is_alive()
    assert RouterClient(rig.router.url).workers() == {}
    assert "engine.dead" in [e.kind for e in events.recent(rig.store, rig.ctx.keys)]


def test_a_drained_engine_finishes_what_it_has_and_leaves_no_record(rig):
    version = rig.publish(seed=3)
    thread = rig.run_engine("e1")
    pid = rig.wait_ready("e1", version).pid
    answers: list = []
    asking = threading.Thread(target=lambda: answers.extend(rig.ask(n=16, temperature=1.0, tokens=50)))
    asking.start()
    wait_until(lambda: rig.runner._server.in_flight() > 0 or answers, timeout_s=20, what="a request in flight",
               poll_s=0.005)
    rig.runner.drain()
    asking.join(60)
    thread.join(60)
    assert not thread.is_alive() and len(answers) == 16 and all(a.finish_reason in ("length", "stop") for a in answers)
    assert rig.record("e1") is None and not Path(f"/proc/{pid}").exists()


def test_a_scheduler_that_is_killed_ends_the_engine(rig):
    version = rig.publish(seed=4)
    thread = rig.run_engine("e2")
    rig.wait_ready("e2", version)
    main, *children = rig.runner._server.pids
    assert children
    os.kill(children[0], signal.SIGKILL)
    wait_until(lambda: rig.record("e2").state is EngineState.DEAD, timeout_s=10, what="the record of the death")
    thread.join(20)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (main, *children)), timeout_s=10,
               what="the end of every process of the engine")
