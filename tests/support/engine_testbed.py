"""Engines with all that they need, all real: etcd, a DCS node, a router, and runners in threads of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from safetensors.torch import load_file

from elastic_rl.config import ROLLOUT_POOL, parse
from elastic_rl.data.samples import Sample
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.data.tokenizer import EOS_ID
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.colocated_runner import ColocatedRunner
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.engine.runner import EngineRunner
from elastic_rl.engine.sglang.loader import LOADER
from elastic_rl.errors import Conflict
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import raise_epoch
from elastic_rl.etcd.records import Engine, EngineState, Event
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.compute_services import compute_services, router_service
from elastic_rl.host.job_secrets import engine_access, engine_key_file
from elastic_rl.host.leftovers import SHM, sweep
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import python, stop
from elastic_rl.net.addresses import LOOPBACK, free_port
from elastic_rl.runtime.file_tags import TAG_ENV
from support.cluster_files import make_secret
from support.dcs_nodes import await_node, spawn_node
from support.etcd_server import EtcdServers
from support.forked import spawn
from support.waiting import PATIENCE_S, wait_until

PROMPT = [5, 6, 3, 4, 7]
QUICK = {"probe_interval_s": 0.5, "frozen_after_s": 6.0}
"""Settings with which a frozen engine is found soon."""


class EngineTestbed:
    """One job with a pool of engines. Tests share it, so each has engines of its own names and ends what it breaks."""

    def __init__(self, etcd_servers: EtcdServers, tmp: Path, model: dict[str, Any] | None = None) -> None:
        """``model``: settings of the section of this name."""
        config = parse({"job": f"t-{secrets.token_hex(6)}", "run_dir": str(tmp), "device": {"type": "cpu"},
                        "engine": {"start_timeout_s": PATIENCE_S}, "model": model or {}})
        self.etcd = EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0)
        make_secret(config)
        self.access = engine_access(config)
        self.key = self.access.key
        self.router = RouterProcess(compute_services(JobPaths.of(config)), router_service(ROLLOUT_POOL),
                                    epoch=0, host="127.0.0.1", log=tmp / "router.log",
                                    key_file=partial(engine_key_file, config),
                                    request_timeout_s=config.engine.request_timeout_s)
        self.router.start()
        model_dir = make_model_dir(tmp / "model", config)
        self.ctx = RunContext(config=config, etcd_endpoints=etcd_servers.endpoints, job=config.job, epoch=0,
                              model_dir=str(model_dir), router_urls={ROLLOUT_POOL: self.router.url}, host=LOOPBACK)
        self.keys = self.ctx.keys
        self.publisher: Publisher | None = None
        self.raise_epoch()
        self.node = spawn_node(etcd_servers.endpoints, self.keys, "n0", tmp)
        await_node(self.etcd, self.keys, self.node)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.published = self.publish(seed=0)
        self.runners: dict[str, EngineRunner] = {}
        self.threads: dict[str, threading.Thread] = {}

    def raise_epoch(self) -> int:
        """Begins the epoch of the next driver, which this testbed takes part in from here on."""
        self.ctx = self.ctx.model_copy(update={"epoch": raise_epoch(self.etcd, self.keys, "test").number})
        if self.publisher is not None:
            self.publisher.close()
        self.publisher = Publisher(self.etcd, self.keys, "policy", epoch=self.ctx.epoch, owner="test",
                                   chunk_bytes=1 << 20, staging_ttl_s=10)
        return self.ctx.epoch

    # -- engines ----------------------------------------------------------------------------------------------------
    def context(self, **engine: object) -> RunContext:
        """The run's context with some settings of the section ``engine`` changed."""
        config = self.ctx.config.model_copy(update={"engine": self.ctx.config.engine.model_copy(update=engine)})
        return self.ctx.model_copy(update={"config": config})

    def start_engine(self, engine_id: str, *, external_url: str = "", **engine: object) -> EngineRunner:
        """Runs an engine in a thread of this process. ``engine``: settings of the section of this name."""
        runner = self.runners[engine_id] = EngineRunner(self.context(**engine), engine_id, external_url=external_url)
        return self._run(engine_id, runner)

    def start_colocated_engine(self, engine_id: str, **engine: object) -> EngineRunner:
        """A deterministic engine that has device memory in its phases only. ``engine``: as in ``start_engine``."""
        ctx = self.context(**engine)
        config = ctx.config.model_copy(update={"placement": "colocated", "deterministic": True})
        runner = self.runners[engine_id] = ColocatedRunner(ctx.model_copy(update={"config": config}), engine_id)
        return self._run(engine_id, runner)

    def _run(self, engine_id: str, runner: EngineRunner) -> EngineRunner:
        self.threads[engine_id] = threading.Thread(target=runner.run, daemon=True)
        self.threads[engine_id].start()
        return runner

    def serving_engine(self) -> str:
        """A ready engine with the settings of production: one that an earlier test left, or a new one."""
        ready = [e.id for e in self.records().values() if e.id.startswith("plain") and e.state is EngineState.READY]
        if not ready:
            ready = [f"plain-{secrets.token_hex(2)}"]
            self.start_engine(ready[0])
        self.wait_ready(ready[0])
        return ready[0]

    def await_end(self, engine_id: str) -> None:
        """Waits until the engine's runner has returned."""
        self.threads[engine_id].join(PATIENCE_S)
        assert not self.threads[engine_id].is_alive(), f"the runner of {engine_id} has not ended"

    def stop_engines(self) -> None:
        """Ends every engine. Each leaves the router and deletes its record, as far as it lives."""
        for runner in self.runners.values():
            runner.stop()
        for engine_id in self.runners:
            self.await_end(engine_id)
        for engine_id in self.records():
            self.etcd.delete(self.keys.engine(engine_id))  # of engines that died, which a driver deletes

    def server_pids(self, engine_id: str) -> list[int]:
        return self.runners[engine_id]._server.pids

    def in_flight(self, engine_id: str) -> int:
        return self.runners[engine_id]._server.in_flight()

    # -- records ----------------------------------------------------------------------------------------------------
    def records(self) -> dict[str, Engine]:
        found = [Engine.decode(kv.value) for kv in self.etcd.range(self.keys.engines_prefix())[0]]
        return {e.id: e for e in found}

    def record(self, engine_id: str) -> Engine | None:
        return self.records().get(engine_id)

    def wait_ready(self, engine_id: str, version: int = 0) -> Engine:
        """The record once the engine serves ``version`` (0: the last one that was published)."""
        def ready() -> Engine | None:
            r = self.record(engine_id)
            return r if r and r.state is EngineState.READY and r.version == wanted and not r.applying else None

        wanted = version or self.published
        return wait_until(ready, what=f"{engine_id} at version {wanted}")

    def wait_state(self, engine_id: str, *states: EngineState) -> Engine:
        def there() -> Engine | None:
            r = self.record(engine_id)
            return r if r and r.state in states else None

        return wait_until(there, what=f"{engine_id} to be {' or '.join(states)}")

    def events(self, engine_id: str) -> list[Event]:
        """The events of one engine, the newest last."""
        return [e for e in events.recent(self.etcd, self.keys, limit=1000) if e.subject == engine_id]

    # -- versions and samples ---------------------------------------------------------------------------------------
    def publish(self, seed: int, dtype: torch.dtype = torch.float32) -> int:
        """New random weights of ``dtype``, kept in ``self.model`` as the reference. Returns the version's number."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for param in self.model.parameters():
                param.add_(torch.randn_like(param) * 0.2).copy_(param.to(dtype))
        tensors = self.checkpoint() if self.model.config.model_type != "qwen3" else self.model.state_dict()
        converted = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        for _ in range(5):
            with contextlib.suppress(Conflict):  # the node lost its lease for a moment: the trainer publishes again too
                self.published = self.publisher.publish(converted.items(), meta={"step": seed}).number
                return self.published
        raise AssertionError("the DCS node keeps losing its lease")

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """The reference weights as a model folder has them, and the trainer publishes them: tied ones once, each expert
        on its own."""
        folder = self.ctx.config.run_dir / "reference"
        self.model.save_pretrained(folder)
        return load_file(folder / "model.safetensors")

    def ask(self, n: int = 1, temperature: float = 0.0, tokens: int = 8,
            seed: int | None = None, resume: bool = False) -> list[Sample]:
        """``n`` samples of ``PROMPT`` through the router. An engine that gets no CPU for a while answers late, and a
        router that has no healthy engine meanwhile answers at once: it is asked again for as long as tests wait."""
        async def run() -> list[Sample]:
            client = GenerateClient(self.router.url, timeout_s=PATIENCE_S, retries=100, access=self.access)
            try:
                return await client.generate(PROMPT, Sampling(tokens, temperature, seed=seed, resume=resume), n)
            finally:
                await client.close()
        return asyncio.run(run())

    @contextlib.contextmanager
    def asked(self, engine_id: str, *, n: int = 16, tokens: int = 50) -> Iterator[Future[list[Sample]]]:
        """A request for long answers, in flight in the engine unless it is answered already. Its end is awaited."""
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(self.ask, n, 1.0, tokens)
            wait_until(lambda: answers.done() or self.in_flight(engine_id), what="a request in flight", poll_s=0.005)
            yield answers

    @contextlib.contextmanager
    def asked_again_and_again(self, engine_id: str, *, resume: bool = False) -> Iterator[list[Sample]]:
        """Requests for long answers, one after the other, so that hardly ever none is in flight in the engine. All
        their samples are there at the end."""
        over, answers = threading.Event(), list[Sample]()

        def ask() -> None:
            while not over.is_set():
                answers.extend(self.ask(16, 1.0, 50, resume=resume))

        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(ask)
            try:
                wait_until(lambda: asking.done() or answers or self.in_flight(engine_id), what="a request in flight",
                           poll_s=0.005)  # once one is answered the next one is on its way
                yield answers
            finally:
                over.set()
                asking.result()  # why it does not ask any more, where the caller waits for that

    def expected(self, tokens: int = 8) -> list[int]:
        """What greedy decoding gives with the reference weights, by transformers."""
        ids = list(PROMPT)
        for _ in range(tokens):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == EOS_ID:
                break
        return ids[len(PROMPT):]

    def assert_serves(self, version: int = 0) -> None:
        """The pool answers with the tokens of the version that was published last."""
        [greedy] = self.ask()
        assert (list(greedy.response_ids), greedy.oldest_version) == (self.expected(), version or self.published)

    def assert_logprobs(self, samples: list[Sample]) -> None:
        """The log-probs are those of the distribution that was sampled from, by transformers."""
        for sample in samples:
            ids = torch.tensor([[*PROMPT, *sample.response_ids]])
            with torch.no_grad():
                logprobs = self.model(ids).logits[0, len(PROMPT) - 1:-1].log_softmax(-1)
            picked = logprobs.gather(1, ids[0, len(PROMPT):, None])[:, 0]
            assert torch.allclose(picked, torch.tensor([p for s in sample.segments for p in s.logprobs]), atol=1e-4)

    def workers(self) -> dict[str, bool]:
        """Whether each worker of the router is healthy, by URL."""
        return RouterClient(self.router.url, access=self.access).workers()

    def await_unrouted(self, url: str) -> None:
        wait_until(lambda: url not in self.workers(), what=f"the removal of {url} from the router")

    def close(self) -> None:
        for runner in self.runners.values():
            runner.stop()
        for thread in self.threads.values():
            thread.join(30)
        self.publisher.close()
        stop(self.node.pid)
        self.node.wait(60)
        self.router.stop()
        self.etcd.close()
        sweep(JobPaths.of(self.ctx.config))


def spawn_sglang(command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a server as ``host.processes.spawn`` does, but for its imports. ``command``: that of the program of
    servers."""
    return spawn("support.sglang_process", *command[3:], log=log, env=env)


class ForeignServer:
    """An SGLang server that the test runs itself, started as the manual says."""

    def __init__(self, testbed: EngineTestbed) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = testbed.ctx.config.run_dir / "foreign.log"
        self.process: subprocess.Popen[bytes] = spawn_sglang(python(
            "elastic_rl.engine.sglang.launch", "--model-path", testbed.ctx.model_dir, "--port", str(port),
            "--dtype", "float32", "--custom-weight-loader", LOADER, "--skip-tokenizer-init", "--skip-server-warmup",
            "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
            "--disable-cuda-graph", "--disable-radix-cache", "--max-total-tokens", "4096",
            "--max-running-requests", "16", "--log-level", "warning", "--sleep-on-idle"),
            log=self.log, env={"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
                               TAG_ENV: JobPaths.of(testbed.ctx.config).file_tag("foreign")})  # so that it is swept


def scheduler_of(server_pid: int) -> psutil.Process:
    """The scheduler of a server without tensor parallelism."""
    [found] = [p for p in psutil.Process(server_pid).children(recursive=True) if "scheduler" in " ".join(p.cmdline())]
    return found


def await_gone(pids: list[int]) -> None:
    """Waits until no process has one of the pids; orphans are reaped a moment after they ended."""
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), what="the end of every process")


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """SIGSTOP, seen to work, and SIGCONT at the end if the process still exists."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, what="the stop")
        yield
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def sglang_files(pids: list[int]) -> set[Path]:
    """What processes of a server have made outside the run's folder: segments that they map, sockets that they listen
    on. Read from the kernel, whatever the files are called."""
    found: set[Path] = set()
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text()
        found |= {Path(line[line.index(str(SHM)):]) for line in maps.splitlines() if f" {SHM}/" in line}
        found |= {Path(c.laddr) for c in psutil.Process(pid).net_connections(kind="unix")
                  if isinstance(c.laddr, str) and c.laddr.startswith("/")}
    # Neither the arena of the DCS node, nor what is unlinked already.
    return {p for p in found if not p.name.startswith("elastic-rl-") and not p.name.endswith(" (deleted)")}
