"""Simulated members: each has a lease that is kept alive, a record that it writes again and again, and progress.

They do to etcd and to the leader what real members do (``coordinator/membership.py``): a keep-alive each third of the
time to live, a guarded write each time to live. One process plays them all, so that the machine's cores are left to
what is measured.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from elastic_rl.bench.workers import serve
from elastic_rl.etcd.channels import KEEPALIVE, Channels
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.etcd.records import Member
from elastic_rl.etcd.transaction import Compare, Op

_ROLES = ("engine", "rollout", "trainer", "reference")
_WRITERS = 4


class SimulatedMembers:
    def __init__(self, endpoint: str, job: str, count: int, ttl_s: int) -> None:
        self._etcd, self._keys, self._ttl_s = EtcdClient([endpoint], call_timeout_s=5.0), Keys(job), ttl_s
        self._channels = Channels([endpoint], call_timeout_s=5.0, retry_budget_s=15.0)
        now = time.time()
        self._members = [Member(role=_ROLES[n % len(_ROLES)], id=f"m-{n:04d}", pid=n + 1, host=f"host-{n // 8}",
                                incarnation=secrets.token_hex(8), phase="train", progress_at=now, beat_at=now)
                         for n in range(count)]
        self._leases: list[int] = []
        self._revisions: list[int] = [0] * count
        self._beats = self._late = 0
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> dict[str, Any]:
        with ThreadPoolExecutor(_WRITERS) as pool:
            self._leases = list(pool.map(lambda _: self._etcd.grant(2 * self._ttl_s), self._members))
        self._run(self._keep_alive)
        with ThreadPoolExecutor(_WRITERS) as pool:
            self._revisions = list(pool.map(self._register, range(len(self._members))))
        for writer in range(_WRITERS):
            self._run(self._beat_on, writer)
        return {}

    def _run(self, what: Any, *args: Any) -> None:
        self._threads.append(threading.Thread(target=what, args=args, daemon=True))
        self._threads[-1].start()

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

        for _ in self._channels.stream(KEEPALIVE, requests(), 0, timeout_s=3600.0):
            if self._done.is_set():
                return

    def _beat_on(self, writer: int) -> None:
        mine = range(writer, len(self._members), _WRITERS)
        pause = self._ttl_s / max(1, len(mine))
        due = time.monotonic()
        while not self._done.is_set():
            for n in mine:
                due += pause
                if self._done.wait(max(0.0, due - time.monotonic())):
                    return
                self._late += time.monotonic() - due > self._ttl_s
                self._beat(n)

    def _beat(self, n: int) -> None:
        now, member = time.time(), self._members[n]
        member = self._members[n] = member.replace(step=member.step + 1, progress_at=now, beat_at=now)
        key = self._keys.member(member.role, member.id)
        outcome = self._etcd.txn([Compare.mod(key, "==", self._revisions[n])],
                                  [Op.put(key, member.encode(), self._leases[n])])
        self._revisions[n] = outcome.revision if outcome.succeeded else self._register(n)
        self._beats += 1

    def count(self) -> dict[str, Any]:
        """Beats so far, and how many came later than a time to live: more than none means that the crowd, and not what
        is measured, is at its limit."""
        return {"beats": self._beats, "late": self._late}


def main() -> None:
    endpoint, job, count, ttl_s = sys.argv[1:]
    crowd = SimulatedMembers(endpoint, job, int(count), int(ttl_s))
    serve({"start": crowd.start, "count": crowd.count})


if __name__ == "__main__":
    main()
