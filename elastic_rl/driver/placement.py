"""Runs the components of the compute plane as Ray actors, each in a placement group of its own. They are on the host of
the driver, but for the engines of pools that may spread over all hosts.

Actors and placement groups are detached: they outlive their driver, and the next driver of the same epoch adopts them
by their names, ``JOB/EPOCH/KIND/NAME``.

Nothing here waits: there may be no room in the cluster for a long time, and a process that hangs takes long to end.
The caller looks again in its next pass.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from elastic_rl.config import DeviceConfig, EngineConfig
from elastic_rl.driver.component_actor import ComponentActor
from elastic_rl.engine.server.arguments import tensor_parallel
from elastic_rl.errors import Fenced
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.ray_node import HOST_LABEL, RUN_HOST, label_of

_CREATED = "CREATED"
_GET_TIMEOUT_S = 5.0
"""Limit for getting a result that is there already."""
_WAIT_S = 60.0
"""Longest call that waits for the end of a component. With 10,000 of them such calls are renewed 170 times a second.
"""
_CONCURRENCY = 4
_ROOM_GRACE_S = 3.0
"""Ray needs a moment to place an actor; after this long the cluster has no room for it."""
_TERMINAL_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Placer:
    """Makes and finds the actors of one driver. What it makes and kills it does as the newest driver only: Ray itself
    does not know of drivers, so the fencing token is checked right before a kill, and right after an actor was made,
    which is removed again when the token does not hold."""

    def __init__(self, writer: FencedWriter, scope: str, generation: int) -> None:
        """``scope``: begins the names of the actors. ``generation``: of the driver."""
        self._writer, self._scope, self._generation = writer, scope, generation

    @classmethod
    def of(cls, ctx: RunContext, etcd: EtcdClient) -> Self:
        return cls(driver_writer(ctx, etcd), f"{ctx.job}/{ctx.epoch}/", ctx.generation)

    def place(self, kind: str, name: str, body: type | str, *args: Any, cpus: float, gpus: int,
              any_host: bool = False, avoid: Collection[str] = (), among: Collection[str] = ()) -> PlacedActor:
        """A new actor ``name`` of a kind; no two of a kind ever have one name. Ray places it as soon as there is room,
        however long that takes: on the host of the driver, on one of those that ``among`` names or, with ``any_host``,
        on any; of several on the one with the largest share of its resources free. ``avoid``: names of hosts on which
        it is not placed. ``body(*args)``: as ``ComponentActor`` has it. Raises RayError, Fenced and EtcdUnavailable."""
        full = f"{self._scope}{kind}/{name}"
        own = {} if any_host or among else {RUN_HOST: 1.0}
        where = among_hosts(among) if among else f"!{among_hosts(avoid)}" if avoid else ""
        bundle: dict[str, float] = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {}), **own}
        group = placement_group([bundle], name=full, lifetime="detached",
                                bundle_label_selector=[{HOST_LABEL: where}] if where else None)
        try:
            # Ray restarts none by itself: it would be without what its body had begun.
            actor = ray.remote(ComponentActor).options(
                name=full, lifetime="detached", num_cpus=cpus, num_gpus=gpus, resources=own,
                max_concurrency=_CONCURRENCY, max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group)).remote(body, *args)
            try:
                self._writer.require()
            except BaseException:
                ray.kill(actor)
                raise
        except BaseException:
            remove_placement_group(group)
            raise
        return PlacedActor(name, actor, group, bundle, self._writer, self._generation)

    def adopt(self, kind: str) -> list[PlacedActor]:
        """The actors of a kind that have not ended, which other drivers of the epoch have made. Raises RayError."""
        prefix, found = f"{self._scope}{kind}/", []
        tables = {table["name"]: table for table in placement_group_table().values()}
        for full in sorted(ray.util.list_named_actors()):
            if full.startswith(prefix) and full in tables:
                try:
                    actor, group = ray.get_actor(full), get_placement_group(full)
                except ValueError:  # it has ended meanwhile
                    continue
                placed = PlacedActor(full.removeprefix(prefix), actor, group, dict(tables[full]["bundles"][0]),
                                     self._writer, self._generation)
                if tables[full]["state"] == _CREATED:
                    placed.placed_at, placed.node = placed.created_at, tables[full]["bundles_to_node_id"][0]
                found.append(placed)
        return found

    def remove_unused_groups(self) -> None:
        """Removes the placement groups of actors that have ended while no driver ran, or were not made. Raises
        RayError."""
        living = set(ray.util.list_named_actors())
        for group in placement_group_table().values():
            if group["name"].startswith(self._scope) and group["name"] not in living and group["state"] != "REMOVED":
                remove_placement_group(get_placement_group(group["name"]))


def among_hosts(names: Collection[str]) -> str:
    """The condition on ``HOST_LABEL`` that the host is one of these."""
    return f"in({','.join(sorted(map(label_of, names)))})"


def hosts_of(condition: str) -> frozenset[str]:
    """The labels of the hosts that a condition of ``among_hosts`` names; of no condition, none."""
    return frozenset(filter(None, condition.removeprefix("in(").removesuffix(")").split(",")))


def driver_writer(ctx: RunContext, etcd: EtcdClient) -> FencedWriter:
    """The writer of the driver with this context: its token is the epoch and the generation."""
    return FencedWriter.of_driver(etcd, ctx.keys, ctx.epoch, ctx.generation)


class PlacedActor:
    """A placement group of one bundle with one Ray actor in it, removed together."""

    def __init__(self, name: str, actor: ActorHandle, group: PlacementGroup, bundle: dict[str, float],
                 writer: FencedWriter, generation: int) -> None:
        self.name, self.bundle = name, bundle
        self.created_at = time.monotonic()
        self.stopping = False
        """Whether it was told to stop, or killed."""
        self.placed_at = float("inf")
        """Monotonic seconds at which it was first seen to have room."""
        self.node = ""
        """Ray's id of the node that it has room on; empty before that."""
        self._kill_at, self._hurried = float("inf"), False
        self._actor, self._group, self._writer, self._generation = actor, group, writer, generation
        self._done: ray.ObjectRef | None = None

    @property
    def done(self) -> ray.ObjectRef:
        """Resolves when its work has ended, its process has died, or a while has passed (``has_ended``)."""
        self._done = self._done or self._actor.wait.remote(self._generation, _WAIT_S)
        return self._done

    def is_placed(self) -> bool:
        """Whether the cluster had room for it. Asks Ray until it had."""
        if self.placed_at == float("inf") and (table := placement_group_table(self._group)).get("state") == _CREATED:
            self.placed_at, self.node = time.monotonic(), table["bundles_to_node_id"][0]
        return self.placed_at < float("inf")

    def lacks_room(self) -> bool:
        """Whether it has waited for room for so long that there is none."""
        return not self.is_placed() and time.monotonic() - self.created_at >= _ROOM_GRACE_S

    def ask(self, method: str) -> None:
        """Calls a method of its body, without its answer."""
        self.call(method)

    def hurry(self) -> None:
        """Tells its body that its host ends in a moment, once."""
        if not self._hurried:
            self.ask("hurry")
            self._hurried = True

    def call(self, method: str) -> ray.ObjectRef:
        """Calls a method of its body; the reference of its answer."""
        return self._actor.call.remote(self._generation, method)

    def end(self, *, grace_s: float, method: str = "stop") -> None:
        """Asks it to stop, by a method of its body, and returns; ``enforce`` kills it when it has not ended after
        ``grace_s`` seconds, and one that still waits for room at once."""
        if self.stopping:
            return
        is_placed = self.is_placed()
        self.stopping, self._kill_at = True, time.monotonic() + (grace_s if is_placed else 0.0)
        if is_placed:
            self.ask(method)

    def kill_after(self, seconds: float) -> None:
        """Gives it so long to end by itself; then ``enforce`` kills it."""
        self._kill_at = min(self._kill_at, time.monotonic() + seconds)

    def kill(self) -> None:
        """Ends its process without asking. ``done`` resolves when that is known. Raises Fenced, when a newer driver may
        have adopted it, and EtcdUnavailable."""
        self._writer.require()
        self.stopping, self._kill_at = True, float("inf")
        ray.kill(self._actor)

    def enforce(self) -> None:
        """Kills it when its time to stop is over. Raises as ``kill``."""
        if time.monotonic() >= self._kill_at:
            self.kill()

    def has_ended(self) -> bool:
        """Whether it has ended, once ``done`` has resolved. Raises Fenced when a newer driver has called it: it must
        not look to an older one as if it had ended, since that one would clean up after it."""
        try:
            is_over = ray.get(self.done, timeout=_GET_TIMEOUT_S)[0]
        except ActorUnavailableError:  # Ray could not reach it for a moment
            is_over = False
        except (RayTaskError, RayActorError):
            is_over = True
        except RayError:  # that says nothing about it
            is_over = False
        if is_over is None:
            raise Fenced(f"driver {self._generation} has been replaced", hint="stop; another driver has taken over")
        if not is_over:
            self._done = None
        return bool(is_over)

    def outcome(self) -> tuple[Any, str]:
        """What its work returned, and the reason for its end, empty when it returned. Only once it has ended."""
        try:
            return ray.get(self.done, timeout=_GET_TIMEOUT_S)[1], ""
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


def ended(actors: Collection[PlacedActor], *, timeout_s: float = 0.0) -> list[PlacedActor]:
    """The actors that have ended. ``timeout_s``: longest wait for the first end."""
    by_ref = {actor.done: actor for actor in actors}
    refs, _ = ray.wait(list(by_ref), num_returns=len(by_ref) if not timeout_s else 1, timeout=timeout_s
                       ) if by_ref else ([], [])
    return [by_ref[ref] for ref in refs if by_ref[ref].has_ended()]


def told_to_stop(actors: Collection[PlacedActor]) -> bool:
    """Whether an earlier driver has told one of these actors to stop, whose bodies have ``is_stopping``. One that does
    not answer within seconds counts as one that was not. Raises RayError."""
    refs = [actor.call("is_stopping") for actor in actors if actor.is_placed()]
    answered = ray.wait(refs, num_returns=len(refs), timeout=_GET_TIMEOUT_S)[0] if refs else []
    found = False
    for ref in answered:
        with contextlib.suppress(RayError):  # it has just ended, which its end says
            found |= bool(ray.get(ref))
    return found


def stop_all(actors: Collection[PlacedActor], *, timeout_s: float) -> None:
    """Asks all of them to stop, waits for them together, and removes them, also those that did not stop. For the end of
    the compute plane."""
    for actor in actors:
        actor.end(grace_s=timeout_s)
    running, until = set(actors), time.monotonic() + timeout_s
    while running and (left_s := until - time.monotonic()) > 0:
        running -= set(ended(running, timeout_s=left_s))
    for actor in actors:
        actor.remove()


def run_on_hosts(function: Callable[..., None], by_address: Mapping[str, Sequence[Any]]) -> None:
    """Has a function run on some hosts, with the arguments of each, by its address; waits for none of them. A host that
    has no node of Ray is left out. Raises RayError."""
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    for address, args in by_address.items():
        if address in nodes:
            ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(
                nodes[address], soft=False)).remote(*args)


def room_needed(actors: Iterable[PlacedActor]) -> str:
    """``2 times CPU 1, GPU 4`` for a person, of actors of one kind."""
    waiting = list(actors)
    bundle = ", ".join(f"{name} {amount:g}" for name, amount in waiting[0].bundle.items() if name != RUN_HOST
                       ) if waiting else ""
    return f"{len(waiting)} times {bundle}" if len(waiting) > 1 else bundle


def gpus_per_engine(device: DeviceConfig, engine: EngineConfig) -> int:
    """GPUs that an engine of these settings uses: one for each tensor-parallel rank. Raises ConfigError."""
    return tensor_parallel(engine.extra_args) if uses_cuda(device) else 0


def uses_cuda(device: DeviceConfig) -> bool:
    """Whether these settings compute on GPUs; for ``auto`` Ray's view of the cluster decides."""
    return device.uses_cuda(lambda: ray.cluster_resources().get("GPU", 0) > 0)
