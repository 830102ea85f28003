"""A real SGLang server that the test runs itself, taken into a pool by the driver's part and let go of again."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import httpx
import pytest
import ray
from support.engine_testbed import EngineTestbed

from elastic_rl.driver.external_engines import AdoptedEngines
from elastic_rl.engine.loader import LOADER
from elastic_rl.engine.router import RouterClient
from elastic_rl.etcd import events
from elastic_rl.etcd.fencing import raise_epoch
from elastic_rl.etcd.records import Engine, EngineState, ExternalEngine
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.processes import python, spawn, stop
from elastic_rl.runtime import free_port, wait_until

pytestmark = pytest.mark.timeout(240)
POOL = "rollout"


class Foreign:
    """A server, started as the manual says."""

    def __init__(self, rig: EngineTestbed) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = rig.ctx.config.run_dir / "foreign.log"
        self.process: subprocess.Popen[bytes] = spawn(python(
            "elastic_rl.engine.launch", "--model-path", rig.ctx.model_dir, "--port", str(port), "--dtype", "float32",
            "--custom-weight-loader", LOADER, "--skip-tokenizer-init", "--skip-server-warmup", "--device", "cpu",
            "--attention-backend", "torch_native", "--disable-overlap-schedule", "--disable-cuda-graph",
            "--disable-radix-cache", "--max-total-tokens", "4096", "--max-running-requests", "16", "--log-level",
            "warning", "--sleep-on-idle"), log=self.log, env={"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"})

    def version(self) -> str:
        """What it says of its weights; empty when it does not answer."""
        try:
            return str(httpx.get(f"{self.url}/model_info", timeout=2).json()["weight_version"])
        except httpx.HTTPError:
            return ""

    def forget(self) -> None:
        httpx.post(f"{self.url}/update_weight_version", json={"new_version": "default"}, timeout=5).raise_for_status()

    def die(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def answers(self) -> bool:
        body = {"input_ids": [5, 6, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
        return bool(httpx.post(f"{self.url}/generate", json=body, timeout=20).json()["output_ids"])


@pytest.fixture
def rig(etcd_servers, tmp_path) -> Iterator[EngineTestbed]:
    rig = EngineTestbed(etcd_servers, tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def foreign(rig: EngineTestbed) -> Iterator[Foreign]:
    server = Foreign(rig)
    yield server
    stop(server.process.pid)
    server.process.wait(10)


@pytest.fixture
def drivers(rig: EngineTestbed, foreign: Foreign) -> Iterator[Callable[[RunContext], AdoptedEngines]]:
    """Makes what a driver has of it, on Ray. The server starts meanwhile."""
    made: list[AdoptedEngines] = []

    def make(ctx: RunContext) -> AdoptedEngines:
        made.append(AdoptedEngines(ctx, rig.etcd, lambda phase: None, POOL))
        return made[-1]

    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    yield make
    for each in made:
        each.close()
    ray.shutdown()


def wish(rig: EngineTestbed, engine: str, url: str) -> ExternalEngine:
    adoption = ExternalEngine(engine=engine, pool=POOL, url=url)
    rig.etcd.put(rig.ctx.keys.adoption(url), adoption.encode())
    return adoption


def records(rig: EngineTestbed) -> dict[str, Engine]:
    found = [Engine.decode(kv.value) for kv in rig.etcd.range(rig.ctx.keys.engines_prefix())[0]]
    return {e.id: e for e in found}


def ready_at(rig: EngineTestbed, plane: AdoptedEngines, engine: str, version: int) -> Engine:
    def there() -> Engine | None:
        plane.reconcile({}, records(rig))
        found = records(rig).get(engine)
        return found if found and (found.state, found.version) == (EngineState.READY, version) else None

    return wait_until(there, timeout_s=90, what=f"{engine} at version {version}")


def reason(rig: EngineTestbed, plane: AdoptedEngines, url: str) -> str:
    """Why the engine of a server ended, once it has."""
    def ended() -> str:
        plane.reconcile({}, records(rig))
        found = rig.etcd.get(rig.ctx.keys.adoption(url))
        return ExternalEngine.decode(found.value).ended if found else ""

    return wait_until(ended, timeout_s=90, what=f"the end of the engine at {url}")


def workers(rig: EngineTestbed) -> dict[str, bool]:
    return RouterClient(rig.router.url).workers()


def told(rig: EngineTestbed, engine: str) -> list[str]:
    return [e.kind for e in events.recent(rig.etcd, rig.ctx.keys) if e.subject == engine]


def test_a_server_of_somebody_else_takes_part_and_outlives_it(
        rig: EngineTestbed, foreign: Foreign, drivers: Callable[[RunContext], AdoptedEngines]) -> None:
    plane = drivers(rig.ctx)
    first = rig.publish(seed=1)
    wait_until(foreign.version, timeout_s=120, what=f"the server (log: {foreign.log})",
               alive=lambda: foreign.process.poll() is None)
    wish(rig, "a0", foreign.url)
    engine = ready_at(rig, plane, "a0", first)
    assert engine.adopted and engine.pid == 0 and engine.url == foreign.url
    assert workers(rig) == {foreign.url: True} and plane.reconcile({}, records(rig)) == 1
    [greedy] = rig.ask()
    assert (greedy.token_ids, greedy.version) == (rig.expected(), first)
    second = rig.publish(seed=2)
    ready_at(rig, plane, "a0", second)
    [greedy] = rig.ask()
    assert (greedy.token_ids, greedy.version) == (rig.expected(), second)

    # Its runner is killed: the server gets no request any more, and is not taken in again.
    ray.kill(plane._held["a0"].placed.actor)
    assert reason(rig, plane, foreign.url)
    assert workers(rig) == {} and "a0" not in records(rig) and told(rig, "a0")[-2:] == ["engine.dead", "engine.removed"]
    assert foreign.version() == str(second)

    # Wished for anew; the next driver takes it in again, under its epoch; the wish is taken back: drained.
    wish(rig, "a1", foreign.url)
    ready_at(rig, plane, "a1", second)
    plane.close()
    assert workers(rig) == {} and foreign.version() == str(second)
    epoch = raise_epoch(rig.etcd, rig.ctx.keys, "the next driver").number
    rig.ctx = rig.ctx.model_copy(update={"epoch": epoch})
    plane = drivers(rig.ctx)
    assert ready_at(rig, plane, "a1", second).epoch == epoch
    rig.etcd.delete(rig.ctx.keys.adoption(foreign.url))

    def left() -> bool:
        plane.reconcile({}, records(rig))
        return not plane._held

    wait_until(left, timeout_s=30, what="the end of the drain")
    assert workers(rig) == {} and records(rig) == {} and told(rig, "a1")[-1] == "engine.stopped"
    assert foreign.version() == str(second) and foreign.answers(), "it is drained and goes on for others"

    # Nobody is there: it is refused, and that is no death.
    wish(rig, "a2", "http://192.0.2.1:9")
    assert "not an address of" in reason(rig, plane, "http://192.0.2.1:9")
    assert told(rig, "a2") == ["engine.starting", "engine.refused", "engine.removed"]

    # Somebody else changes what it says of its weights, as a server does that was started anew; then it dies.
    for engine_id, harm, said in (("a3", foreign.forget, "names version 0"), ("a4", foreign.die, "no longer answers")):
        rig.start_engine(engine_id, external_url=foreign.url)
        rig.wait_ready(engine_id, second)
        assert workers(rig) == {foreign.url: True}
        harm()
        assert said in rig.wait_state(engine_id, EngineState.DEAD).reason
        rig.threads[engine_id].join(30)
        assert not rig.threads[engine_id].is_alive() and workers(rig) == {}
        assert told(rig, engine_id)[-1] == "engine.dead"
