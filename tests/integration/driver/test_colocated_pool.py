"""The driver of a colocated job on real Ray and etcd: Ray counts GPUs that are not there, and nothing computes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from support.etcd_server import EtcdServers
from support.ray_cluster import start_ray
from support.stub_actors import StubEngine, StubTrainer
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.shared_gpus import SharedGpus
from elastic_rl.driver.trainer_group import TrainerGroup
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, PoolSpec, PoolStatus
from elastic_rl.etcd.run_context import RunContext

POOL, GPUS, RANKS = "rollout", 4, 2


@pytest.fixture(scope="module")
def ray_with_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # for the workers, which import the tests' actors
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        start_ray(8, GPUS)
    yield
    ray.shutdown()


class ColocatedPlane:
    """The pool and the trainer group of a job on GPUs, two of each."""

    def __init__(self, etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, folder: Path) -> None:
        self.etcd, self.keys, self.folder = etcd, keys, folder
        cfg = config.parse({
            "job": keys.job, "run_dir": str(folder), "placement": "colocated", "device": {"type": "cuda"},
            "rollout": {"engines": 2}, "trainer": {"data_parallel": RANKS},
            "engine": {"request_timeout_s": 0.2, "drain_timeout_s": 0.5, "apply_timeout_s": 0.5,
                       "release_timeout_s": 1.0}})
        ctx = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir="",
                         epoch=fencing.raise_epoch(etcd, keys, holder="test").number)
        cfg.cluster_dir.mkdir(parents=True)
        self.shared = SharedGpus(RANKS)
        self.pool = EnginePool(ctx, etcd, body=StubEngine, shared=self.shared)
        self.pool.take_over()
        self.trainer = TrainerGroup(ctx, etcd, folder / "context.json", body=StubTrainer, shared=self.shared)

    def until(self, check: Callable[[], object], what: str) -> None:
        def passed() -> object:
            self.shared.reconcile()
            self.pool.reconcile({})
            self.trainer.reconcile()
            return check()

        wait_until(passed, what=what, poll_s=0.1)

    def engines(self) -> dict[str, Engine]:
        return {e.id: e for e, _ in readable(self.etcd.range(self.keys.engines_prefix())[0], Engine)}

    def ready(self) -> list[str]:
        """The GPUs of each engine."""
        return sorted(e.layout for e in self.engines().values())

    def close(self) -> None:
        self.pool.close()
        self.trainer.close()
        self.shared.close()


@pytest.fixture
def plane(ray_with_gpus: None, etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path
          ) -> Iterator[ColocatedPlane]:
    with contextlib.closing(ColocatedPlane(etcd_servers, etcd, keys, tmp_path)) as made:
        yield made


def test_engines_use_the_gpus_of_the_trainer_one_each_and_ray_gives_them_to_nobody_else(plane: ColocatedPlane) -> None:
    plane.until(lambda: len(plane.ready()) == 2 and (plane.folder / "gpus").exists(), "engines and trainer")
    gpus = (plane.folder / "gpus").read_text().split(",")
    assert len(gpus) == RANKS and plane.ready() == sorted(gpus)
    assert ray.available_resources().get("GPU") == GPUS - RANKS

    # A third one has no GPU to share, and the pool says so.
    plane.etcd.put(plane.keys.pool_spec(POOL), PoolSpec(name=POOL, desired=3).encode())
    plane.until(lambda: "no GPU of the trainer" in plane.pool.waiting, "the reason")
    assert plane.ready() == sorted(gpus)
    plane.etcd.put(plane.keys.pool_spec(POOL), PoolSpec(name=POOL, desired=2).encode())
    plane.until(lambda: plane.pool.waiting == "", "a whole pool")


def test_holder_whose_process_dies_is_replaced_and_ray_gives_its_gpus_to_nobody_else(plane: ColocatedPlane) -> None:
    def is_held() -> bool:
        return ray.available_resources().get("GPU") == GPUS - RANKS

    plane.until(lambda: len(plane.ready()) == 2 and is_held(), "engines")
    first = plane.shared._holder
    assert first is not None
    first._placed.kill()
    plane.until(lambda: plane.shared._holder not in (None, first) and is_held(), "another holder")
    assert len(plane.ready()) == 2


def test_engine_that_keeps_its_memory_in_the_trainers_turn_is_replaced_on_its_gpu(plane: ColocatedPlane) -> None:
    plane.until(lambda: len(plane.ready()) == 2, "engines")
    gpus, late = plane.ready(), next(iter(plane.engines().values()))
    plane.etcd.put(plane.keys.engine(late.id), late.replace(holds_device=True).encode())
    plane.until(lambda: late.id not in plane.engines() and len(plane.ready()) == 2, "another engine")
    assert plane.ready() == gpus
    [event] = [e for e in events.recent(plane.etcd, plane.keys) if e.kind == "engine.replaced"]
    assert "did not release its memory in the trainer's turn" in event.message
    assert PoolStatus.decode(plane.etcd.get(plane.keys.pool_status(POOL)).value).released == 0
