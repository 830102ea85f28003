"""The workload of the tests about leaders: changes of a pool through every replica, and what became of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpx
from leadership import Change, Verdict
from support.coordinators import AUTH
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.etcd.keys import ROOT, ClusterKeys, Keys
from elastic_rl.net import http_client

_OBSERVER = Path(__file__).parent / "observer.py"


@dataclass(frozen=True)
class Written:
    """One PATCH of the workload. ``status`` 0: no answer."""

    url: str
    """Of the job on a replica."""
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
        answer = http_client.request("PATCH", f"{url}/pools/rollout", json={"desired": desired},
                                     headers={**AUTH, "If-Match": "*"}, timeout=timeout_s)
    except httpx.HTTPError:
        return Written(url, 0, desired, 0)
    return Written(url, answer.status_code, desired, int(answer.headers.get("etag", '"0"').strip('"')))


def observe(etcd_servers: EtcdServers, keys: Keys, since: int, last: str) -> list[Change]:
    done = subprocess.run(
        [sys.executable, str(_OBSERVER), etcd_servers.endpoints[0], f"{ROOT}/", str(since), last], capture_output=True,
        encoding="utf-8", timeout=60, env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"})
    assert done.returncode == 0, done.stderr[-2000:]
    changes = (Change(**json.loads(line)) for line in done.stdout.splitlines())
    return [change for change in changes if change.key.startswith((keys.root, ClusterKeys(keys.job).root))]


def more(writer: Writer, n: int) -> None:
    """Until ``n`` more writes were accepted: the fault is over for the clients."""
    goal = writer.accepted() + n
    wait_until(lambda: writer.accepted() >= goal, what=f"{n} more accepted writes")


def _stands(written: Written, verdict: Verdict) -> bool:
    """The acknowledged revision set this number. (A write of the number that was there already changes nothing and
    names the revision that had set it.)"""
    return verdict.desired.get(written.revision) == written.desired


def lost(writes: Iterable[Written], verdict: Verdict) -> list[Written]:
    """Those that were acknowledged and are not in the store."""
    return [w for w in writes if w.status == 200 and not _stands(w, verdict)]
