"""Runs a part of the compute plane as a Ray actor in a placement group of its own.

Nothing here waits: there may be no room in the cluster for a long time, and a process that hangs takes long to end.
The caller looks again in its next pass.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from elastic_rl.config import DeviceConfig, EngineConfig
from elastic_rl.engine.server.arguments import tensor_parallel

_CREATED = "CREATED"
_GET_TIMEOUT_S = 5.0
"""Limit for getting a result that is there already."""
_ROOM_GRACE_S = 3.0
"""Ray needs a moment to place an actor; after this long the cluster has no room for it."""
_TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class PlacedActor:
    """A placement group of one bundle with one Ray actor in it, created and removed together.

    Ray places it as soon as there is room, however long that takes. ``cls`` has the methods ``run``, which returns when
    its work has ended, and ``stop``, which makes it return.
    """

    def __init__(self, name: str, cls: type, *args: Any, cpus: float, gpus: int) -> None:
        """Raises RayError."""
        self.name = name
        self.bundle: dict[str, float] = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
        self.created_at = time.monotonic()
        self.stopping = False
        """Whether it was told to stop, or killed."""
        self.placed_at = float("inf")
        """Monotonic seconds at which it was first seen to have room."""
        self._kill_at = float("inf")
        self._group: PlacementGroup = placement_group([self.bundle], name=name)
        try:
            self._actor = ray.remote(cls).options(
                num_cpus=cpus, num_gpus=gpus, max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group)).remote(*args)
            self.done: ray.ObjectRef = self._actor.run.remote()
            """Resolves when ``run`` has returned or the actor's process has died."""
        except BaseException:
            remove_placement_group(self._group)
            raise

    def is_placed(self) -> bool:
        """Whether the cluster had room for it. Asks Ray until it had."""
        if self.placed_at == float("inf") and placement_group_table(self._group).get("state") == _CREATED:
            self.placed_at = time.monotonic()
        return self.placed_at < float("inf")

    def lacks_room(self) -> bool:
        """Whether it has waited for room for so long that there is none."""
        return not self.is_placed() and time.monotonic() - self.created_at >= _ROOM_GRACE_S

    def ask(self, method: str) -> None:
        """Calls a method of the actor, without its answer."""
        getattr(self._actor, method).remote()

    def call(self, method: str) -> ray.ObjectRef:
        """Calls a method of the actor; the reference of its answer."""
        return getattr(self._actor, method).remote()

    def end(self, *, grace_s: float) -> None:
        """Asks it to stop, and returns; ``enforce`` kills it when it has not ended after ``grace_s`` seconds. One that
        still waits for room ends at once."""
        if self.stopping:
            return
        if not self.is_placed():
            self.kill()
            return
        self.stopping, self._kill_at = True, time.monotonic() + grace_s
        self.ask("stop")

    def kill_after(self, seconds: float) -> None:
        """Gives it so long to end by itself; then ``enforce`` kills it."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def kill(self) -> None:
        """Ends its process without asking. ``done`` resolves when that is known."""
        self.stopping, self._kill_at = True, float("inf")
        ray.kill(self._actor)

    def enforce(self) -> None:
        """Kills it when its time to stop is over."""
        if time.monotonic() >= self._kill_at:
            self.kill()

    def outcome(self) -> tuple[Any, str]:
        """What ``run`` returned, and the reason for its end, empty when it returned. Only once it has ended."""
        try:
            return ray.get(self.done, timeout=_GET_TIMEOUT_S), ""
        except RayError as e:
            return None, describe(e)

    def remove(self) -> None:
        """Kills it if it still runs, and frees its resources."""
        ray.kill(self._actor)
        remove_placement_group(self._group)


def describe(error: RayError) -> str:
    """Why an actor ended, in one line: Ray's texts have many, of which another one counts for each kind of error."""
    lines = [line.strip() for line in _TERMINAL_COLOURS.sub("", str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    raised = isinstance(error, RayTaskError) or "creation task" in lines[0]  # then the last line is Python's own
    return lines[-1] if raised else lines[0]


def ended(actors: Collection[PlacedActor]) -> list[PlacedActor]:
    """The actors that have ended."""
    by_ref = {actor.done: actor for actor in actors}
    refs, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0) if by_ref else ([], [])
    return [by_ref[ref] for ref in refs]


def stop_all(actors: Collection[PlacedActor], *, timeout_s: float) -> None:
    """Asks all of them to stop, waits for them together, and removes them, also those that did not stop. For the end of
    the driver."""
    for actor in actors:
        actor.end(grace_s=timeout_s)
    if actors:
        ray.wait([actor.done for actor in actors], num_returns=len(actors), timeout=timeout_s)
    for actor in actors:
        actor.remove()


def room_needed(actors: Iterable[PlacedActor]) -> str:
    """``2 times CPU 1, GPU 4`` for a person, of actors of one kind."""
    waiting = list(actors)
    bundle = ", ".join(f"{name} {amount:g}" for name, amount in waiting[0].bundle.items()) if waiting else ""
    return f"{len(waiting)} times {bundle}" if len(waiting) > 1 else bundle


def gpus_per_engine(device: DeviceConfig, engine: EngineConfig) -> int:
    """GPUs that an engine of these settings uses: one for each tensor-parallel rank. Raises ConfigError."""
    return tensor_parallel(engine.extra_args) if uses_cuda(device) else 0


def uses_cuda(device: DeviceConfig) -> bool:
    """Whether these settings compute on GPUs; for ``auto`` Ray's view of the cluster decides."""
    return device.uses_cuda(lambda: ray.cluster_resources().get("GPU", 0) > 0)
