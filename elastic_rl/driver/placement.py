"""Reserves resources of a machine for a process: a Ray actor in a placement group of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_rl.config import Config
from elastic_rl.errors import PreflightFailed

_STOP_TIMEOUT_S = 10.0


class PlacedActor:
    """A placement group of one bundle with one Ray actor in it. Both are created and removed together."""

    WAITING = "waiting for resources"
    """Phase of a driver that creates one: in a full cluster it may take long."""

    def __init__(self, name: str, cls: type, *args: Any, cpus: float, gpus: int, timeout_s: float) -> None:
        """Raises PreflightFailed when the cluster has no room within ``timeout_s``."""
        bundle: dict[str, float] = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
        self.group: PlacementGroup = placement_group([bundle], name=name)
        if not self.group.wait(timeout_s):
            remove_placement_group(self.group)
            raise PreflightFailed(f"the cluster has no room for {name}: {bundle}", hint="add a machine or scale in")
        self.actor = ray.remote(cls).options(
            num_cpus=cpus, num_gpus=gpus, max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group)).remote(*args)

    def remove(self) -> None:
        ray.kill(self.actor)
        remove_placement_group(self.group)


class PlacedEngine(Protocol):
    """An engine that runs in a placed actor. ``done`` resolves when the engine has ended."""

    placed: PlacedActor
    done: ray.ObjectRef


def stop_engines(engines: Collection[PlacedEngine]) -> None:
    """Asks all engines to stop, waits for them together, and removes their actors, also of those that did not stop."""
    for engine in engines:
        engine.placed.actor.stop.remote()
    if engines:
        ray.wait([engine.done for engine in engines], num_returns=len(engines), timeout=_STOP_TIMEOUT_S)
    for engine in engines:
        engine.placed.remove()


def gpus_per_engine(cfg: Config) -> int:
    return 1 if uses_cuda(cfg) else 0


def uses_cuda(cfg: Config) -> bool:
    """Whether this configuration computes on GPUs; for ``auto`` Ray's view of the cluster decides."""
    return cfg.device.uses_cuda(lambda: ray.cluster_resources().get("GPU", 0) > 0)
