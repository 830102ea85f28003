"""api-*, cpu-1000, memory-1000, etcd-writes: a job of a thousand members and a hundred pools, under requests.

The members beat from a process of their own. Two replicas serve; requests go to the leader, one after the other, as an
operator's tools send them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import psutil

from elastic_rl.bench.control.testbed import Testbed
from elastic_rl.bench.measurement import Row

MEMBERS, POOLS = 1000, 100
_READS = ("/v1/job", "/v1/pools?limit=100", "/v1/pools/pool-042", "/v1/members?limit=100", "/v1/engines?limit=100",
          "/v1/events?limit=100", "/v1/versions?limit=100", "/v1/operations?limit=100", "/v1/alerts")
_CALM_S = 5.0


def measure(testbed: Testbed) -> list[Row]:
    window_s = 10.0 if testbed.options.quick else 30.0
    with testbed.replicas("a", "b") as replicas:
        testbed.pools(replicas.keys, POOLS)
        with testbed.crowd(replicas.keys, MEMBERS) as crowd:
            leader = replicas.leader()
            process, etcd = replicas.process(leader), psutil.Process(testbed.etcd_pid)
            time.sleep(_CALM_S)  # the roster takes a thousand members in once; that is not what it costs to keep them
            beats, revision = crowd.call("count")["beats"], testbed.etcd.range("none")[1]
            cpu = _cores(process, etcd, window_s)
            after = crowd.call("count")
            writes = (testbed.etcd.range("none")[1] - revision) / window_s
            rows = [
                Row(id="cpu-1000", name=f"leader with {MEMBERS} members: cores", value=cpu[0], unit="cores", goal=0.5),
                Row(id="cpu-1000-etcd", name="… and etcd", value=cpu[1], unit="cores"),
                Row(id="memory-1000", name="… memory of the leader", unit="MiB",
                    value=process.memory_info().rss / 2**20),
                Row(id="etcd-writes", name="… writes that etcd takes", value=writes, unit="1/s",
                    alternatives={"beats of the members": (after["beats"] - beats) / window_s,
                                  "beats that came late": after["late"]})]
            return rows + _requests(replicas.client(leader, timeout=10.0), window_s, lambda: testbed.etcd.range(
                replicas.keys.members_prefix(), limit=100))


def _cores(leader: psutil.Process, etcd: psutil.Process, window_s: float) -> list[float]:
    """Cores that each process keeps busy."""
    before, began = [sum(p.cpu_times()[:2]) for p in (leader, etcd)], time.monotonic()
    time.sleep(window_s)
    took = time.monotonic() - began
    return [(sum(p.cpu_times()[:2]) - b) / took for p, b in zip((leader, etcd), before, strict=True)]


def _requests(client: httpx.Client, window_s: float, raw: Callable[[], object]) -> list[Row]:
    times: list[float] = []
    bare: list[float] = []
    worst: dict[str, float] = {}
    with client:
        end = time.monotonic() + window_s
        while time.monotonic() < end:
            for path in _READS:
                began = time.monotonic()
                client.get(path).raise_for_status()
                times.append(time.monotonic() - began)
                worst[path] = max(worst.get(path, 0.0), times[-1])
            began = time.monotonic()
            raw()
            bare.append(time.monotonic() - began)
    times = sorted(t * 1e3 for t in times)
    p99 = times[int(0.99 * (len(times) - 1))]
    limit = sorted(bare)[len(bare) // 2] * 1e3
    return [Row(id="api-p99", name=f"API with {MEMBERS} members and {POOLS} pools, 99th percentile", value=p99,
                unit="ms", goal=50.0, samples=len(times), limit=limit,
                alternatives={f"slowest {path}": round(s * 1e3, 1) for path, s in worst.items()}),
            Row.of("api-p50", "… median", times, "ms", limit=limit)]
