"""An engine that shares devices: what becomes of it, and of its claim on them, when it ends. etcd is real, the server a
stand-in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster_files import make_secret
from support.etcd_server import EtcdServers
from support.waiting import PATIENCE_S, wait_until

from elastic_rl import config
from elastic_rl.config import ROLLOUT_POOL, EngineConfig
from elastic_rl.dcs import model_files
from elastic_rl.engine import runner as runner_module
from elastic_rl.engine.colocated_runner import ColocatedRunner
from elastic_rl.engine.server.sglang_server import EngineServer
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.device_claims import DeviceClaims
from elastic_rl.etcd.device_phase import Side
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.net.addresses import LOOPBACK


class Server(EngineServer):
    """Answers every call, and ends when the test says so."""

    url, pid, layout, tensor_parallel = "http://127.0.0.1:9", 17, "layout", 1

    def __init__(self, model_dir: str, *, cfg: EngineConfig, **_: object) -> None:
        super().__init__(cfg, secret="", log_hint="")
        self.has_ended = False
        self.ends_when_killed = True
        self.calls: list[str] = []

    def start(self, wait_while: object = None) -> None: ...

    def alive(self) -> bool:
        return not self.has_ended

    def probe(self) -> bool | None:
        return True

    def stop(self) -> bool:
        return self.ends_when_killed

    def in_flight(self) -> int:
        return 0

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
              ) -> dict[str, Any]:
        self.calls.append(path)
        return {}


class ReleasedEngine:
    """An engine whose server runs and has released its memory, in the trainer's phase."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient) -> None:
        self.etcd, self.key = etcd, ctx.keys.engine("rollout-a")
        self.claims = DeviceClaims(etcd, ctx.keys, ROLLOUT_POOL, epoch=ctx.epoch)
        self._writer = FencedWriter.of_epoch(etcd, ctx.keys, ctx.epoch)
        self.runner = ColocatedRunner(ctx, "rollout-a")
        self._thread = threading.Thread(target=self.runner.run, daemon=True)
        self._thread.start()
        self.take_memory()
        self.begin_trainer_phase()
        wait_until(lambda: (found := self.record()) and found.state is EngineState.RELEASED, what="the release")

    def take_memory(self) -> None:
        """Begins a phase of the engines, and returns once the engine has memory."""
        assert self.claims.begin_phase(Side.ENGINES, self._writer, 1)
        wait_until(lambda: (found := self.record()) and found.state is EngineState.SYNCING and found.holds_device,
                   what="an engine with memory")

    def begin_trainer_phase(self) -> None:
        assert self.claims.begin_phase(Side.TRAINER, self._writer, 1)

    @property
    def server(self) -> Server:
        server = self.runner._server
        assert isinstance(server, Server)
        return server

    def record(self) -> Engine | None:
        found = self.etcd.get(self.key)
        return Engine.decode(found.value) if found else None

    def await_end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the runner has not ended"

    def close(self) -> None:
        self.runner.stop()
        self.await_end()
        self.claims.close()


@pytest.fixture
def engine(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
           ) -> Iterator[ReleasedEngine]:
    monkeypatch.setattr(runner_module, "SGLangServer", Server)
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "device": {"type": "cpu"},
                        "placement": "colocated", "etcd": {"call_timeout_s": 2.0}})
    make_secret(cfg)
    (tmp_path / model_files.CONFIG).write_text("{}")  # the model is on this host
    ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir=str(tmp_path),
                     epoch=fencing.raise_epoch(etcd, keys, "test").number, host=LOOPBACK)
    made = ReleasedEngine(ctx, etcd)
    yield made
    made.close()


@pytest.mark.parametrize("ends_when_killed", [True, False])
def test_engine_whose_server_dies_without_memory_is_dead_and_holds_nothing(engine: ReleasedEngine,
                                                                           ends_when_killed: bool) -> None:
    assert engine.server.calls == ["/release_memory_occupation"]
    engine.server.ends_when_killed, engine.server.has_ended = ends_when_killed, True
    engine.await_end()
    dead = engine.record()
    assert dead is not None and dead.state is EngineState.DEAD and not dead.holds_device
    assert dead.reason == "a process of the SGLang server ended"
    assert engine.claims.take_for_trainer("formation-1") == "", "the trainer waits for a dead engine"


@pytest.mark.parametrize("ends_when_killed", [True, False])
def test_engine_whose_server_dies_with_memory_holds_the_device_while_a_killed_process_lives(
        engine: ReleasedEngine, ends_when_killed: bool) -> None:
    engine.take_memory()
    engine.server.ends_when_killed, engine.server.has_ended = ends_when_killed, True
    engine.await_end()
    dead = engine.record()
    assert dead is not None and dead.state is EngineState.DEAD and dead.holds_device is not ends_when_killed
    engine.begin_trainer_phase()
    assert engine.claims.take_for_trainer("formation-1") == (
        "" if ends_when_killed else "engine rollout-a to release memory")


def test_engine_that_is_stopped_without_memory_leaves_no_record_and_the_trainer_waits_for_none(
        engine: ReleasedEngine) -> None:
    engine.runner.stop()
    engine.await_end()
    assert engine.record() is None and engine.claims.take_for_trainer("formation-1") == ""
