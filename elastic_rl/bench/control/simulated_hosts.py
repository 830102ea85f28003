"""Simulated hosts with their engines: what their agents and members write, without agents and members.

Members are registered under leases, and the engines have records. Then either the agent of each host writes the
heartbeats of all its members, guarded by the host's registration and with a look at their entries, once a period, after
a reading of etcd's revision, as ``host/agent/heartbeat_collector.py`` does; or each member writes its own record,
guarded, once a period, as ``etcd/membership.py`` does without an agent. One process simulates them all. To leave the
machine's cores to what is measured, leases last for the whole measurement: keep-alives are no writes, concern etcd
alone, and are the same in both cases. So are the load reports of engines, which are left out too.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_rl.bench.workers import serve
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import Host
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Engine, EngineState, Heartbeat, HostHeartbeats, Member, PoolSpec, PoolStatus
from elastic_rl.etcd.transaction import Compare, Op, batches

POOLS = 100
_LEASE_S = 3600
_WRITERS = 4
_BATCH = 50


class SimulatedHosts:
    def __init__(self, endpoint: str, job: str, hosts: int, members_per_host: int, period_s: float) -> None:
        self._etcd, self._keys = EtcdClient([endpoint], call_timeout_s=10.0), Keys(job)
        self._cluster, self._period_s = ClusterKeys(job), period_s
        self._epoch = fencing.current_epoch(self._etcd, self._keys)
        now, per_pool = time.time(), hosts * members_per_host // POOLS
        self._hosts, self._per_host = [f"host-{n:04d}" for n in range(hosts)], members_per_host
        self._members = [Member(role="engine", id=f"m-{n:04d}", pid=n + 1, host=self._hosts[n // members_per_host],
                                incarnation=secrets.token_hex(8), phase="follow", step=7, progress_at=now, beat_at=now,
                                beats=1, collector=self._hosts[n // members_per_host], epoch=self._epoch)
                         for n in range(hosts * members_per_host)]
        self._engines = [Engine(id=m.id, pool=f"pool-{n // per_pool:03d}", state=EngineState.READY, epoch=self._epoch,
                                incarnation=m.incarnation, url=f"http://{m.host}:{30000 + n % 100}", pid=m.pid,
                                version=7, host=m.host, started_at=now, updated_at=now, pull_apply_s=1.5, pause_s=0.1,
                                layout="a" * 32, checksum="c" * 64, running=8, load_known=True)
                         for n, m in enumerate(self._members)]
        self._pools = [(PoolSpec(name=f"pool-{n:03d}", desired=per_pool),
                        PoolStatus(name=f"pool-{n:03d}", ready=per_pool, starting=0, draining=0)) for n in range(POOLS)]
        self._lease = 0
        self._registrations: dict[str, int] = {}
        self._revisions: list[int] = []
        self._late = 0
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> dict[str, Any]:
        """Registers all; nobody writes heartbeats yet."""
        self._lease = self._etcd.grant(_LEASE_S)
        keys = self._keys
        self._write([op for spec, status in self._pools for op in (
            Op.put(keys.pool_spec(spec.name), spec.encode()), Op.put(keys.pool_status(spec.name), status.encode()))])
        self._write([Op.put(keys.engine(e.id), e.encode()) for e in self._engines])
        self._registrations = dict(zip(self._hosts, self._write(
            [Op.put(self._cluster.host(name), Host(id=name, incarnation="i").encode(), self._lease)
             for name in self._hosts]), strict=True))
        self._revisions = self._write([Op.put(keys.member(m.role, m.id), m.encode(), self._lease)
                                       for m in self._members])
        return {}

    def _write(self, ops: Sequence[Op]) -> list[int]:
        """Writes these, and returns the revision of each."""
        with ThreadPoolExecutor(_WRITERS) as pool:
            revisions = pool.map(lambda batch: [self._etcd.txn([], batch).revision] * len(batch), batches(ops, _BATCH))
            return [revision for batch in revisions for revision in batch]

    def begin(self, who: str) -> dict[str, Any]:
        """Has these write heartbeats from now on: ``agents``, or ``members``."""
        self._done.set()
        for thread in self._threads:
            thread.join()
        self._done.clear()
        agents = who == "agents"
        if not agents:
            self._members = [m.replace(collector="") for m in self._members]
            self._write([Op.delete(self._keys.heartbeats(name)) for name in self._hosts])
        write, count, beats = (self._collect, len(self._hosts), self._per_host) if agents else (
            self._beat, len(self._members), 1)
        self._threads = [threading.Thread(target=self._repeat, args=(write, beats, range(writer, count, _WRITERS)),
                                          daemon=True) for writer in range(_WRITERS)]
        for thread in self._threads:
            thread.start()
        return {}

    def count(self) -> dict[str, Any]:
        """How many heartbeats came later than a whole period so far: more than none means that the simulation, or etcd,
        is at its limit."""
        return {"late": self._late}

    def _repeat(self, write: Callable[[int], None], beats: int, mine: Sequence[int]) -> None:
        """Calls ``write`` for each of these once a period, evenly spread; each call writes so many heartbeats."""
        pause, due = self._period_s / max(1, len(mine)), time.monotonic()
        while not self._done.is_set():
            for n in mine:
                due += pause
                if self._done.wait(max(0.0, due - time.monotonic())):
                    return
                self._late += beats if time.monotonic() - due > self._period_s else 0
                write(n)

    def _next(self, n: int) -> Member:
        now, member = time.time(), self._members[n]
        member = self._members[n] = member.replace(progress_at=now, beat_at=now, beats=member.beats + 1)
        return member

    def _collect(self, n: int) -> None:
        name = self._hosts[n]
        self._etcd.revision()
        members = [self._next(m) for m in range(n * self._per_host, (n + 1) * self._per_host)]
        beats = [Heartbeat(role=m.role, id=m.id, incarnation=m.incarnation, step=m.step, phase=m.phase,
                           progress_at=m.progress_at, beat_at=m.beat_at, beats=m.beats, revision=self._revisions[n])
                 for m in members]
        outcome = self._etcd.txn([Compare.mod(self._cluster.host(name), "==", self._registrations[name])], [
            Op.put(self._keys.heartbeats(name), HostHeartbeats(host=name, beats=beats).encode(), self._lease),
            *(Op.get(self._keys.member(m.role, m.id)) for m in members)])
        assert outcome.succeeded and len(outcome.kvs) == len(members)

    def _beat(self, n: int) -> None:
        m = self._next(n)
        key = self._keys.member(m.role, m.id)
        outcome = self._etcd.txn([Compare.mod(key, "==", self._revisions[n])],
                                 [Op.put(key, m.encode(), self._lease)])
        assert outcome.succeeded
        self._revisions[n] = outcome.revision


def main() -> None:
    endpoint, job, hosts, members_per_host, period_s = sys.argv[1:]
    made = SimulatedHosts(endpoint, job, int(hosts), int(members_per_host), float(period_s))
    serve({"start": made.start, "begin": made.begin, "count": made.count})


if __name__ == "__main__":
    main()
