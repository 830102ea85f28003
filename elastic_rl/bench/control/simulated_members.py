"""Simulated members: each has a lease that is kept alive and a record that it writes again and again, with progress.

They do to etcd and to the leader what real members do (``etcd/membership.py``): a keep-alive each third of the time to
live, a guarded write each time to live. With ``engines`` each is an engine, whose record it updates with its load each
``LOAD_INTERVAL_S``, as ``engine/runner.py`` does: a read, and a write guarded by the epoch. One process simulates them
all, so that the machine's cores are left to what is measured; for the same reason an engine's own read of its record,
twice a second, is left out.
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
from elastic_rl.etcd.channels import KEEPALIVE, Channels
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.etcd.records import Engine, EngineState, Member
from elastic_rl.etcd.transaction import Compare, Op

LOAD_INTERVAL_S = 5.0
"""Interval of ``engine/runner.py``."""
ENGINES_PER_POOL = 10
_ROLES = ("engine", "rollout", "trainer", "reference")
_WRITERS = 4


class SimulatedMembers:
    def __init__(self, endpoint: str, job: str, count: int, ttl_s: int, *, engines: bool, version: int) -> None:
        """``version``: the policy version that engines have."""
        self._etcd, self._keys, self._ttl_s = EtcdClient([endpoint], call_timeout_s=5.0), Keys(job), ttl_s
        self._channels = Channels([endpoint], call_timeout_s=5.0, retry_budget_s=15.0)
        self._epoch = fencing.current_epoch(self._etcd, self._keys)
        now = time.time()
        self._members = [Member(role="engine" if engines else _ROLES[n % len(_ROLES)], id=f"m-{n:04d}", pid=n + 1,
                                host=f"host-{n // 8}", incarnation=secrets.token_hex(8), phase="follow",
                                progress_at=now, beat_at=now) for n in range(count)]
        self._engines = [Engine(id=m.id, pool=f"pool-{n // ENGINES_PER_POOL:03d}", state=EngineState.READY,
                                epoch=self._epoch, incarnation=m.incarnation, url=f"http://10.0.{n // 8}.1:{30000 + n}",
                                pid=m.pid, version=version, host=m.host, started_at=now, updated_at=now,
                                pull_apply_s=1.5, pause_s=0.1, layout="a" * 32, checksum="c" * 64)
                         for n, m in enumerate(self._members)] if engines else []
        self._leases: list[int] = []
        self._revisions: list[int] = [0] * count
        self._heartbeats = self._loads = self._late = 0
        self._done = threading.Event()

    def start(self) -> dict[str, Any]:
        with ThreadPoolExecutor(_WRITERS) as pool:
            self._leases = list(pool.map(lambda _: self._etcd.grant(2 * self._ttl_s), self._members))
        self._run(self._keep_alive)
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(self._write_load, range(len(self._engines))))
            self._revisions = list(pool.map(self._register, range(len(self._members))))
        for writer in range(_WRITERS):
            mine = range(writer, len(self._members), _WRITERS)
            self._run(self._repeat, self._heartbeat, mine, float(self._ttl_s))
            if self._engines:
                self._run(self._repeat, self._write_load, mine, LOAD_INTERVAL_S)
        return {}

    def _run(self, what: Any, *args: Any) -> None:
        threading.Thread(target=what, args=args, daemon=True).start()

    def _register(self, n: int) -> int:
        m = self._members[n]
        return self._etcd.put(self._keys.member(m.role, m.id), m.encode(), lease=self._leases[n])

    def _keep_alive(self) -> None:
        """All leases on one stream, evenly spread over a third of the time to live."""
        def requests() -> Any:
            pause = self._ttl_s / 3 / len(self._leases)
            while not self._done.is_set():
                started = time.monotonic()
                for n, lease in enumerate(self._leases):
                    yield pb.LeaseKeepAliveRequest(ID=lease)
                    self._done.wait(max(0.0, started + (n + 1) * pause - time.monotonic()))

        for _ in self._channels.stream(KEEPALIVE, requests(), self._channels.current):
            if self._done.is_set():
                return

    def _repeat(self, write: Callable[[int], object], mine: Sequence[int], interval_s: float) -> None:
        """Calls ``write`` for each of these members once an interval, evenly spread."""
        pause, due = interval_s / max(1, len(mine)), time.monotonic()
        while not self._done.is_set():
            for n in mine:
                due += pause
                if self._done.wait(max(0.0, due - time.monotonic())):
                    return
                self._late += time.monotonic() - due > interval_s
                write(n)

    def _heartbeat(self, n: int) -> None:
        now, member = time.time(), self._members[n]
        member = self._members[n] = member.replace(step=member.step + 1, progress_at=now, beat_at=now)
        key = self._keys.member(member.role, member.id)
        outcome = self._etcd.txn([Compare.mod(key, "==", self._revisions[n])],
                                 [Op.put(key, member.encode(), self._leases[n])])
        self._revisions[n] = outcome.revision if outcome.succeeded else self._register(n)
        self._heartbeats += 1

    def _write_load(self, n: int) -> None:
        engine = self._engines[n]
        engine = self._engines[n] = engine.replace(running=(engine.running * 7 + n) % 64 + 1,
                                                   waiting=engine.running % 9, updated_at=time.time())
        self._etcd.update(self._keys.engine(engine.id), lambda _: engine.encode(),
                          guards=[fencing.epoch_guard(self._keys, self._epoch)])
        self._loads += 1

    def count(self) -> dict[str, Any]:
        """Heartbeats and load reports so far, and how many came later than their interval: more than none means that
        the simulation is at its limit, and not what is measured."""
        return {"heartbeats": self._heartbeats, "loads": self._loads, "late": self._late}


def main() -> None:
    endpoint, job, count, ttl_s, engines, version = sys.argv[1:]
    made = SimulatedMembers(endpoint, job, int(count), int(ttl_s), engines=engines == "engines", version=int(version))
    serve({"start": made.start, "count": made.count})


if __name__ == "__main__":
    main()
