"""Keeps the ranks of a trainer group running: on each of its hosts a Ray actor in a placement group owns the process of
a torch-elastic agent, and outlives the driver that has started it.

The driver decides on which hosts the group is and how large it is (``formation``), and writes that before it starts the
agents; the number of that record fences off the ranks of earlier ones. A formation ends as a whole: when an agent ends
or a host is lost, at once; when it is to grow, or a host is drained, once the trainer has saved its state, so that
nothing is computed again that was done before.
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Collection
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from elastic_rl.dcs.catalog import reads
from elastic_rl.driver import formation
from elastic_rl.driver.host_selection import beyond_every_host
from elastic_rl.driver.hosts_of_ray import RayHosts
from elastic_rl.driver.left_files import LeftFiles
from elastic_rl.driver.placement import (
    PlacedActor,
    Placer,
    driver_writer,
    ended,
    room_needed,
    stop_all,
    told_to_stop,
    uses_cuda,
)
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.restart_requests import acknowledge
from elastic_rl.driver.shared_gpus import SharedGpus
from elastic_rl.driver.trainer_host import TrainerHost
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.decoding import decode
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Formation, FormationHost, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.etcd.transaction import Compare, Op
from elastic_rl.host.address import host_name
from elastic_rl.host.model_folder import fingerprint
from elastic_rl.host.stacks import HANG_S
from elastic_rl.runtime.backoff import doubled_s
from elastic_rl.runtime.words import counted

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_UNFIT_S = 600.0
"""A host that lacks what the ranks need, or on which they end again and again, is left out for so long."""
_LONGEST_UNFIT_S = 3600.0
_BAD_CONTEXT = 2
"""Exit code of an agent that cannot work with what it finds on its host."""
_ENDS = 3
"""Ends in a row that began on one host, after which it is left out."""
_SHOWN = 8
"""Hosts that a text names."""
_UNBOUNDED = 1_000_000
"""Room of a host for ranks on its CPU, which share it."""


class GroupState(StrEnum):
    """Where the group is. A group that has ended waits for its next start; nothing else follows the end."""

    ENDED = "ended"
    PLACING = "placing"
    """Ray looks for room for it."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was told to end, for a request or for another formation."""


class TrainerGroup:
    """Starts the agents, and restarts them with backoff, without end, when one ends or when that is requested."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, body: type = TrainerHost, shared: SharedGpus | None = None
                 ) -> None:
        """``ctx``: the context of the group's processes. ``body``: class of the Ray actors. ``shared``: the GPUs that
        it shares with engines."""
        self._shared = shared
        self.ctx, self.etcd, self._body = ctx, etcd, body
        self.name, self._kind = ctx.group.name, f"trainer-hosts/{ctx.group.name}"
        self._placer, self._writer = Placer.of(ctx, etcd), driver_writer(ctx, etcd)
        self.may_spread = ctx.config.ranks_may_spread and shared is None
        """Whether its ranks may be on any host of the cluster."""
        self._own_host = host_name(ctx.config)
        self._placed: dict[str, PlacedActor] = {}
        """The actor of each host of the formation, by the host's name."""
        self._formation: Formation | None = None
        """The newest one, of this epoch."""
        self._number = 0
        self._ended = -1
        """The formation whose end was noted last."""
        self._unreadable = ""
        """Why the newest formation cannot be read; empty while it can."""
        self._change = ""
        """Why the formation ends, where that is no failure of its ranks."""
        self._unsaved_since: int | None = None
        """Newest version of the state when another formation was first better; None: none is."""
        self._unfit: dict[str, tuple[float, str]] = {}
        """Hosts that are left out: until when, in monotonic seconds, and why."""
        self.changed_at = float("-inf")
        """When something was placed or removed last, in monotonic seconds."""
        self._others_changed_at = float("-inf")
        self._hosts = RayHosts()
        """The hosts as the last pass had them."""
        self._times_unfit: Counter[str] = Counter()
        self._blamed: tuple[str, int] = ("", 0)
        """The host on which the last failures began, and how many there were in a row."""
        self._no_room = ""
        self._request: RestartRequest | None = None
        """The request that is being carried out."""
        self._budget = StartBudget()
        self._left_files = LeftFiles(ctx)
        self._unreported = ""
        """How an agent ended, until the event about it is written."""

    @cached_property
    def _model(self) -> str:
        return fingerprint(Path(self.ctx.model_dir))

    @cached_property
    def _on_gpus(self) -> bool:
        return uses_cuda(self.ctx.config.device)

    @property
    def state(self) -> GroupState:
        placed = self._placed.values()
        if not placed:
            return GroupState.ENDED
        if any(actor.stopping for actor in placed):
            return GroupState.STOPPING
        return GroupState.RUNNING if all(actor.is_placed() for actor in placed) else GroupState.PLACING

    @property
    def nodes(self) -> set[str]:
        """Ray's ids of the nodes on which the group has something."""
        return {actor.node for actor in self._placed.values()}

    @property
    def waiting(self) -> str:
        """What the group waits for; empty when it runs, with all its replicas."""
        if self._unreadable:
            return self._unreadable
        match self.state:
            case GroupState.PLACING if without := [a for a in self._placed.values() if a.lacks_room()]:
                return beyond_every_host(without[0].bundle, self._hosts, {host for host, a in self._placed.items()
                                                                          if a is without[0]}) or (
                    f"no room in the cluster: {room_needed(without)}; add a machine or scale in")
            case GroupState.STOPPING:
                return f"its agent is being stopped{f': {self._change}' if self._change else ''}"
            case GroupState.ENDED if self._shared is not None and self._shared.waiting:
                return self._shared.waiting
            case GroupState.ENDED if self._no_room or not self._budget.count:
                return self._no_room
            case GroupState.ENDED:
                return f"the next start, after {self._budget.count} that failed"
            case _ if self._formation and self._formation.data_parallel < self.ctx.config.trainer.data_parallel:
                return (f"room for {counted(self.ctx.config.trainer.data_parallel, 'replica')} of the model; it trains "
                        f"with {self._formation.data_parallel} meanwhile{self._why_unfit()}")
            case _:
                return ""

    def take_over(self) -> None:
        """Adopts the agents of this epoch's formation, if all of them run, and removes all others; one that the driver
        before was ending is ended. Does nothing where the formation cannot be read. Raises RayError and
        EtcdUnavailable."""
        found, record = self._read_formation()
        if self._unreadable:
            return
        adopted = {placed.name: placed for placed in self._placer.adopt(self._kind)}
        if found is not None and record is not None and record.epoch == self.ctx.epoch:
            self._formation, self._number = record, found.version
            names = {host.name: f"{self._number}/{host.name}" for host in record.hosts}
            if set(names.values()) <= adopted.keys():
                self._placed = {host: adopted.pop(name) for host, name in names.items()}
                if told_to_stop(self._placed.values()):
                    self._change = "the driver before was ending it"
        for placed in adopted.values():
            placed.remove()
        self.changed_at = time.monotonic() if adopted else self.changed_at
        if not self._placed:  # they may have been killed while no driver ran
            self._note_files()

    def _read_formation(self) -> tuple[KeyValue | None, Formation | None]:
        """The newest formation. One of this epoch that cannot be read is left alone (``_unreadable``): another release
        has its ranks running. Raises EtcdUnavailable."""
        unreadable: dict[str, str] = {}
        found = self.etcd.get(self.ctx.keys.formation(self.name))
        record = decode(found, Formation, unreadable) if found is not None else None
        self._unreadable = ""
        if found is not None and record is None:
            epoch = self.etcd.get(self.ctx.keys.epoch())
            if epoch is None or found.mod_revision > epoch.mod_revision:
                self._unreadable = (f"{found.key} cannot be read ({unreadable[found.key]}): complete the upgrade, or "
                                    "restart the job, which makes another formation")
        return found, record

    def reconcile(self, request: RestartRequest | None = None, hosts: RayHosts = RayHosts(), *, holds: bool = False,
                  changed_at: float = float("-inf")) -> None:
        """One pass, which does not wait for the group; ``request``: an open request to restart it. ``holds``: whether a
        group without all its replicas is formed later, since hosts are joining. ``changed_at``: newest of all groups.
        Raises Fenced when the agent has ended because the epoch is over (nothing failed then), and EtcdUnavailable."""
        self._report()
        self._others_changed_at, self._hosts = changed_at, hosts
        if self._unreadable:
            self.take_over()
            if self._unreadable:
                return
        if request is not None and self._request is None:
            self._request = request
            log.warning("restarting the group %s: %s", self.name, request.reason)
        if self._placed:
            if not self._is_over(hosts):
                return
            if self._request is None:
                self._on_end(hosts)
        if self._request is not None:
            self._carried_out(self._request)
        self._left_files.remove()
        if not self._placed and self._budget.open(time.monotonic()):
            self._start(hosts, holds)

    # -- the end of a formation -----------------------------------------------------------------------------------
    def _is_over(self, hosts: RayHosts) -> bool:
        """Whether no agent of the formation runs any more. Ends all of them when one has ended, and when the formation
        is to end."""
        over = {placed.name for placed in ended(self._placed.values())}
        gone = {host for host in self._placed if host in hosts.lost and host != self._own_host}
        if self._request is None and not self._change:
            ended_first = {host for host, placed in self._placed.items() if placed.name in over} - {self._own_host}
            if gone:
                self._change = f"{_some(gone)} is lost"
            elif ended_first and ended_first <= hosts.drains.keys():  # the time of its drain was over
                self._change = f"{_some(ended_first)} is drained"
            elif not over:
                self._change = self._without_room(hosts) or self._better(hosts)
        if self._request is None and not self._change and not over:
            return False
        left = [placed for placed in self._placed.values() if placed.name not in over]
        hangs = self._request is not None and self._request.of_failure_policy
        for placed in left:
            if hangs:
                placed.end(grace_s=_STOP_TIMEOUT_S + HANG_S, method="stop_hung")
            else:
                placed.end(grace_s=_STOP_TIMEOUT_S)
            placed.enforce()
        over |= {placed.name for placed in ended(left)}
        return all(host in gone or placed.name in over for host, placed in self._placed.items())

    def _without_room(self, hosts: RayHosts) -> str:
        """Why another formation takes the place of one that waits for room: a host has given it to others, and there is
        some elsewhere."""
        if not self.may_spread or self.state is not GroupState.PLACING:
            return ""
        now = time.monotonic()
        late = {host for host, actor in self._placed.items()
                if not actor.is_placed() and now - actor.created_at > formation.NO_ROOM_S}
        if not late or self._plan(hosts, without=late) is None:
            return ""
        for host in late:
            self._leave_out(host, formation.FULL_S, "it has no room", hosts)
        return f"{_some(late)} has no room"

    def _better(self, hosts: RayHosts) -> str:
        """Why another formation takes the place of the one that runs now; empty: none does, or not yet. Of a group
        with a state it does once the newest one was saved after it was found."""
        if self._formation is None or self.state is not GroupState.RUNNING:
            return ""
        drained = sorted(self._placed.keys() & hosts.drains.keys() - {self._own_host})  # the run leaves as a whole
        if self._shared is not None:  # the engines there leave, too, so the epoch ends
            if self._is_saved_since(bool(drained) and self._shared.can_move(hosts)):
                self._shared.leave(f"{drained[0]} is drained")
            return ""
        if not self.may_spread or not self._knows_room(hosts):
            return ""
        best = self._plan(hosts)
        larger = best is not None and best.data_parallel > self._formation.data_parallel
        if not self._is_saved_since(best is not None and bool(drained or larger)) or best is None:
            return ""
        return f"{drained[0]} is drained" if drained else f"there is room for {counted(best.data_parallel, 'replica')}"

    def _is_saved_since(self, found: bool) -> bool:
        """Whether the newest state was saved since this was called with ``found`` first, and not without it."""
        if not found:
            self._unsaved_since = None
            return False
        if not self.ctx.group.trains:
            return True
        head = reads.head(self.etcd, self.ctx.keys, self.ctx.group.state)
        saved = head.number if head else 0
        if self._unsaved_since is None:
            self._unsaved_since = saved
        return saved > self._unsaved_since

    def _on_end(self, hosts: RayHosts) -> None:
        """The agents have ended, and nobody asked for a restart."""
        self._writer.require()  # the files to be removed may be those of an agent that a newer driver has started
        if self._change:
            log.warning("the formation %d of the group %s has ended: %s", self._number, self.name, self._change)
            self._deregister()
            self._remove()
            return
        if self._ended != self._number:  # else Ray has refused the removal, and is asked again
            self._note_end(hosts)
            self._ended = self._number
        self._remove()
        self._budget = self._budget.after_failure(time.monotonic(), jitter=random.random())
        log.warning("the agent of the group %s ended: %s", self.name, self._unreported)
        self._report()

    def _note_end(self, hosts: RayHosts) -> None:
        """Notes why the agents have ended, and which hosts are to be left out: while they still have their room."""
        for host, placed in self._placed.items():
            code, crash = placed.outcome()
            why = crash or (code if isinstance(code, str) else f"exit code {code}")
            if isinstance(code, str) or code == _BAD_CONTEXT:
                self._leave_out(host, _UNFIT_S, why, hosts)
            if not placed.stopping or not self._unreported:
                self._unreported = f"{why} on {host}" if len(self._placed) > 1 else why
            if not placed.stopping:
                self._blame(host, why, hosts)

    def _blame(self, host: str, why: str, hosts: RayHosts) -> None:
        """An agent has ended by itself."""
        before, times = self._blamed
        self._blamed = host, times + 1 if host == before else 1
        if self._blamed[1] >= _ENDS:
            self._leave_out(host, _UNFIT_S, f"its agent has ended {self._blamed[1]} times: {why}", hosts)

    def _leave_out(self, host: str, seconds: float, why: str, hosts: RayHosts) -> None:
        """Leaves a host out for a while, where others are enough: else it is tried again with the next start. Another
        try costs a group that works meanwhile a new start, so each one is made after twice the time."""
        if self._plan(hosts, without={host}) is None:
            return
        self._times_unfit[host] += 1
        left_out_s = doubled_s(self._times_unfit[host], seconds, _LONGEST_UNFIT_S)
        self._unfit[host] = time.monotonic() + left_out_s, why

    def _report(self) -> None:
        if not self._unreported:
            return
        wait_s = max(0.0, self._budget.not_before - time.monotonic())
        self._writer.emit(event_kinds.TRAINER_GROUP_EVENTS[self.name].agent_ended,
                     self.name, f"the agent of the group {self.name} ended ({self._unreported}); the next one starts "
                     f"in {wait_s:.0f} s", severity=Severity.ERROR)
        self._unreported = ""

    def _carried_out(self, request: RestartRequest) -> None:
        """The agents that a request was about have ended, or there was none."""
        self._writer.require()  # ranks and files may be those of an agent that a newer driver has started
        self._deregister()
        if self._placed:  # first: the next driver would take what has ended for a fault
            self._remove()
        acknowledge(self.etcd, self.ctx.keys, request, *self._writer.guards)
        self._request, self._budget = None, StartBudget()
        self._unfit.clear()
        self._times_unfit.clear()

    def _remove(self) -> None:
        """Removes the actors, if they have not been, and the files that killed agents leave."""
        for placed in self._placed.values():
            placed.remove()
        self._placed, self._unsaved_since, self.changed_at = {}, None, time.monotonic()
        self._note_files()

    def _note_files(self) -> None:
        self._left_files.note(self.name, "")
        for host in self._formation.hosts if self._formation else ():
            if host.name != self._own_host:
                self._left_files.note(self.name, host.address, str(self._number))

    def _deregister(self) -> None:
        """Deregisters the ranks, so that their end does not count as a death. The agents have done it, unless one hung.
        """
        deregister(self.etcd, self.ctx.keys, [m for m in members(self.etcd, self.ctx.keys, self.name)
                                            if m.epoch == self.ctx.epoch])

    # -- the begin of one -----------------------------------------------------------------------------------------
    def _plan(self, hosts: RayHosts, without: Collection[str] = ()) -> formation.Plan | None:
        """The best formation that the cluster has room for now, on other hosts than those of ``without``."""
        trainer = self.ctx.config.trainer
        if self._shared is not None:
            return None if without else self._shared.plan
        if not self.may_spread:
            return None if without else formation.Plan({self._own_host: trainer.ranks}, trainer.data_parallel)
        now = time.monotonic()
        self._unfit = {host: item for host, item in self._unfit.items() if item[0] > now}
        own = self._own_host
        names = [own, *sorted(hosts.open - {own})]
        has = self._formation.ranks() if self._formation and self._placed else {}
        rooms = [formation.Room(host, has.get(host, 0) + (hosts.nodes[host].gpus if host in hosts.nodes else 0)
                                if self._on_gpus else _UNBOUNDED)
                 for host in names if host not in self._unfit and host not in without]
        return formation.plan(rooms, trainer, keeps=self._formation.ranks() if self._formation else {own})

    def _start(self, hosts: RayHosts, holds: bool) -> None:
        trainer = self.ctx.config.trainer
        if self._shared is not None and self._shared.plan is None:
            return  # a later pass starts it
        if self._shared is not None and self._awaits_shared(self._shared, hosts):
            return
        plan = self._plan(hosts) if self._knows_room(hosts) else None
        if plan is None or (plan.data_parallel < trainer.data_parallel and holds and self._shared is None):
            self._no_room = self._why_not(hosts, holds)
            return
        self._no_room = ""
        try:
            if self._form(plan, hosts):
                self.changed_at = time.monotonic()
                self._place(plan)
        except Fenced:  # what it has made is the newer driver's
            raise
        except EtcdUnavailable:
            self._remove()  # a part of a formation waits for the others
            raise
        except Exception:  # reported by the caller
            self._remove()
            self._budget = self._budget.after_failure(time.monotonic(), jitter=random.random())
            raise

    def _awaits_shared(self, shared: SharedGpus, hosts: RayHosts) -> bool:
        """Whether no ranks are started on the hosts of the epoch: one of them is to be emptied, and where nothing runs
        nothing has to be saved before, or its node of Ray is away."""
        used = shared.gpus().keys() - {self._own_host}
        if (drained := sorted(used & hosts.drains.keys())) and shared.can_move(hosts):
            shared.leave(f"{drained[0]} is drained")
            return True
        away = sorted(used - hosts.nodes.keys())
        self._no_room = f"the node of Ray on {_some(away)}" if away else ""
        return bool(away)

    def _form(self, plan: formation.Plan, hosts: RayHosts) -> bool:
        """Writes the formation; from then on what the ranks of earlier ones publish is refused, and nobody meets any
        more where the agents of those that were killed have met. Returns whether it is written."""
        key = self.ctx.keys.formation(self.name)
        alone = plan.ranks.keys() == {self._own_host}
        addresses = {host: node.address for host, node in hosts.nodes.items()}
        record = Formation(epoch=self.ctx.epoch, data_parallel=plan.data_parallel, reason=self._change, hosts=[
            FormationHost(name=host, ranks=ranks, address="" if alone else addresses.get(host, self.ctx.host))
            for host, ranks in plan.ranks.items()])
        found, _ = self._read_formation()
        if self._unreadable:
            return False
        version = found.version if found else 0
        guard, ops = Compare.version(key, "==", version), [Op.put(key, record.encode()), self._forget_rendezvous()]
        text = _some([f"{counted(ranks, 'rank')} on {host}" for host, ranks in plan.ranks.items()])
        written = self._writer([guard], ops) if not record.reason else self._writer.emit(
            event_kinds.TRAINER_GROUP_EVENTS[self.name].reformed, self.name,
            f"{record.reason}: the group {self.name} has {counted(plan.data_parallel, 'replica')} of the model now, "
            f"{text}",
            severity=Severity.WARNING, compares=[guard], ops=ops, formation=version + 1)
        if written:
            self._formation, self._number, self._change = record, version + 1, ""
        return bool(written)

    def _place(self, plan: formation.Plan) -> None:
        cfg, own = self.ctx.config, self._own_host
        trainer = cfg.trainer.model_copy(update={"data_parallel": plan.data_parallel, "min_data_parallel": None})
        ctx = self.ctx.model_copy(update={"config": cfg.model_copy(update={"trainer": trainer}),
                                          "formation": self._number})
        model = "" if plan.ranks.keys() == {own} else self._model
        for host, ranks in plan.ranks.items():
            options: dict[str, Any] = {} if host == own else {"among": (host,)}
            shared = ",".join(self._shared.gpus()[host]) if self._shared is not None else ""
            self._placed[host] = self._placer.place(
                self._kind, f"{self._number}/{host}", self._body, ctx, ranks, len(plan.ranks), model,
                *((shared,) if shared else ()), cpus=cfg.trainer.cpus_per_rank * ranks,
                gpus=ranks if self._on_gpus and not shared else 0, **options)

    def _why_not(self, hosts: RayHosts, holds: bool) -> str:
        """What a group waits for that is not formed."""
        knows_room = self._knows_room(hosts)
        found = formation.waits_for(self.ctx.config.trainer, holds=holds, knows_room=knows_room)
        return found if holds or not knows_room else f"{found}{self._why_unfit()}"

    def _knows_room(self, hosts: RayHosts) -> bool:
        """Whether the reading of the hosts says what they have room for now."""
        if not self.may_spread or not self._on_gpus:
            return True
        return hosts.says_room_after(max(self.changed_at, self._others_changed_at))

    def _why_unfit(self) -> str:
        return "".join(f"; {host}: {why}" for host, (_, why) in sorted(self._unfit.items())[:3])

    # -- the end --------------------------------------------------------------------------------------------------
    def end(self) -> None:
        """Asks the agents to end, for ``close``, which waits for them."""
        for placed in self._placed.values():
            placed.end(grace_s=_STOP_TIMEOUT_S)

    def close(self) -> None:
        """Ends the agents and their ranks, for the end of the compute plane."""
        if not self._placed:
            return
        stop_all(self._placed.values(), timeout_s=_STOP_TIMEOUT_S)
        self._remove()
        self._left_files.remove()
        with contextlib.suppress(EtcdUnavailable, Fenced):
            self._deregister()
            self._writer.write(self._forget_rendezvous())

    def _forget_rendezvous(self) -> Op:
        """The operation deletes where agents have met that were killed: one that ended cleanly has left nothing."""
        return Op.delete_prefix(self.ctx.keys.rendezvous_of_group(self.name))


def _some(texts: Collection[str]) -> str:
    """A few of many texts, for a person."""
    first = sorted(texts)[:_SHOWN]
    return ", ".join(first) + (f" and {len(texts) - len(first)} others" if len(texts) > len(first) else "")
