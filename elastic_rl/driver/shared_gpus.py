"""GPUs that the trainer group and the engines of the policy share (``placement: colocated``), on one host or several.

Ray counts GPUs and gives each to one actor, so that it cannot place two sides on the same ones: its fractions are of
one GPU, and the ranks of a host are one actor here. So on each host one actor that does nothing holds the GPUs, for the
whole epoch; trainer and engines ask Ray for none, and are told which ones they use by ``CUDA_VISIBLE_DEVICES``. A host
has as many ranks as GPUs are held there, and rank i of it has the i-th; an engine is on one of these hosts, and has as
many GPUs as its tensor-parallel ranks, one after the other, which no other engine has. That not all of them fill the
same memory follows from the phases.

Which hosts these are is decided once for an epoch, by the planner of ``formation``. A plan is dropped, and another one
made, while nothing runs on it. Once Ray has given all of its GPUs they are recorded, and from then on the loss of one
of the hosts ends the epoch: the next one plans again, on the hosts that are there then.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol, Self

import ray
from ray.exceptions import RayError

from elastic_rl.config import ROLLOUT_POOL, TrainerConfig
from elastic_rl.driver import formation
from elastic_rl.driver.formation import FULL_S, NO_ROOM_S
from elastic_rl.driver.hosts_of_ray import RayHosts
from elastic_rl.driver.placement import (
    PlacedActor,
    Placer,
    driver_writer,
    ended,
    gpus_per_engine,
    room_needed,
    stop_all,
)
from elastic_rl.driver.plan import StartBudget
from elastic_rl.errors import RecordUnreadable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.records import SharedDevices
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.etcd.transaction import Op
from elastic_rl.host.address import host_name
from elastic_rl.runtime.process import SOME_CPU

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
_KIND = "shared-gpus"


def free_gpus(gpus: Mapping[str, Sequence[str]], taken: Collection[tuple[str, str]], count: int) -> tuple[str, str]:
    """The host and the ``count`` GPUs in a row on it that an engine may have, as ``CUDA_VISIBLE_DEVICES`` has them;
    two empty texts where there are none. ``gpus``: those of each host; ``taken``: what each engine has, in the form of
    the result. The host is the one with the most rows left. Rows begin at multiples of ``count``, so that none is
    cut."""
    rows = dict[str, list[str]]()
    for host, ids in gpus.items():
        used = {gpu for name, row in taken if name == host for gpu in row.split(",")}
        cut = (ids[i:i + count] for i in range(0, len(ids) - count + 1, count))
        rows[host] = [",".join(row) for row in cut if not used & set(row)]
    host = max(rows, key=lambda name: len(rows[name]), default="")
    return (host, rows[host][0]) if host and rows[host] else ("", "")


class GpuHolder:
    """Body of the Ray actor."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def gpus(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def run(self) -> None:
        self._stop.wait()

    def stop(self) -> None:
        self._stop.set()


class Holder:
    """One actor that holds GPUs of a host."""

    def __init__(self, placed: PlacedActor) -> None:
        self.placed = placed
        self._answer: ray.ObjectRef | None = None

    @property
    def count(self) -> int:
        """Number of its GPUs."""
        return int(self.placed.bundle.get("GPU", 0))

    @property
    def node(self) -> str:
        """Ray's id of its node; empty before it has one."""
        return self.placed.node

    def is_placed(self) -> bool:
        """Whether Ray has given it the GPUs. Raises RayError."""
        return self.placed.is_placed()

    def ended(self) -> str:
        """Why its process has ended; empty while it has not."""
        return (self.placed.outcome()[1] or "it returned") if ended([self.placed]) else ""

    def gpus(self) -> tuple[str, ...]:
        """Ids of its GPUs; empty until Ray has given them, and it has answered. Raises RayError."""
        if not self.placed.is_placed():
            return ()
        asked = self._answer = self._answer or self.placed.call("gpus")
        if not ray.wait([asked], timeout=0)[0]:
            return ()
        self._answer = None  # one that failed is asked for again
        return tuple(ray.get(asked))

    @property
    def room(self) -> str:
        """What Ray must have free for it."""
        return room_needed([self.placed])

    def remove(self) -> None:
        self.placed.remove()


class Holding(Protocol):
    """Ray's and etcd's part of ``SharedGpus``. What it does may raise RayError, Fenced and EtcdUnavailable."""

    def adopt(self) -> Sequence[tuple[str, Holder]]:
        """The holders that run, each with its host: of one host there may be two, where a driver ended in between."""

    def require(self) -> None:
        """Raises Fenced once a newer driver has begun, whose holders these are."""

    def hold(self, host: str, count: int) -> Holder:
        """A new holder of so many GPUs of a host."""

    def recorded(self) -> SharedDevices | None:
        """The GPUs that are in use in this epoch; None for none."""

    def record(self, gpus: Mapping[str, Sequence[str]], data_parallel: int) -> None:
        """Writes them, before anything uses them."""

    def close(self, holders: Collection[Holder]) -> None:
        """Ends the holders, for the end of the compute plane."""


class RayHolding:
    """``Holding`` of a run. The actors are named ``ID/HOST``."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient) -> None:
        self._ctx, self._etcd, self._own_host = ctx, etcd, host_name(ctx.config)
        self._placer, self._writer = Placer.of(ctx, etcd), driver_writer(ctx, etcd)

    def adopt(self) -> list[tuple[str, Holder]]:
        return [(placed.name.partition("/")[2] or self._own_host, Holder(placed))
                for placed in self._placer.adopt(_KIND)]

    def require(self) -> None:
        self._writer.require()

    def hold(self, host: str, count: int) -> Holder:
        return Holder(self._placer.place(_KIND, f"{secrets.token_hex(3)}/{host}", GpuHolder, cpus=SOME_CPU, gpus=count,
                                         among=() if host == self._own_host else (host,)))

    def recorded(self) -> SharedDevices | None:
        found = self._etcd.get(self._ctx.keys.shared_devices())
        record = readable_one(found, SharedDevices)
        if found is not None and record is None:
            epoch = self._etcd.get(self._ctx.keys.epoch())
            if epoch is None or found.mod_revision > epoch.mod_revision:
                raise RecordUnreadable("the record of the GPUs that trainer and engines share cannot be read, which a "
                                       "later release may have written: have the run on that release, or restart the "
                                       "job")
        return record if record is not None and record.epoch == self._ctx.epoch else None

    def record(self, gpus: Mapping[str, Sequence[str]], data_parallel: int) -> None:
        record = SharedDevices(epoch=self._ctx.epoch, data_parallel=data_parallel,
                               gpus={host: list(ids) for host, ids in gpus.items()})
        self._writer.write(Op.put(self._ctx.keys.shared_devices(), record.encode()))

    def close(self, holders: Collection[Holder]) -> None:
        stop_all([holder.placed for holder in holders], timeout_s=_STOP_TIMEOUT_S)


class HostGpus:
    """The GPUs of one host. A holder whose process ends is replaced, with backoff and without end; trainer and engines
    go on meanwhile. Should Ray give the next one other GPUs, ``moved`` says so: those in use may be anyone's from then
    on."""

    def __init__(self, host: str, count: int, hold: Callable[[], Holder], holder: Holder | None = None,
                 gpus: Sequence[str] = ()) -> None:
        """``holder``: the one that runs; None: one is made. ``gpus``: those that are in use."""
        self.host, self.count, self.gpus = host, count, tuple(gpus)
        self.holder = holder
        self.moved = ""
        """How the GPUs are others than before; empty while they are not."""
        self.held_since = float("inf")
        """When the present holder was made, or adopted; infinite before the first pass."""
        self._hold, self._budget = hold, StartBudget()
        self._is_known = False
        """Whether the present holder has answered."""

    def reconcile(self, now: float, *, in_use: bool) -> bool:
        """Makes one pass; returns whether a holder was made or removed. ``in_use``: whether trainer and engines may use
        the GPUs. Raises as ``Holding``."""
        before = self.holder
        self.held_since = min(self.held_since, now)
        if self.holder is not None and (reason := self.holder.ended()):
            log.warning("the holder of the shared GPUs of %s ended (%s); replacing it", self.host, reason)
            holder, self.holder, self._is_known = self.holder, None, False
            self.gpus = self.gpus if in_use else ()
            self._failed(now)
            holder.remove()
        if self.holder is None and self._budget.open(now):
            try:
                self.holder, self.held_since = self._hold(), now
            except Exception:  # reported by the caller
                self._failed(now)
                raise
        if self.holder is not None and not self._is_known and (found := self.holder.gpus()):
            self._is_known = True
            if self.gpus and set(found) != set(self.gpus):
                self.moved = f"Ray gave the GPUs {','.join(found)} of {self.host} in place of {','.join(self.gpus)}"
            self.gpus = self.gpus or found
        return self.holder is not before

    def is_placed(self) -> bool:
        """Whether Ray has given a holder the GPUs, which may not have answered yet. Raises RayError."""
        return self.holder is not None and self.holder.is_placed()

    def _failed(self, now: float) -> None:
        self._budget = self._budget.after_failure(now, jitter=random.random())


class SharedGpus:
    """The GPUs of one epoch. Nothing here waits: they are there in a later pass."""

    def __init__(self, trainer: TrainerConfig, own_host: str, holding: Holding, *, may_spread: bool = False,
                 per_engine: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """``own_host``: name of the driver's host, on which all GPUs are unless they ``may_spread`` over the hosts of
        the cluster. ``per_engine``: GPUs of an engine."""
        self._trainer, self._own_host, self._holding, self._clock = trainer, own_host, holding, clock
        self.may_spread = may_spread
        self._per_engine = max(1, per_engine)
        self._on: dict[str, HostGpus] = {}
        """The hosts of the plan, and before there is one those with a holder that is left of an earlier driver."""
        self._plan: formation.Plan | None = None
        self._planned_at = float("-inf")
        self._is_recorded = self._has_adopted = False
        self._unplaced: list[str] = []
        """Hosts whose GPUs are recorded, and of which none holds them now."""
        self._budget = StartBudget()
        """Bounds how often plans are made that are dropped."""
        self._full: dict[str, float] = {}
        """Hosts that are left out: until when."""
        self._changed_at = float("-inf")
        self._waiting = "the first look at the hosts"
        self.lost = ""
        """Why the epoch cannot go on with these GPUs; empty while it can."""

    @classmethod
    def of(cls, ctx: RunContext, etcd: EtcdClient) -> Self:
        """The shared GPUs of a run."""
        return cls(ctx.config.trainer, host_name(ctx.config), RayHolding(ctx, etcd),
                   may_spread=ctx.config.ranks_may_spread,
                   per_engine=gpus_per_engine(ctx.config.device, ctx.pool(ROLLOUT_POOL).engine))

    @property
    def plan(self) -> formation.Plan | None:
        """The hosts of the epoch; None until Ray has given all of their GPUs, and they are recorded, and while a holder
        waits for those that the one before it had: they may be anyone's."""
        return self._plan if self._is_recorded and not self._unplaced else None

    def gpus(self) -> Mapping[str, Sequence[str]]:
        """Ids of the GPUs of each host of ``plan``; empty before there is one."""
        return {host: held.gpus for host, held in self._on.items()} if self.plan is not None else {}

    @property
    def nodes(self) -> set[str]:
        """Ray's ids of the nodes whose GPUs are held."""
        return {held.holder.node for held in self._on.values() if held.holder is not None} - {""}

    @property
    def waiting(self) -> str:
        """What is waited for; empty once the GPUs are there."""
        if self._is_recorded:
            return "" if not self._unplaced else f"the shared GPUs of {', '.join(self._unplaced)}, to be held again"
        if self._plan is None:
            return self._waiting
        without = [held for held in self._on.values() if not held.gpus]
        if not without:
            return "etcd to take the record of the shared GPUs"
        if any(held.holder is None for held in without):
            return "the next try to hold the shared GPUs"
        if not self.may_spread:
            return (f"no room on the host of the run for {self._rooms(without)}, which trainer and engines share: "
                    "submit it on a host with as many, set fewer ranks, or placement=disaggregated")
        return f"no room for {self._rooms(without)}, which trainer and engines share: add a machine or scale in"

    def _rooms(self, without: Sequence[HostGpus]) -> str:
        return ", ".join(f"{held.holder.room}{f' on {held.host}' if self.may_spread else ''}"
                         for held in without if held.holder is not None)

    def can_move(self, hosts: RayHosts) -> bool:
        """Whether the next epoch has room on hosts that are not to be emptied."""
        return self.may_spread and self._knows_room(hosts) and self._find_plan(hosts, self._clock()) is not None

    def leave(self, reason: str) -> None:
        """Ends the epoch, for a host that is to be emptied."""
        self.lost = self.lost or reason

    def reconcile(self, hosts: RayHosts = RayHosts(), *, holds: bool = False) -> None:
        """Makes one pass. ``holds``: whether a plan without all replicas is made later, since hosts are joining.
        Raises as ``Holding``; then it is called again."""
        now = self._clock()
        if not self._has_adopted:
            self._adopt()
        if self._is_recorded:
            gone = sorted(self._on.keys() & hosts.lost - {self._own_host})  # the run leaves its own as a whole
            self.lost = self.lost or (f"{gone[0]} is lost, or has left the cluster" if gone else "")
        else:
            self._choose(hosts, now, holds)
        if self._plan is None:
            return
        for held in self._on.values():
            if held.reconcile(now, in_use=self._is_recorded):
                self._changed_at = now
            self.lost = self.lost or held.moved
        if not self._is_recorded and all(held.gpus for held in self._on.values()):
            self._holding.record({host: held.gpus for host, held in self._on.items()}, self._plan.data_parallel)
            self._is_recorded = True
        elif self._is_recorded:
            self._look_at_holders(hosts, now)

    def _look_at_holders(self, hosts: RayHosts, now: float) -> None:
        """Which GPUs nobody holds now, and whether they will not come back: their node of Ray is there, and has others
        on them, or fewer of them."""
        unplaced = [held for held in self._on.values() if not held.is_placed()]
        self._unplaced = sorted(held.host for held in unplaced)
        for held in unplaced:
            if held.holder is None or held.host not in hosts.nodes:
                held.held_since = now
            elif now - held.held_since >= NO_ROOM_S:
                self.lost = self.lost or f"Ray does not give the GPUs of {held.host} back"

    def close(self) -> None:
        with contextlib.suppress(RayError):  # Ray is away, and the holders with it
            self._holding.close([held.holder for held in self._on.values() if held.holder is not None])

    def _adopt(self) -> None:
        """Takes the GPUs over that are in use, and the holders that run."""
        recorded, adopted = self._holding.recorded(), dict[str, Holder]()
        for host, holder in self._holding.adopt():
            if (recorded is not None and host not in recorded.gpus) or host in adopted:  # a plan that was dropped
                self._holding.require()
                holder.remove()
            else:
                adopted[host] = holder
        if recorded is None:
            self._on = {host: self._host(host, holder.count, holder) for host, holder in adopted.items()}
        else:
            counts = {host: len(ids) for host, ids in recorded.gpus.items()}
            self._plan, self._is_recorded = formation.Plan(counts, recorded.data_parallel), True
            self._on = {host: self._host(host, count, adopted.get(host), recorded.gpus[host])
                        for host, count in counts.items()}
        self._has_adopted = True

    def _host(self, host: str, count: int, holder: Holder | None = None, gpus: Sequence[str] = ()) -> HostGpus:
        return HostGpus(host, count, partial(self._holding.hold, host, count), holder, gpus)

    # -- before anything runs -------------------------------------------------------------------------------------
    def _choose(self, hosts: RayHosts, now: float, holds: bool) -> None:
        """Makes a plan where there is none, and drops one that cannot be carried out."""
        if self._plan is not None and self.may_spread:
            self._drop_unfit(self._plan, hosts, now)
        if self._plan is not None or not self._budget.open(now):
            return
        found = self._find_plan(hosts, now) if self._knows_room(hosts) else None
        if found is None or (found.data_parallel < self._trainer.data_parallel and holds):
            self._waiting = formation.waits_for(self._trainer, holds=holds, knows_room=self._knows_room(hosts),
                                                on_one=self._per_engine)
            return
        self._keep({host for host, count in found.ranks.items() if host in self._on and self._on[host].count == count},
                   now)
        for host, count in found.ranks.items():
            self._on.setdefault(host, self._host(host, count))
        self._plan, self._planned_at = found, now
        log.info("trainer and engines are to share GPUs of %s", found.ranks)

    def _drop_unfit(self, plan: formation.Plan, hosts: RayHosts, now: float) -> None:
        if closed := sorted(plan.ranks.keys() & (hosts.closed | hosts.lost) - {self._own_host}):
            self._drop(f"{closed[0]} takes nothing more", now)
        elif now - self._planned_at >= NO_ROOM_S and (late := [host for host, held in self._on.items()
                                                                if not held.is_placed()]):
            if self._find_plan(hosts, now, without=late) is not None:
                self._full |= dict.fromkeys(late, now + FULL_S)
            # Others of the job that each hold what this one lacks come back at other times.
            self._budget = self._budget.after_failure(now, jitter=random.random())
            self._drop(f"there is no room on {late[0]}", now)

    def _drop(self, reason: str, now: float) -> None:
        log.warning("trainer and engines are to share other GPUs: %s", reason)
        self._waiting = f"another plan of the GPUs that trainer and engines share: {reason}"
        self._plan = None
        self._keep((), now)

    def _keep(self, kept: Collection[str], now: float) -> None:
        """Removes the holders of all hosts but these."""
        for host in self._on.keys() - kept:
            if (holder := self._on[host].holder) is not None:
                self._holding.require()
                holder.remove()
                self._changed_at = now
            del self._on[host]

    def _find_plan(self, hosts: RayHosts, now: float, *, without: Collection[str] = ()) -> formation.Plan | None:
        """The best plan that the cluster has room for, on other hosts than those of ``without``."""
        if not self.may_spread:
            return formation.Plan({self._own_host: self._trainer.ranks}, self._trainer.data_parallel)
        self._full = {host: until for host, until in self._full.items() if until > now}
        names = [self._own_host, *sorted(hosts.open - {self._own_host})]
        room = {host: self._room(host, hosts) for host in names if host not in self._full and host not in without}
        # With whole rows of an engine's GPUs on each host none is without an engine; one engine there must be, for
        # which a host with room for it may have to come first.
        here, fits = {self._own_host, *self._on}, {host for host, count in room.items() if count >= self._per_engine}
        plans = [formation.plan([formation.Room(host, count // row * row) for host, count in room.items()],
                                self._trainer, keeps=first)
                 for row, first in ((self._per_engine, here), (1, here), (1, fits))]
        fit = [plan for plan in plans if plan is not None and max(plan.ranks.values()) >= self._per_engine]
        return max(fit, key=lambda plan: plan.data_parallel, default=None)

    def _room(self, host: str, hosts: RayHosts) -> int:
        """Number of GPUs of a host that are free, or held here."""
        held = self._on.get(host)
        has = held.count if held is not None and held.holder is not None and held.holder.is_placed() else 0
        return has + (hosts.nodes[host].gpus if host in hosts.nodes else 0)

    def _knows_room(self, hosts: RayHosts) -> bool:
        return not self.may_spread or hosts.says_room_after(self._changed_at)
