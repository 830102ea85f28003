"""States in which a part can be struck, as its own records show them.

Each reading is made twice: before the processes are stopped on which the state depends, and after that. What is seen
then is true, and stays so until somebody lets them go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from elastic_rl.coordinator.client.admin_client import RequestRefused
from elastic_rl.coordinator.election.protocol import leading
from elastic_rl.coordinator.records import Leadership
from elastic_rl.dcs.catalog import reads
from elastic_rl.engine.server.probe import parse_load
from elastic_rl.errors import DeadlineExceeded
from elastic_rl.etcd import fencing
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import Engine, EngineState, Leader, VersionState
from elastic_rl.faults.context import INJECT_TIMEOUT_S, FaultContext
from elastic_rl.faults.finding import engines_of_pool, schedulers_of
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.job_secrets import dcs_security, engine_access
from elastic_rl.net import http_client
from elastic_rl.runtime.waiting import wait_until

if TYPE_CHECKING:
    from elastic_rl.trainer.service.client import TrainerClient

_LOADS_S = 2.0
_STREAM = "policy"


@dataclass(frozen=True)
class VictimState:
    """A state of a part."""

    name: str
    """The word for it in the name of a fault, such as engine_killed_generating."""
    seen: Callable[[FaultContext, int], str]
    """What is seen of a process that is in the state, for people; "" for one that is not."""
    holds: Callable[[int], Sequence[int]] = lambda pid: [pid]
    """The processes that are stopped, without which it stays in the state."""
    pids: Callable[[FaultContext], Sequence[int]] | None = None
    """The processes that may be in the state; None: those of the part."""
    provoke: Callable[[FaultContext], str] | None = None
    """Makes a process of the part go into the state; returns what was done. None: the work does."""


# -- engines -----------------------------------------------------------------------------------------------------------
def _engine(context: FaultContext, pid: int) -> Engine | None:
    return next((e for e in context.engines() if e.pid == pid), None)


def _family(pid: int) -> list[int]:
    """The schedulers of an engine's server, then the server."""
    return [*schedulers_of(pid), pid]


def _generating(context: FaultContext, pid: int) -> str:
    """The HTTP process answers, from shared memory that the scheduler writes, also while that is stopped."""
    engine = _engine(context, pid)
    if engine is None or engine.state is not EngineState.READY:
        return ""
    try:
        with http_client.client(timeout=_LOADS_S, users=None, **engine_access(context.cfg).options) as http:
            load = parse_load(http.get(f"{engine.url}/v1/loads").json())
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ""
    return f"generating for {load.running} requests" if load.running else ""


def _applying(context: FaultContext, pid: int) -> str:
    engine = _engine(context, pid)
    return f"applying version {engine.applying} over {engine.version}" if engine is not None and engine.applying else ""


def _draining(context: FaultContext, pid: int) -> str:
    engine = _engine(context, pid)
    return "draining" if engine is not None and engine.state is EngineState.DRAINING else ""


def _drain(context: FaultContext) -> str:
    """Asks for the drain of the oldest engine that is ready."""
    def asked() -> str:
        ready = engines_of_pool(context)
        if len(ready) < context.desired():
            return ""
        context.require_going_on()
        try:
            context.api.drain_engine(ready[0].id)
        except RequestRefused:  # such as an earlier drain that is not over
            return ""
        return f"a drain of {ready[0].id} was accepted"

    return wait_until(asked, timeout_s=INJECT_TIMEOUT_S, what="an engine that can be drained")


def _draining_engines(context: FaultContext) -> list[int]:
    return [e.pid for e in context.engines() if e.state is EngineState.DRAINING and e.pid]


GENERATING = VictimState("generating", _generating, holds=lambda pid: _family(pid)[:-1])
APPLYING = VictimState("applying", _applying, holds=_family)
DRAINING = VictimState("draining", _draining, holds=_family, pids=_draining_engines, provoke=_drain)


# -- the trainer -------------------------------------------------------------------------------------------------------
def _publishing(context: FaultContext, _pid: int) -> str:
    staging = [v.number for v in reads.list_versions(context.etcd, context.keys, _STREAM)
               if v.state is VersionState.STAGING]
    return f"publishing version {staging[-1]}, which is not committed" if staging else ""


def trainer_client(context: FaultContext, *, epoch: int, term: int) -> TrainerClient:
    """A client of the trainer of the job, as an actor with that term has it."""
    from elastic_rl.trainer.service.client import TrainerClient

    return TrainerClient(context.etcd, context.keys, dcs_security(context.cfg), epoch=epoch, term=term)


def training(context: FaultContext) -> str:
    """What the trainer executes for the actor now, as it says itself: heartbeats are too seldom for a step of a moment.
    "" for nothing."""
    epoch = fencing.current_epoch(context.etcd, context.keys)
    with contextlib.closing(trainer_client(context, epoch=epoch, term=0)) as trainer:
        status = trainer.status()
    return f"executing {status.executing}" if status is not None and status.executing else ""


PUBLISHING = VictimState("publishing", _publishing)


# -- who takes over ----------------------------------------------------------------------------------------------------
_TAKES_OVER = ("adopting", "starting", "connecting to Ray")


def _driver_takes_over(context: FaultContext, pid: int) -> str:
    beats = (f.beat for f in heartbeats_here(context.cfg).contents().files if f.pid == pid)
    phase = next((beat.phase for beat in beats if beat.role == "driver"), "")
    return f"taking over ({phase})" if phase in _TAKES_OVER else ""


def _driver_killed(context: FaultContext) -> str:
    driver = wait_until(lambda: context.answered(lambda: next(iter(context.members("driver")), None)),
                        timeout_s=INJECT_TIMEOUT_S, what="the driver")
    return f"the driver before it: {context.kill(driver.pid)}"


def _new_drivers(context: FaultContext) -> list[int]:
    return [f.pid for f in heartbeats_here(context.cfg).contents().files
            if f.beat.role == "driver" and f.beat.phase in _TAKES_OVER]


def _candidate(context: FaultContext) -> tuple[int, int]:
    """Pid and term of the coordinator that etcd has as the leader; (0, 0) for none."""
    found, _ = context.etcd.range(ClusterKeys(context.cfg.cluster_name).leader_prefix())
    first = leading(found)
    leader = readable_one(first, Leader)
    return (leader.pid, first.create_revision) if first is not None and leader is not None else (0, 0)


def _leader_takes_over(context: FaultContext, pid: int) -> str:
    announced = readable_one(context.etcd.get(context.keys.leadership()), Leadership)
    found, term = _candidate(context)
    if found != pid or (announced is not None and announced.term == term):
        return ""
    return f"elected with term {term}, which it had not announced"


def _leader_killed(context: FaultContext) -> str:
    leader = wait_until(lambda: context.answered(context.leader), timeout_s=INJECT_TIMEOUT_S,
                        what="a leading coordinator")
    return f"the leader before it: {context.kill(leader.pid)}"


DRIVER_TAKING_OVER = VictimState("taking_over", _driver_takes_over, pids=_new_drivers, provoke=_driver_killed)
LEADER_TAKING_OVER = VictimState("taking_over", _leader_takes_over, pids=lambda context: [_candidate(context)[0]],
                                 provoke=_leader_killed)


def provoked(state: VictimState, context: FaultContext, attempt: Callable[[], int], *, tries: int = 8,
             each_s: float = 60.0) -> tuple[int, str]:
    """Has a process go into the state, until ``attempt`` has caught one in it; returns its result, and what was done
    for it. Raises DeadlineExceeded after ``tries`` of them that passed."""
    if state.provoke is None:
        return wait_until(attempt, timeout_s=INJECT_TIMEOUT_S, what=f"a process {state.name}", poll_s=0.002), ""
    done = list[str]()
    for _ in range(tries):
        done.append(state.provoke(context))  # each of them has happened to the run
        with contextlib.suppress(DeadlineExceeded):
            return (wait_until(attempt, timeout_s=each_s, what=f"a process {state.name}", poll_s=0.002),
                    "; ".join(done))
    raise DeadlineExceeded(f"no process was caught {state.name} in {tries} tries")
