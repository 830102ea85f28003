"""One engine and all that it needs, real: etcd, a DCS node, a router, and runners in threads of this process."""

from __future__ import annotations

import asyncio
import secrets
import threading
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from elastic_rl.config import parse
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.data.tokenizer import EOS_ID
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.engine.client import GenerateClient, Sample
from elastic_rl.engine.router import RouterProcess
from elastic_rl.engine.runner import EngineRunner
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import raise_epoch
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.processes import stop
from elastic_rl.runtime import wait_until
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers

PROMPT = [5, 6, 3, 4, 7]


class EngineTestbed:
    """Of one test file. ``engine``: settings of the section of this name."""

    def __init__(self, etcd_servers: EtcdServers, tmp: Path, **engine: object) -> None:
        config = parse({"job": f"t-{secrets.token_hex(6)}", "run_dir": str(tmp), "device": {"type": "cpu"},
                        "engine": engine})
        self.etcd = EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0)
        self.router = RouterProcess(host="127.0.0.1", log=tmp / "router.log")
        self.router.start()
        model_dir = make_model_dir(tmp / "model", config)
        self.ctx = RunContext(config=config, etcd_endpoints=etcd_servers.endpoints, job=config.job, epoch=0,
                              model_dir=str(model_dir),
                              router_url=self.router.url)
        epoch = raise_epoch(self.etcd, self.ctx.keys, "test")
        self.ctx = self.ctx.model_copy(update={"epoch": epoch.number})
        self.node = spawn_node(etcd_servers.endpoints, self.ctx.keys, "n0", tmp)
        await_node(self.etcd, self.ctx.keys, self.node)
        self.publisher = Publisher(self.etcd, self.ctx.keys, "policy", epoch=epoch.number, owner="test",
                                   chunk_bytes=1 << 20, staging_ttl_s=10)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.runners: dict[str, EngineRunner] = {}
        self.threads: dict[str, threading.Thread] = {}

    def run_engine(self, engine_id: str, *, attach_to: str = "") -> threading.Thread:
        runner = self.runners[engine_id] = EngineRunner(self.ctx, engine_id, attach_to=attach_to)
        thread = self.threads[engine_id] = threading.Thread(target=runner.run, daemon=True)
        thread.start()
        return thread

    def end_engine(self, engine_id: str) -> None:
        self.runners[engine_id].stop()
        self.threads[engine_id].join(30)
        assert not self.threads[engine_id].is_alive()

    def publish(self, seed: int, dtype: torch.dtype = torch.float32) -> int:
        """New random weights of ``dtype``, kept in ``self.model`` as the reference."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for param in self.model.parameters():
                param.add_(torch.randn_like(param) * 0.2).copy_(param.to(dtype))
        tensors = {name: tensor.to(dtype) for name, tensor in self.model.state_dict().items()}
        return self.publisher.publish(tensors.items(), meta={"step": seed}).number

    def record(self, engine_id: str) -> Engine | None:
        kv = self.etcd.get(self.ctx.keys.engine(engine_id))
        return Engine.decode(kv.value) if kv else None

    def wait_ready(self, engine_id: str, version: int) -> Engine:
        def there() -> Engine | None:
            r = self.record(engine_id)
            return r if r and r.state is EngineState.READY and r.version == version and not r.applying else None
        return wait_until(there, timeout_s=120, what=f"{engine_id} at version {version}", poll_s=0.01)

    def wait_state(self, engine_id: str, *states: EngineState, timeout_s: float = 30) -> Engine:
        def there() -> Engine | None:
            r = self.record(engine_id)
            return r if r and r.state in states else None
        return wait_until(there, timeout_s=timeout_s, what=f"{engine_id} to be {' or '.join(states)}", poll_s=0.01)

    def ask(self, n: int = 1, temperature: float = 0.0, tokens: int = 8) -> list[Sample]:
        async def run() -> list[Sample]:
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
        for runner in self.runners.values():
            runner.stop()
        for thread in self.threads.values():
            thread.join(30)
        self.publisher.close()
        stop(self.node.pid)
        self.node.wait(10)
        self.router.stop()
        self.etcd.close()
