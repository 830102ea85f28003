"""driver-kill, router-kill, rank-kill, engine-kill, ray-head-kill, raylet-kill, role-kill, global-restart: one run of
short steps gets one fault after the other. Each begins when the run has worked for a while since the one before: its
pool is whole, its ranks are there, and it has done further steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from elastic_rl.bench.loop.outages import Outage, seconds_until
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.recovery import bare_starts, trials
from elastic_rl.bench.recovery.testbed import TRIAL_S, Testbed, alive
from elastic_rl.bench.recovery.trials import Trial, follow, holds
from elastic_rl.bench.suite import why_of
from elastic_rl.config.groups import ACTOR
from elastic_rl.coordinator.targets import JOB
from elastic_rl.driver.service_supervisor import STABLE_S
from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.records import EngineState
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.kinds import EngineKilled, RayNodeKilled, Restarted, RoleKilled, TrainerRankKilled
from elastic_rl.faults.outages import RouterKilled
from elastic_rl.host import inherited_model
from elastic_rl.host.compute_services import RAY_HEAD, RAY_WORKER
from elastic_rl.host.job_secrets import engine_access
from elastic_rl.host.paths import JobPaths
from elastic_rl.net import http_client
from elastic_rl.report.build import read_records
from elastic_rl.runtime.waiting import wait_until

STEP = "the next step is done"
_DRIVER, _ENGINES, _RANKS = "a new driver has begun", "all engines serve", "all ranks are there"
_REBUILT = (_DRIVER, _ENGINES, _RANKS)
_BACK = "another process is in its place"
_GROUP, _ANSWER = "the trainer group works", "a request is answered"
_STARTS, _FETCHES = "another engine starts", "its server runs, and it fetches weights"
_RECOVERED_S = STABLE_S + 5.0
"""After so long the driver counts a service as recovered; it sees the restart a moment later than this process."""
_APART_STEPS = 2
"""Steps between the recovery from a fault and the next one, of which one may have been under way."""
_ROLES = ("actor", "advantages", "rollout")
_BARE_STARTS = 5
_WORKS_S = 1800.0
"""Longest wait for the run to work as before: two restarts of the whole compute plane on an overloaded machine."""
_REQUEST: Mapping[str, Any] = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
_REQUEST_S = 5.0


@dataclass(frozen=True)
class Kind:
    """A fault of the run."""

    fault: Callable[[FaultContext, int], Fault]
    """Makes the fault of a trial; the number counts the trials."""
    what: str
    goal: float
    end: str = STEP
    """The milestone until which is measured."""
    stages: tuple[str, ...] = _REBUILT
    """Milestones that show what the time goes into. Where another process in the place of the killed one is among them,
    a step counts that is done after that: without the part the run may still end a step, or several."""
    beyond_start: bool = False
    """Whether the goal holds beyond the bare start of an engine."""
    apart_s: float = 0.0
    """Seconds for which the run works at least before the next fault: a part that ends sooner comes back later each
    time."""


KINDS: Mapping[str, Kind] = {
    "router-kill": Kind(lambda c, _: RouterKilled(c), "kill -9 of the router", 5.0, end=_ANSWER, stages=(),
                        apart_s=_RECOVERED_S),
    "rank-kill": Kind(lambda c, _: TrainerRankKilled(c), "kill -9 of a trainer rank", 15.0, end=_GROUP,
                      stages=(_RANKS,)),
    "role-kill": Kind(lambda c, number: RoleKilled(c, _ROLES[number % len(_ROLES)]),
                      f"kill -9 of the replica of a role, in turn of {', '.join(_ROLES)}", 60.0, stages=(_BACK,)),
    "engine-kill": Kind(lambda c, _: EngineKilled(c), "kill -9 of an engine", trials.SPARE_S, end=_ENGINES,
                        stages=(_STARTS, _FETCHES), beyond_start=True),
    "driver-kill": Kind(lambda c, _: RoleKilled(c, "driver"), "kill -9 of the driver", 10.0, stages=(_BACK,)),
    "ray-head-kill": Kind(lambda c, _: RayNodeKilled(c, RAY_HEAD), "kill -9 of the GCS of Ray's head", 60.0,
                          stages=(_BACK,), apart_s=_RECOVERED_S),
    "raylet-kill": Kind(lambda c, _: RayNodeKilled(c, RAY_WORKER), "kill -9 of the raylet of Ray's worker", 60.0,
                        stages=(_BACK, *_REBUILT)),
    "global-restart": Kind(lambda c, _: Restarted(c, JOB), "a global restart on request", 60.0),
}


def measure(testbed: Testbed) -> Iterator[Row]:
    chosen = {row: kind for row, kind in KINDS.items() if testbed.options.selects(row, f"{row}-max")}
    later: dict[str, list[Trial]] = {}
    with testbed.run():
        for row, kind in chosen.items():
            _await_working(testbed)  # where it does not work any more, no further row can be measured
            try:
                found = [_trial(testbed, kind, number) for number in range(testbed.trials)]
            except (ElasticRLError, psutil.Error) as e:  # the other parts can be measured all the same
                yield from trials.unmeasured(row, kind.what, why_of(e), goal=kind.goal)
                continue
            if kind.beyond_start:
                later[row] = found
            else:
                yield from rows(row, found)
    if later:  # a bare start shares the machine with the durable plane alone
        testbed.options.say("bare starts: engine")
        bare = bare_starts.engine(testbed.cfg, inherited_model.began_with(testbed.cfg), testbed.new_folder("engines"),
                                  min(testbed.trials, _BARE_STARTS))
        for row, found in later.items():
            yield from rows(row, found, bare)


def rows(row: str, found: Sequence[Trial], bare: Sequence[float] = ()) -> list[Row]:
    """Pure."""
    kind = KINDS[row]
    return trials.rows(row, kind.what, found, (kind.end,), goal=kind.goal, stages=kind.stages, bare=bare)


def _trial(testbed: Testbed, kind: Kind, number: int) -> Trial:
    context = testbed.context
    _await_working(testbed, kind.apart_s if number else 0.0)
    fault = kind.fault(context, number)
    outage, driver = Outage(context.step(), began=time.time()), _driver(context)
    engines = {engine.id for engine in context.engines()}
    target, witness = fault.inject()
    outage.ended = time.time()
    testbed.options.say(f"{target}: {witness}")
    milestones = _milestones(testbed, outage, driver, engines)
    if _BACK in kind.stages:
        assert isinstance(fault, RayNodeKilled | RoleKilled)
        milestones |= after_replacement(fault.is_back, milestones[STEP], outage, context.step)
    return follow({name: milestones[name] for name in (*kind.stages, kind.end, STEP)}, (kind.end, STEP),
                  timeout_s=TRIAL_S)


def _await_working(testbed: Testbed, apart_s: float = 0.0) -> None:
    """Returns when the run works as before any fault, and has done steps since, for ``apart_s`` seconds at least.
    Raises DeadlineExceeded, also for a run that has ended."""
    context, run = testbed.context, testbed.cluster.run

    def wait(check: Callable[[], object], what: str) -> None:
        wait_until(lambda: holds(check), timeout_s=_WORKS_S, what=what,
                   alive=lambda: not holds(lambda: run.read().ended))

    wait(lambda: _engines_serve(context) and _ranks_are_there(context) and context.step() > 0, "the run")
    first, since = context.step() + _APART_STEPS, time.monotonic()
    wait(lambda: context.step() >= first and time.monotonic() - since >= apart_s, "a further step of the run")


# -- milestones -------------------------------------------------------------------------------------------------------
def _milestones(testbed: Testbed, outage: Outage, driver: int, engines: Collection[str]
                ) -> dict[str, Callable[[], object]]:
    """``driver``: its pid before the outage; ``engines``: ids of the engines that there were then."""
    context, steps = testbed.context, JobPaths.of(testbed.cfg).steps
    recovered = event_kinds.TRAINER_GROUP_EVENTS[ACTOR.name].recovered
    return {_DRIVER: lambda: _driver(context) not in (0, driver),
            _STARTS: lambda: any(engine.id not in engines for engine in context.engines()),
            _FETCHES: lambda: any(engine.id not in engines and engine.state is not EngineState.STARTING
                                  for engine in context.engines()),
            _ENGINES: lambda: _engines_serve(context),
            _RANKS: lambda: _ranks_are_there(context),
            _GROUP: lambda: context.has_event(recovered, outage.began or 0.0),
            _ANSWER: lambda: _is_answered(testbed),
            # The records say more, and grow; so they are read when the status says that there is something to find.
            STEP: lambda: context.step() > outage.step and seconds_until(read_records(steps), [outage], 1)}


def after_replacement(is_back: Callable[[], bool], is_done: Callable[[], object], outage: Outage,
                      step: Callable[[], int]) -> dict[str, Callable[[], object]]:
    """The milestones of a part without which steps may still be done: a replacement, which ends the outage, and a step
    since. ``step``: the newest step of the run."""
    replaced = False

    def back() -> bool:
        nonlocal replaced
        if not replaced and is_back():
            outage.step, outage.ended, replaced = max(outage.step, step()), time.time(), True
        return replaced

    return {_BACK: back, STEP: lambda: back() and is_done()}


def _driver(context: FaultContext) -> int:
    """Pid of the driver that runs; 0 while there is none."""
    return next((member.pid for member in context.members("driver") if alive(member.pid)), 0)


def _engines_serve(context: FaultContext) -> bool:
    serving = [engine for engine in context.engines() if engine.state is EngineState.READY and alive(engine.pid)]
    return len(serving) >= context.cfg.rollout.engines


def _ranks_are_there(context: FaultContext) -> bool:
    return sum(alive(rank.pid) for rank in context.trainer_ranks()) >= context.cfg.trainer.ranks


def _is_answered(testbed: Testbed) -> bool:
    """Whether a request of one token gets its answer through the router."""
    pool = testbed.context.pool()
    if pool is None or not pool.router_url:
        return False
    try:
        return http_client.request("POST", f"{pool.router_url}/generate", timeout=_REQUEST_S, json=_REQUEST,
                                   **engine_access(testbed.cfg).options).is_success
    except httpx.HTTPError:
        return False
