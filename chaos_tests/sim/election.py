"""A simulation for the election protocol: a model of etcd, replicas with clocks of their own, and a network that loses,
delays and partitions, all under one virtual clock and one seed. The protocol itself is the product's own code. Without
the election's own writers and faults it is the world in which other simulations live (``ElectionWorld``)."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos_tests.sim.violation import RuleViolated
from elastic_rl.coordinator.election.protocol import Campaign, ElectionProtocol, ReadCandidates, Wait, leading
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.transaction import Compare, KeyValue, Op

CLUSTER, KEYS = "c", Keys("j")
TTL_S = 3.0
CALL_S = 0.5
Process = Generator[float, None, Any]
"""Yields how many seconds it sleeps."""


class SimulatedEtcd:
    """Keys under leases, as etcd keeps them; its clock is the simulation's."""

    def __init__(self) -> None:
        self.revision, self.keys = 1, dict[str, KeyValue]()
        self.leases = dict[int, float]()
        """When each lease ends."""
        self._next_lease, self._soonest = itertools.count(1), 0.0

    def expire(self, now: float) -> None:
        if now >= self._soonest:
            for lease in [n for n, end in self.leases.items() if end <= now]:
                self.revoke(lease)
            self._soonest = min(self.leases.values(), default=now + TTL_S)  # later ones end later still

    def grant(self, now: float) -> int:
        lease = next(self._next_lease)
        self.leases[lease] = now + TTL_S
        return lease

    def keep_alive(self, lease: int, now: float) -> bool:
        if lease in self.leases:
            self.leases[lease] = now + TTL_S
        return lease in self.leases

    def revoke(self, lease: int) -> None:
        """Its keys go in one revision, as with etcd."""
        if self.leases.pop(lease, None) is not None:
            keys = [k for k, kv in self.keys.items() if kv.lease == lease]
            self.revision += bool(keys)
            for key in keys:
                del self.keys[key]

    def range(self, prefix: str) -> list[KeyValue]:
        return [kv for key, kv in self.keys.items() if key.startswith(prefix)]

    def txn(self, compares: Sequence[Compare], ops: Sequence[Op]) -> int:
        """Puts and deletes if the conditions hold and the leases exist: the revision; 0 if they do not."""
        if not all(self._holds(c) for c in compares) or any(op.lease and op.lease not in self.leases for op in ops):
            return 0
        self.revision += any(op.kind == "put" or op.key in self.keys for op in ops)
        for op in ops:
            old = self.keys.pop(op.key, None)
            if op.kind == "put":
                self.keys[op.key] = KeyValue(op.key, op.data, old.create_revision if old else self.revision,
                                             self.revision, old.version + 1 if old else 1, op.lease)
        return self.revision

    def _holds(self, compare: Compare) -> bool:
        if compare.prefix:
            return all(compare.holds(kv) for kv in self.range(compare.key))
        return compare.holds(self.keys.get(compare.key))


@dataclass(eq=False)
class Node:
    """One process, with its clock and its way to etcd."""

    name: str
    rate: float
    """Seconds that its clock counts in one second of the simulation."""
    paused_until: float = 0.0
    cut_until: float = 0.0
    ended: bool = False
    """Whether it was killed: nothing of it goes on but messages on their way."""


@dataclass(eq=False)
class Replica(Node):
    """A replica of the coordinator."""

    protocol: ElectionProtocol | None = None
    alive_at: float = -1e9
    """By its own clock: when the last answered keep-alive was sent."""


@dataclass
class History:
    """What happened."""

    applied: list[tuple[float, str, int]] = field(default_factory=list)
    """(time, writer, its term) of each guarded write that etcd applied."""
    faults: list[str] = field(default_factory=list)
    refused: int = 0
    """Guarded writes that arrived too late."""
    double: int = 0
    """Samples in which two replicas believed that they led."""
    terms: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    """How often each of ``KINDS`` has happened."""


class ElectionWorld:
    """A virtual clock, a model of etcd, a network, and replicas that take part in an election. ``quiet_at``: from then
    on no message is lost or slow."""

    def __init__(self, seed: int, quiet_at: float, candidates: str = "") -> None:
        """``candidates``: prefix of the candidates' keys."""
        self.now, self.quiet_at, self.rng, self.etcd = 0.0, quiet_at, random.Random(seed), SimulatedEtcd()
        self.candidates = candidates
        self.counts: Counter[str] = Counter()
        """How often each kind of thing has happened."""
        self._queue: list[tuple[float, int, Process, Node | None]] = []
        self._order = itertools.count()

    def advance(self, until: float) -> None:
        while self._queue and self._queue[0][0] <= until:
            self.now, _, process, node = heapq.heappop(self._queue)
            if node is not None and node.ended:
                continue
            if node is not None and node.paused_until > self.now:
                self._at(node.paused_until, process, node)
                continue
            self.etcd.expire(self.now)
            self.counts["steps"] += 1
            delay = next(process, None)
            if delay is not None:
                self._at(self.now + delay, process, node)

    def spawn(self, process: Process, node: Node | None = None) -> None:
        self._at(self.now, process, node)

    def _at(self, when: float, process: Process, node: Node | None) -> None:
        heapq.heappush(self._queue, (when, next(self._order), process, node))

    # -- the network ---------------------------------------------------------------------------------------------------
    def _call(self, node: Node, what: Callable[[], Any]) -> Generator[float, None, list[Any]]:
        """One attempt: [answer], or [] after the deadline. The request may still arrive later."""
        box: list[Any] = []

        def carry() -> Process:
            yield self._latency(node)
            if self.rng.random() < self._loss():
                self.counts["message lost"] += 1
                return
            answer = what()
            yield self._latency(node)
            box.append(answer)

        self.spawn(carry())
        end = self.now + CALL_S / node.rate
        yield 0.02
        while not box and self.now < end:
            yield 0.1
        self.counts["call without an answer"] += not box
        return box

    def _latency(self, node: Node) -> float:
        """Seconds until a message arrives. During a partition it stays in a buffer until that heals."""
        held = max(0.0, node.cut_until - self.now)
        slow = self.now < self.quiet_at and self.rng.random() < 0.02
        self.counts["message late"] += slow
        return held + (self.rng.uniform(0.5, 6.0) if slow else self.rng.uniform(0.0005, 0.01))

    def _loss(self) -> float:
        return 0.03 if self.now < self.quiet_at else 0.0

    # -- what a replica does -------------------------------------------------------------------------------------------
    def _clock(self, node: Node) -> float:
        return self.now * node.rate

    def _alive(self, r: Replica) -> bool:
        return self._clock(r) - r.alive_at < TTL_S

    def _replica(self, r: Replica) -> Process:
        while True:
            asked = self._clock(r)
            granted = yield from self._call(r, lambda: self.etcd.grant(self.now))
            if granted:
                lease, r.alive_at = granted[0], asked
                r.protocol = protocol = ElectionProtocol(self.candidates + r.name, TTL_S, lambda: self._alive(r))
                self.spawn(self._keep(r, protocol, lease), r)
                yield from self._take_part(r, protocol, lease)
                r.protocol = None
                yield from self._call(r, lambda lease=lease: self.etcd.revoke(lease))  # type: ignore[misc]
            yield 0.1

    def _take_part(self, r: Replica, protocol: ElectionProtocol, lease: int) -> Process:
        steps, answer = protocol.steps(), None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            match step:
                case Campaign():
                    entered = yield from self._call(r, lambda: self.etcd.txn(
                        [Compare.absent(protocol.key)], [Op.put(protocol.key, b"", lease)]))
                    if not entered:
                        self.counts["campaign of unknown outcome"] += 1
                        return  # the outcome is unknown: the lease is revoked, and the key with it
                    answer = entered[0]
                case ReadCandidates():
                    found = yield from self._call(r, lambda: self.etcd.range(self.candidates))
                    answer = found[0] if found else None
                case Wait(max_s):
                    answer = yield self.rng.uniform(0, max_s) / r.rate

    def _keep(self, r: Replica, protocol: ElectionProtocol, lease: int) -> Process:
        while r.protocol is protocol and self._alive(r):
            sent = self._clock(r)
            kept = yield from self._call(r, lambda: self.etcd.keep_alive(lease, self.now))
            if r.protocol is not protocol:
                return
            if kept and not kept[0]:
                r.alive_at = -1e9
            elif kept:
                r.alive_at = sent
            yield (TTL_S / 3 if kept else 0.05) / r.rate


_FAULTS = ("replica paused", "replica cut off", "lease revoked", "leases prolonged by a new leader of etcd")


class Simulation(ElectionWorld):
    """Replicas that write whenever they believe that they lead. ``quiet_at``: from then on nothing fails."""

    def __init__(self, seed: int, replicas: int, quiet_at: float, etcd: SimulatedEtcd | None = None) -> None:
        super().__init__(seed, quiet_at, ClusterKeys(CLUSTER).leader_prefix())
        self.etcd = etcd or self.etcd
        self.seen = History()
        # Clocks that run up to a quarter too slow believe in a lease longer than etcd does.
        self.replicas = [Replica(f"r{i}", self.rng.uniform(0.75, 1.25)) for i in range(replicas)]
        for r in self.replicas:
            self.spawn(self._replica(r), r)
            self.spawn(self._writer(r), r)
            self.spawn(self._faults(r))
        self.spawn(self._count_double_leaders())

    def run(self, until: float) -> History:
        self.advance(until)
        seen = self.seen
        seen.counts = self.counts + Counter({
            "write of the leader": len(seen.applied), "write refused": seen.refused,
            "two believe that they lead": seen.double, "term": len(seen.terms)})
        return seen

    def _writer(self, r: Replica) -> Process:
        """Writes under the fencing token whenever the replica believes that it leads."""
        while True:
            yield self.rng.uniform(0.05, 0.4)
            if r.protocol is not None and r.protocol.leads:
                self.spawn(self._write(r, r.protocol.revision, r.protocol.guard))

    def _write(self, r: Replica, term: int, guard: Compare, *more: Op) -> Process:
        """A write on its way to etcd; returns whether etcd took it. ``more``: what is written with it."""
        yield self._latency(r)
        first = leading(self.etcd.range(self.candidates))
        if not self.etcd.txn([guard], [self._of_leader(r, term), *more]):
            self.seen.refused += 1
            return False
        if first is None or first.key != self.candidates + r.name:
            self.seen.faults.append(f"{self.now:.3f}: {r.name} wrote in term {term} while {first} led")
        if self.seen.applied and self.seen.applied[-1][2] > term:
            self.seen.faults.append(f"{self.now:.3f}: a write of term {term} after one of {self.seen.applied[-1]}")
        if any(t == term and who != r.name for _, who, t in self.seen.applied[-1:]):
            self.seen.faults.append(f"{self.now:.3f}: two writers in term {term}")
        self.seen.applied.append((self.now, r.name, term))
        self.seen.terms.add(term)
        return True

    def _of_leader(self, r: Replica, term: int) -> Op:
        """What a leader writes: it announces its term first, and then that it lives."""
        if term in self.seen.terms:
            return Op.put(KEYS.leader_heartbeat(), json.dumps({"replica": r.name, "term": term}).encode())
        return Op.put(KEYS.leadership(), json.dumps({"replica": r.name, "term": term}).encode())

    # -- faults --------------------------------------------------------------------------------------------------------
    def _faults(self, r: Replica) -> Process:
        """Pauses, partitions and expired leases, until it is quiet; and what etcd does when its own leader changes."""
        while True:
            yield self.rng.expovariate(1 / 6)
            if self.now > self.quiet_at:
                return
            until = min(self.now + self.rng.uniform(0.2, 2.5 * TTL_S), self.quiet_at)
            kind = self.rng.randrange(4)
            self.counts[_FAULTS[kind]] += 1
            match kind:
                case 0:
                    r.paused_until = until
                case 1:
                    r.cut_until = until
                case 2:
                    mine = self.etcd.keys.get(self.candidates + r.name)
                    self.etcd.revoke(mine.lease if mine is not None else 0)
                case 3:
                    self.etcd.leases = {n: self.now + TTL_S for n in self.etcd.leases}

    def _count_double_leaders(self) -> Process:
        while True:
            yield 0.25
            self.seen.double += sum(r.protocol is not None and r.protocol.leads for r in self.replicas) > 1


# -- a run -------------------------------------------------------------------------------------------------------------
CALL_KINDS = frozenset({"message lost", "message late", "call without an answer", "campaign of unknown outcome"})
KINDS = CALL_KINDS | frozenset(_FAULTS) | {
    "write of the leader", "write refused", "two believe that they lead", "term"}
QUIET_AT_S, END_S = 24.0, 44.0


def run(seed: int) -> History:
    """Raises RuleViolated where a stale leader wrote, or where there is no one leader at the end, when nothing has
    failed for a while."""
    seen = Simulation(seed, replicas=2 + seed % 3, quiet_at=QUIET_AT_S).run(END_S)
    if seen.faults:
        raise RuleViolated("I1", seen.faults[0])
    if all(at <= END_S - 2 * TTL_S for at, _, _ in seen.applied):
        raise RuleViolated("I12", "there was no leader at the end")
    after = {term for at, _, term in seen.applied if at > QUIET_AT_S + 4 * TTL_S}
    if len(after) != 1:
        raise RuleViolated("I14", f"the leader changed without a cause: {after}")
    return seen
