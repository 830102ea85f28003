"""The worlds by name, and runs of them over many seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from chaos_tests.sim import alerts, cluster, election
from chaos_tests.sim.flow import ASYNC_LIMITS, AsyncWorld
from chaos_tests.sim.pipeline import LIMITS, PLAN, World
from elastic_rl.pipeline.sampling.fault_isolation import DropLimit


@dataclass(frozen=True)
class SimWorld:
    """``run``: one run of a seed, which raises where a rule was broken."""

    what: str
    run: Callable[[int], object]


def _liars(seed: int) -> None:
    World(seed, limits=replace(LIMITS, max_staleness=seed % 5, drop_limit=DropLimit(1.0, 64)), lies=0.1).run()


def _async_liars(seed: int) -> None:
    AsyncWorld(seed, replace(ASYNC_LIMITS, max_staleness=seed % 5, drop_limit=DropLimit(1.0, 64)), lies=0.1).run()


def function_of(module: str, function: str) -> Callable[[int], Any]:
    """A function of a world that takes seconds to import, and is needed by few commands."""
    return lambda seed: getattr(import_module(f"chaos_tests.sim.{module}"), function)(seed)


WORLDS: Mapping[str, SimWorld] = {
    "steps": SimWorld("a synchronous run: trainers, actors, engines and etcd die", lambda seed: World(seed).run()),
    "steps-sft": SimWorld("a supervised job", lambda seed: World(seed, replace(PLAN, mode="sft")).run()),
    "steps-reference": SimWorld("a run whose ranks compute the reference's log-probs",
                                lambda seed: World(seed, asks_reference=True).run()),
    "steps-poison": SimWorld("a run with groups that the trainer cannot compute with",
                             lambda seed: World(seed, poison=(0, 4, 5, 11)).run()),
    "steps-stopped": SimWorld("a run that its operator stops and resumes", lambda seed: World(seed, stops=3).run()),
    "steps-liars": SimWorld("engines that say versions they do not have", _liars),
    "async": SimWorld("a run whose groups are generated beside the steps", lambda seed: AsyncWorld(
        seed, replace(ASYNC_LIMITS, max_staleness=seed % 4)).run()),
    "async-parts": SimWorld("the same, with steps that are trained in parts", lambda seed: AsyncWorld(
        seed, replace(ASYNC_LIMITS, max_staleness=seed % 2, groups_per_part=1 + seed % 2)).run()),
    "async-liars": SimWorld("the same, with engines that say versions they do not have", _async_liars),
    "election": SimWorld("replicas that lead: pauses, partitions, expired leases, wrong clocks", election.run),
    "cluster": SimWorld("leader and host agents: hosts lose power and network and come back", cluster.run),
    "alerts": SimWorld("alerts from fault to receiver: leaders die in each write, receivers fail", alerts.run),
    "versions": SimWorld("versions from publisher to reader: publishers and nodes die, epochs end, bytes change",
                         function_of("catalog", "run")),
    "engines": SimWorld("drivers and engines: take-overs, global restarts, drains, what is left of an epoch",
                        function_of("engines", "run")),
}


@dataclass(frozen=True)
class Failure:
    world: str
    seed: int
    why: str

    def __str__(self) -> str:
        return f"{self.world}, seed {self.seed}: {self.why}"


def failures(names: Iterable[str], seeds: Iterable[int], *, until_s: float = float("inf")) -> Iterator[Failure | None]:
    """Runs each world with each seed, world after world; gives one item a run: None where no rule was broken. Ends when
    ``until_s`` of the monotonic clock has passed."""
    seeds = list(seeds)
    for name in names:
        for seed in seeds:
            if time.monotonic() > until_s:
                return
            try:
                WORLDS[name].run(seed)
            except Exception as e:  # a planted or real bug may raise anything
                yield Failure(name, seed, f"{type(e).__name__}: {e}")
            else:
                yield None
