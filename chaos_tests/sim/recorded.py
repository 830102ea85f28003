"""The worlds of the election and of the cluster, whose processes write down what they were told, for the sequential
models to judge. They draw no random number of the world, so that the run of a seed is the one without a history."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

from chaos_tests.history import Operation
from chaos_tests.model import assignment, models, terms
from chaos_tests.sim import cluster, election
from chaos_tests.sim.cluster import SimAgent, SimHost
from chaos_tests.sim.election import Process, Replica
from chaos_tests.sim.store import Log, ObservedEtcd
from elastic_rl.coordinator.cluster_pass import ClusterReading, ClusterWrite
from elastic_rl.coordinator.election.protocol import ElectionProtocol
from elastic_rl.etcd.cluster_records import Assignment
from elastic_rl.etcd.transaction import Compare, Op
from elastic_rl.host.agent.duties import Order

LEADER = "leader"
"""Key of the history of an election."""
WRITTEN = f"{election.KEYS.root}written"
"""What leaders write of the history into etcd."""
_AGENT_READS_S = 1.0
"""Shortest time between two readings of an agent that the history has."""


class RecordedElection(election.Simulation):
    """A candidacy begins to acquire its term when its replica begins to take part, and has it when the protocol says
    that it leads. It has one write of the history on its way at a time; others of its leader are none of the history,
    and do not touch what that is about. Another client reads what was written last."""

    def __init__(self, seed: int, log: Log) -> None:
        self._log, self._numbers = log, itertools.count(1)
        self._under_way = dict[ElectionProtocol, Operation]()
        super().__init__(seed, 2 + seed % 3, election.QUIET_AT_S, ObservedEtcd(log))
        log.clock = lambda: self.now
        self.spawn(self._read(random.Random(seed)))

    def close(self) -> None:
        """Whether what is under way has an effect is unknown."""
        for operation in self._under_way.values():
            self._log.operation(operation)
        self._under_way.clear()

    def _take_part(self, r: Replica, protocol: ElectionProtocol, lease: int) -> Process:
        self._under_way[protocol] = Operation(r.name, LEADER, terms.Call.ACQUIRE, None, self.now, model=models.TERMS)
        for pause in super()._take_part(r, protocol, lease):
            self._note_term(protocol)
            yield pause
        under_way = self._under_way.get(protocol)
        if under_way is not None and under_way.call == terms.Call.ACQUIRE:  # etcd may have had it lead for a while
            self._log.operation(self._under_way.pop(protocol))

    def _note_term(self, protocol: ElectionProtocol) -> None:
        under_way = self._under_way.get(protocol)
        if protocol.leads and under_way is not None and under_way.call == terms.Call.ACQUIRE:
            self._end(protocol, protocol.revision)

    def _write(self, r: Replica, term: int, guard: Compare, *more: Op) -> Process:
        protocol = r.protocol
        assert protocol is not None
        self._note_term(protocol)
        if protocol in self._under_way:
            return super()._write(r, term, guard, *more)
        number = next(self._numbers)
        self._under_way[protocol] = Operation(f"{r.name} in term {term}", LEADER, terms.Call.WRITE, [term, number],
                                              self.now, model=models.TERMS)
        put = Op.put(WRITTEN, json.dumps({"number": number}).encode())
        return self._until_its_effect(protocol, super()._write(r, term, guard, put, *more))

    def _until_its_effect(self, protocol: ElectionProtocol, write: Process) -> Process:
        taken = yield from write
        self._end(protocol, None if taken else terms.FENCED)
        return taken

    def _end(self, protocol: ElectionProtocol, result: Any) -> None:
        self._log.operation(replace(self._under_way.pop(protocol), ended_s=self.now, result=result))

    def _read(self, rng: random.Random) -> Process:
        while True:
            yield rng.uniform(0.1, 0.4)
            began_s = self.now
            yield rng.uniform(0.0005, 0.01)
            found = self.etcd.keys.get(WRITTEN)
            yield rng.uniform(0.0005, 0.01)
            self._log.operation(Operation(
                "reader", LEADER, terms.Call.READ, None, began_s, self.now,
                json.loads(found.value)["number"] if found is not None else None, models.TERMS))


class RecordedCluster(cluster.ClusterWorld):
    """Leaders replace assignments by the generations that they have read, and the agents of hosts read them. The
    generation is the version of the assignment's key. The product releases assignments and never deletes them, so that
    a generation that begins again is a violation, and no further life of the key."""

    def __init__(self, seed: int, log: Log) -> None:
        self._log, self._numbers = log, itertools.count()
        self._under_way = dict[int, Operation]()
        self._names = set[str]()
        """Singletons that have had an assignment."""
        self._read_at = dict[str, float]()
        """When the last reading of each host's agent arrived that the history has."""
        super().__init__(seed, cluster.parallel_jobs(seed), ObservedEtcd(log))
        log.clock = lambda: self.now

    def close(self) -> None:
        """Whether what is under way, or was when its replica was killed, has an effect is unknown."""
        for operation in self._under_way.values():
            self._log.operation(operation)
        self._under_way.clear()

    def _send(self, r: Replica, reading: ClusterReading, write: ClusterWrite, guard: list[Compare]) -> Process:
        if not isinstance(write.record, Assignment):
            yield from super()._send(r, reading, write, guard)
            return
        name, number = write.key.removeprefix(cluster.KEYS.assignments_prefix()), next(self._numbers)
        known = reading.assignments[name].version if name in reading.assignments else 0
        self._under_way[number] = put = Operation(r.name, name, assignment.Call.PUT, [write.record.host, known],
                                                  self.now, model=models.ASSIGNMENT)

        def arrive() -> tuple[bool, int]:
            """Whether it was taken, and the generation then, which either branch of the transaction can read."""
            taken = self._apply(r, write, guard)
            self._names.add(name)
            found = self.etcd.keys.get(write.key)
            return taken, found.version if found is not None else 0

        answer = yield from self._call(r, arrive)
        del self._under_way[number]
        if not answer:
            self._log.operation(put)
            return
        taken, generation = answer[0]
        if taken or generation != known:  # else another condition did not hold, and it certainly had no effect
            self._log.operation(replace(put, ended_s=self.now, result=generation if taken else assignment.CONFLICT))

    def _orders_read(self, host: SimHost, agent: SimAgent, asked: float, revision: int, orders: dict[str, Order]
                     ) -> None:
        super()._orders_read(host, agent, asked, revision, orders)
        began_s = asked / agent.rate
        if began_s < self._read_at.get(host.name, 0.0) + _AGENT_READS_S:
            return
        self._read_at[host.name] = self.now
        for name in sorted(self._names | orders.keys()):
            order = orders.get(name, Order(Assignment(), 0))
            self._log.operation(Operation(host.name, name, assignment.Call.READ, None, began_s, self.now,
                                          [order.assignment.host, order.generation], models.ASSIGNMENT))
