"""Logical faults: somebody who has been replaced goes on as if nothing had happened, or two do the same at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.coordinator.client.admin_client import RequestRefused
from elastic_rl.coordinator.election.protocol import ElectionProtocol
from elastic_rl.errors import ElasticRLError, EtcdUnavailable, Fenced
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import Leader
from elastic_rl.etcd.transaction import KeyValue, Op
from elastic_rl.faults.context import INJECT_TIMEOUT_S, FaultContext, RuleBroken, stopped
from elastic_rl.faults.kinds import RecoversWithSteps
from elastic_rl.runtime.process import runs
from elastic_rl.runtime.waiting import wait_until


class FencingBroken(RuleBroken):
    """A write was accepted of somebody who has been replaced."""

    breaks = "I1"


class StaleLeader(RecoversWithSteps):
    """The leading coordinator is stopped until another one leads, and goes on then, with its term in mind. Its late
    writes are refused: one under its fencing token is tried, and refused too."""

    name = "stale_leader"

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context)
        self._stale = self._pid = 0

    def inject(self) -> tuple[str, str]:
        etcd, keys, answered = self.context.etcd, self.context.keys, self.context.answered
        leader, candidate = wait_until(self._leader, timeout_s=INJECT_TIMEOUT_S, what="a leading coordinator")
        self.at, self._pid = time.time(), leader.pid
        with stopped(self.context, psutil.Process(leader.pid)):
            wait_until(lambda: (now := answered(self.context.leader)) is not None and now.pid != leader.pid,
                       timeout_s=INJECT_TIMEOUT_S, what="another leader", poll_s=0.05)
        protocol = ElectionProtocol(candidate.key, 1.0, lambda: True)  # as the one that is stopped has it
        protocol.revision = candidate.create_revision
        writer = FencedWriter(etcd, keys, lambda: [protocol.guard], f"term {protocol.revision} of {leader.replica}")
        try:
            answered(lambda: writer.write(Op.put(f"{keys.root}chaos/stale", b"{}")))
        except Fenced as e:
            refused = f"a write under its token was refused: {e.message}"
        else:
            raise FencingBroken(f"a write of the term {candidate.create_revision}, which is over, was accepted")
        return f"coordinator {leader.replica}", (
            f"pid {leader.pid} was stopped until another led, for {time.time() - self.at:.1f} s; {refused}")

    def _leader(self) -> tuple[Leader, KeyValue] | None:
        """The coordinator that leads, and the candidacy under which it writes."""
        leader = self.context.leader()
        if leader is None:
            return None
        candidate = self.context.etcd.get(ClusterKeys(self.context.cfg.cluster_name).leader(leader.replica))
        return (leader, candidate) if candidate is not None else None

    def detected(self) -> bool:
        return self.context.has_event(event_kinds.LEADER_ELECTED, self.at)

    def is_back(self) -> bool:
        leader = self.context.leader()
        return leader is not None and leader.pid != self._pid


class ZombieDriver(RecoversWithSteps):
    """The driver is stopped, the next generation of drivers begins meanwhile, as on another host, and it goes on then:
    it is fenced off and ends, and a write under its generation is refused. It is stopped for a moment only, since its
    run kills one that stays stopped."""

    name, may_go_unnoticed = "zombie_driver", True

    def inject(self) -> tuple[str, str]:
        etcd, keys, answered = self.context.etcd, self.context.keys, self.context.answered
        driver = wait_until(lambda: next(iter(self.context.members("driver")), None), timeout_s=INJECT_TIMEOUT_S,
                            what="the driver")
        generation, epoch = fencing.current_driver(etcd, keys), fencing.current_epoch(etcd, keys)
        self._victim, self.at = psutil.Process(driver.pid), time.time()
        with stopped(self.context, self._victim):
            begun = answered(lambda: fencing.begin_driver(etcd, keys, epoch, "chaos"))
            stopped_s, lives = time.time() - self.at, runs(self._victim)
        if not lives:  # its run has ended it, which may not wait for one that is stopped for long
            return f"driver (generation {generation})", ""
        try:
            answered(FencedWriter.of_driver(etcd, keys, epoch, generation).require)
        except Fenced as e:
            refused = f"a write under its generation was refused: {e.message}"
        else:
            raise FencingBroken(f"a write of the driver's generation {generation}, which is over, was accepted")
        wait_until(self._has_ended, timeout_s=INJECT_TIMEOUT_S, what="the end of the fenced driver")
        return f"driver (generation {generation})", (
            f"pid {driver.pid} was stopped for {stopped_s:.1f} s, and generation {begun} began; it went on and ended; "
            f"{refused}")

    def _has_ended(self) -> bool:
        self.context.require_going_on()
        return not runs(self._victim)

    def detected(self) -> bool:
        return self.context.has_event(event_kinds.DRIVER_RESTARTED, self.at)

    def is_back(self) -> bool:
        """Another driver works, and the zombie has ended."""
        pids = [m.pid for m in self.context.members("driver")]
        return len(pids) == 1 and self._victim.pid not in pids and not runs(self._victim)


class RacingRequests(RecoversWithSteps):
    """Several clients of the admin API change the size of one pool at the same time, again and again. Each request is
    carried out as a whole, or refused; the pool gets the size of the last one. It has happened where both sizes were
    accepted."""

    name, may_go_unnoticed = "racing_requests", True

    def __init__(self, context: FaultContext, clients: int = 4, rounds: int = 5) -> None:
        super().__init__(context)
        self.clients, self.rounds, self.desired = clients, rounds, 0

    def inject(self) -> tuple[str, str]:
        self.desired, path = self.context.desired(), f"pools/{ROLLOUT_POOL}"
        self.at = time.time()

        def change(number: int) -> str:
            try:
                self.context.require_going_on()
                self.context.api.patch(path, {"desired": self.desired + number % 2})
            except RequestRefused as e:
                return f"refused ({e.status})"
            except ElasticRLError as e:
                return type(e).__name__
            return "accepted"

        with self.context.resized(self.desired, self.desired + 1):
            with self.context.striking("a client has changed the size of the pool"):
                answers = [change(0)]
            with ThreadPoolExecutor(self.clients) as threads:
                answers += threads.map(change, range(1, self.clients * self.rounds))
            last = wait_until(self._last_size, timeout_s=INJECT_TIMEOUT_S, what="the last change to be accepted")
        if not all("accepted" in answers[parity::2] for parity in (0, 1)):
            return f"pool {ROLLOUT_POOL}", ""
        counts = ", ".join(f"{answers.count(answer)} {answer}" for answer in sorted({*answers}))
        return f"pool {ROLLOUT_POOL}", f"{len(answers)} requests of {self.clients} clients: {counts}; then {last}"

    def _last_size(self) -> str:
        self.context.require_going_on()
        try:
            self.context.api.patch(f"pools/{ROLLOUT_POOL}", {"desired": self.desired})
        except (RequestRefused, EtcdUnavailable):
            return ""
        return f"desired={self.desired} was accepted"

    def detected(self) -> bool:
        return False  # it is no fault

    def is_back(self) -> bool:
        pool = self.context.pool()
        return pool is not None and (pool.ready, pool.starting, pool.draining) == (self.desired, 0, 0)
