"""The worlds by name, and runs of them over many seeds.

A world may count what happens in it. Then "0 violations" of many seeds can say what they have met, and what never
happened.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from chaos_tests.sim import alerts, cluster, election, flow, pipeline
from chaos_tests.sim import failures as failure_world
from chaos_tests.sim.flow import ASYNC_LIMITS, AsyncWorld
from chaos_tests.sim.pipeline import LIMITS, PLAN, World
from chaos_tests.sim.violation import RuleViolated
from elastic_rl.pipeline.sampling.fault_isolation import DropLimit

STEPS = "steps"
"""The kind under which a world counts everything that it did, one after the other."""


@runtime_checkable
class Counted(Protocol):
    """What a run gives that has counted what happened in it."""

    counts: Counter[str]
    """How often each kind of thing happened: a fault, a step or a branch of the world."""


@dataclass(frozen=True)
class SimWorld:
    """``run``: one run of a seed, which raises where a rule was broken. ``kinds``: what can be counted in what it
    returns, where that is ``Counted``."""

    what: str
    run: Callable[[int], object]
    kinds: frozenset[str] = frozenset()


def _liars(seed: int) -> World:
    return World(seed, limits=replace(LIMITS, max_staleness=seed % 5, drop_limit=DropLimit(1.0, 64)), lies=0.1).run()


def _async_liars(seed: int) -> World:
    limits = replace(ASYNC_LIMITS, max_staleness=seed % 5, drop_limit=DropLimit(1.0, 64))
    return AsyncWorld(seed, limits, lies=0.1).run()


def function_of(module: str, function: str) -> Callable[[int], Any]:
    """A function of a world that takes seconds to import, and is needed by few commands."""
    return lambda seed: getattr(import_module(f"chaos_tests.sim.{module}"), function)(seed)


_LIES = frozenset({"command refused: stale", "lie: a version that there is not", "lie: any version",
                   "lost: the trainer refuses the samples", "stale group dropped"})
_QUEUE_READ_BY_RANKS = frozenset({"groups gone when the ranks read them"})

WORLDS: Mapping[str, SimWorld] = {
    "steps": SimWorld("a synchronous run: trainers, actors, engines and etcd die", lambda seed: World(seed).run(),
                      pipeline.RL_KINDS),
    "steps-sft": SimWorld("a supervised job", lambda seed: World(seed, replace(PLAN, mode="sft")).run(),
                          pipeline.KINDS),
    "steps-reference": SimWorld("a run whose ranks compute the reference's log-probs",
                                lambda seed: World(seed, asks_reference=True).run(),
                                pipeline.RL_KINDS | {"reference pass"}),
    "steps-poison": SimWorld("a run with groups that the trainer cannot compute with",
                             lambda seed: World(seed, poison=(0, 4, 5, 11)).run(),
                             pipeline.RL_KINDS | {"groups that cannot be computed with"}),
    "steps-stopped": SimWorld("a run that its operator stops and resumes", lambda seed: World(seed, stops=3).run(),
                              pipeline.RL_KINDS | {"effect Stop", "stop asked", "stop before an effect",
                                                   "stop in the middle of an effect"}),
    "steps-liars": SimWorld("engines that say versions they do not have", _liars, pipeline.RL_KINDS | _LIES),
    "async": SimWorld("a run whose groups are generated beside the steps", lambda seed: AsyncWorld(
        seed, replace(ASYNC_LIMITS, max_staleness=seed % 4), state_every=2 + seed % 3, deaths=seed % 2 * 6).run(),
        flow.KINDS | _QUEUE_READ_BY_RANKS),
    "async-parts": SimWorld("the same, with steps that are trained in parts", lambda seed: AsyncWorld(
        seed, replace(ASYNC_LIMITS, max_staleness=seed % 2, groups_per_part=1 + seed % 2)).run(),
        flow.KINDS | {"part of a step"}),
    "async-liars": SimWorld("the same, with engines that say versions they do not have", _async_liars,
                            flow.KINDS | _LIES | _QUEUE_READ_BY_RANKS),
    "election": SimWorld("replicas that lead: pauses, partitions, expired leases, wrong clocks", election.run,
                         election.KINDS),
    "cluster": SimWorld("leader and host agents: hosts lose power and network and come back", cluster.run,
                        cluster.KINDS),
    "alerts": SimWorld("alerts from fault to receiver: leaders die in each write, receivers fail", alerts.run,
                       alerts.KINDS),
    "versions": SimWorld("versions from publisher to reader: publishers and nodes die, epochs end, bytes change",
                         function_of("catalog", "run"), frozenset({
                             "published", "fenced", "read", "new epoch", "new formation", "node killed",
                             "bytes changed on a node", "bytes changed on the way"})),
    "versions-disks": SimWorld("the same, with nodes whose disks outlive them, and rot", function_of(
        "catalog", "run_with_disks"), frozenset({"published", "read", "node killed", "bytes changed on a node",
                                                 "manifest lost for good"})),
    "engines": SimWorld("drivers and engines: take-overs, global restarts, drains, what is left of an epoch",
                        function_of("engines", "run"), frozenset({
                            "requests", "kill", "stop", "move", "restart", "ray", "engine", "head", "scale",
                            "go on"})),
    "failures": SimWorld("the failure policy: parts die and hang, restarts fail, leaders die in each write",
                         failure_world.run, failure_world.KINDS),
}


@dataclass(frozen=True)
class Failure:
    world: str
    seed: int
    why: str
    rule: str = ""
    """The rule that was broken; "" where the product itself, or its world, has failed."""

    def __str__(self) -> str:
        return f"{self.world}, seed {self.seed}: {self.why}"


@dataclass
class Played:
    """Runs of one world."""

    runs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """What happened in all of them, but those that broke a rule."""
    seeds_with: Counter[str] = field(default_factory=Counter)
    """In how many of them each kind happened."""
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Played) -> None:
        self.runs += other.runs
        self.counts.update(other.counts)
        self.seeds_with.update(other.seeds_with)
        self.failures += other.failures


def play(name: str, seeds: Iterable[int], *, until_s: float = float("inf")) -> Played:
    """Runs a world with each seed. Ends when ``until_s`` of the monotonic clock has passed."""
    played = Played()
    for seed in seeds:
        if time.monotonic() > until_s:
            break
        played.runs += 1
        try:
            found = WORLDS[name].run(seed)
        except RuleViolated as e:
            played.failures.append(Failure(name, seed, str(e), e.rule))
        except Exception as e:  # a planted or real bug may raise anything
            played.failures.append(Failure(name, seed, f"{type(e).__name__}: {e}"))
        else:
            if isinstance(found, Counted):
                played.counts.update(found.counts)
                played.seeds_with.update(kind for kind, n in found.counts.items() if n)
    return played


def failures(names: Iterable[str], seeds: Iterable[int]) -> Iterator[Failure | None]:
    """Runs each world with each seed, world after world; gives one item a run: None where no rule was broken."""
    seeds = list(seeds)
    for name in names:
        for seed in seeds:
            yield next(iter(play(name, [seed]).failures), None)
