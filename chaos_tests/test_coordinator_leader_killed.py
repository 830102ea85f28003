"""Leaders of the coordinator are killed and frozen under a stream of writes through both replicas."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from coordinators import Replicas
from etcd_server import EtcdServers
from leadership import Change, Verdict, check

from elastic_rl import processes
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import PoolSpec
from elastic_rl.coordinator.store import Store

_OBSERVER = Path(__file__).parent / "observer.py"


@dataclass(frozen=True)
class Written:
    """One PATCH of the workload. ``status`` 0: no answer."""

    url: str
    status: int
    desired: int
    revision: int


class Writer:
    """Changes the pool all the time, through each replica from a thread of its own."""

    def __init__(self, urls: list[str], seed: int) -> None:
        self.done: list[Written] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(url, random.Random(seed + n)), daemon=True)
                         for n, url in enumerate(urls)]
        for thread in self._threads:
            thread.start()

    def accepted(self) -> int:
        return sum(w.status == 200 for w in self.done)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(15)

    def _work(self, url: str, choose: random.Random) -> None:
        while not self._stop.wait(0.02):
            self.done.append(patch(url, choose.randint(1, 60)))


def patch(url: str, desired: int, timeout_s: float = 2.0) -> Written:
    try:
        answer = httpx.patch(f"{url}/v1/pools/rollout", json={"desired": desired}, headers={"If-Match": "*"},
                             timeout=timeout_s, trust_env=False)
    except httpx.HTTPError:
        return Written(url, 0, desired, 0)
    return Written(url, answer.status_code, desired, int(answer.headers.get("etag", '"0"').strip('"')))


def observe(etcd: EtcdServers, keys: Keys, since: int, last: str) -> list[Change]:
    done = subprocess.run(
        [sys.executable, str(_OBSERVER), etcd.endpoints[0], keys.root, str(since), last], capture_output=True,
        text=True, timeout=60, env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"})
    assert done.returncode == 0, done.stderr[-2000:]
    return [Change(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def replicas(etcd: EtcdServers, keys: Keys, tmp_path: Path) -> Iterator[Replicas]:
    made = Replicas(tmp_path, keys, etcd.endpoints)
    try:
        yield made
    finally:
        made.close()


def more(writer: Writer, n: int) -> None:
    """Until ``n`` more writes were accepted: the fault is over for the clients."""
    goal = writer.accepted() + n
    processes.wait_until(lambda: writer.accepted() >= goal, timeout_s=20, what=f"{n} more accepted writes")


def frozen(process: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_no_write_of_a_stale_leader_is_accepted_when_leaders_are_killed_and_frozen(
        etcd: EtcdServers, store: Store, keys: Keys, replicas: Replicas) -> None:
    since = store.put(keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=2).encode())
    replicas.start("a", "b")
    writer = Writer(list(replicas.urls.values()), seed=7)
    try:
        more(writer, 20)

        killed = replicas.leader()
        replicas.kill(killed)  # returns only when it has ended by SIGKILL
        second = replicas.leader(not_=killed)
        more(writer, 20)
        url = replicas.urls[killed]
        replicas.running[killed] = processes.spawn(replicas.command(killed, int(url.rpartition(":")[2])),
                                                   log=replicas.log(killed))
        processes.wait_until(lambda: replicas.ready(killed), timeout_s=20, what="the killed replica's return")
        more(writer, 10)

        # Frozen as the leader with a write on its way: it wakes up as a leader of the past and must not write.
        replicas.kill(second, signal.SIGSTOP)
        processes.wait_until(lambda: frozen(replicas.running[second]), timeout_s=5, what="the freeze")
        with ThreadPoolExecutor(4) as late:
            pending = [late.submit(patch, replicas.urls[second], n, 20.0) for n in range(61, 65)]
            processes.wait_until(lambda: store.get(keys.leader(second)) is None, timeout_s=10, what="its lease's end")
            more(writer, 10)
            assert frozen(replicas.running[second])
            replicas.kill(second, signal.SIGCONT)
            late_writes = [p.result(timeout=25) for p in pending]
        processes.wait_until(lambda: store.get(keys.leader(second)), timeout_s=10, what="its new candidacy")
        more(writer, 10)
    finally:
        writer.close()
    last = f"{keys.root}zz-end"
    store.put(last, b"end")

    history = observe(etcd, keys, since, last)
    verdict = check(history, keys)
    assert verdict.faults == []
    assert [name for _, name in verdict.terms] == verdict.announced and len(verdict.announced) == 3, verdict.terms
    assert verdict.announced[1] == second and verdict.announced[2] == killed
    accepted = [w for w in (*writer.done, *late_writes) if w.status == 200]
    lost = [w for w in accepted if not _stands(w, verdict)]
    assert lost == [], "writes that were acknowledged are not in the store"
    refused = {w.status for w in (*writer.done, *late_writes)} - {200}
    assert refused <= {0, 503, 504}, refused


def _stands(written: Written, verdict: Verdict) -> bool:
    """The acknowledged revision set this number. (A write of the number that was there already changes nothing and
    names the revision that had set it.)"""
    return verdict.desired.get(written.revision) == written.desired


KEYS = Keys("j")


def _put(revision: int, key: str, value: object, create: int = 0) -> Change:
    return Change(revision, True, key, create or revision, json.dumps(value))


def _scaled(revision: int, replica: str) -> list[Change]:
    event = {"kind": "pool.scaled", "subject": "rollout", "data": {"replica": replica}}
    return [_put(revision, KEYS.pool_spec("rollout"), {"desired": revision}, create=1),
            _put(revision, KEYS.event(f"e{revision}"), event)]


def test_the_check_accepts_a_hand_over_and_finds_a_stale_writer() -> None:
    history = [_put(2, KEYS.leader("a"), {}), _put(3, KEYS.leader("b"), {}), *_scaled(4, "a"),
               Change(5, False, KEYS.leader("a"), 0, ""), *_scaled(6, "b")]
    assert check(history, KEYS).faults == []
    assert [n for _, n in check(history, KEYS).terms] == ["a", "b"]
    assert "written by a while b led" in check([*history, *_scaled(7, "a")], KEYS).faults[0]
    unguarded = [*history, _put(7, KEYS.pool_spec("rollout"), {"desired": 9}, create=1)]
    assert check(unguarded, KEYS).faults == ["7: the pool changed without its event"]
