"""api-*, cpu-1000, memory-1000, etcd-writes: a job of a thousand engines after weeks, without and with requests.

The engines write heartbeats and their load from a process of their own. There are 100 pools, 10,000 versions, 10,000
events, 2,000 steps, and 1,000 operations (as many as the API allows). Two replicas serve; 16 clients request the
leader's listings in turn, each one request after the other without a pause. Prometheus scrapes are measured alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

from elastic_rl.bench.control import large_job
from elastic_rl.bench.control.testbed import Replicas, Testbed, cores
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.timing import seconds
from elastic_rl.bench.workers import Worker
from elastic_rl.coordinator.api_paths import OF_JOB
from elastic_rl.etcd.records import Operation
from elastic_rl.report.build import percentile
from elastic_rl.runtime.waiting import wait_until

ENGINES, CLIENTS = 1000, 16
GOAL_P99_MS, GOAL_CORES = 50.0, 0.5
PATHS = {"job": "", "pools": "/pools?limit=100", "pool": "/pools/pool-042", "members": "/members?limit=100",
         "engines": "/engines?limit=100", "engine": "/engines/m-0042", "events": "/events?limit=100",
         "versions": "/versions?limit=100", "operations": "/operations?limit=100",
         "operations-running": "/operations?limit=100&state=running", "steps": "/steps?limit=100", "alerts": "/alerts"}
"""Paths below that of the job, by the end of their row's id."""
_HEALTH, _METRICS, _SCRAPES = "/healthz", "/metrics", 5
_SETTLE_S = 5.0
_FIRST_PASSES_S = 120.0


def measure(testbed: Testbed) -> Iterator[Row]:
    window_s = 10.0 if testbed.options.quick else 30.0
    with testbed.replicas("a", "b", **large_job.SETTINGS) as replicas:
        large_job.write_pools(testbed.etcd, replicas.keys)
        large_job.write_history(testbed.etcd, replicas.keys)
        with testbed.members(replicas.keys, ENGINES, engines=True, version=large_job.VERSIONS) as members:
            _settle(testbed, replicas, large_job.write_operations(testbed.etcd, replicas.keys))
            leader = replicas.leader()
            yield from _load(testbed, replicas.process(leader), members, window_s)
            with replicas.client(leader, timeout=60.0) as client:
                scrapes = seconds(lambda: client.get(_METRICS).raise_for_status(), _SCRAPES)
                yield Row.of("scrape", f"{_METRICS} of the leader, one client", [t * 1e3 for t in scrapes], "ms")
            with testbed.api_clients(replicas, leader, CLIENTS) as clients:
                floor = clients.call("get", paths=[_HEALTH], seconds=window_s / 3)["ms"][_HEALTH]
                paths = [replicas.path + path for path in PATHS.values()]
                times = clients.call("get", paths=paths, seconds=window_s)["ms"]
                found = {path.removeprefix(replicas.path): times[path] for path in paths}
                ranges = clients.call("ranges", prefix=replicas.keys.engines_prefix(), limit=100, seconds=window_s / 3)
                yield from request_rows(found, floor, next(iter(ranges["ms"].values())), window_s)


def request_rows(found: Mapping[str, Sequence[float]], floor: Sequence[float], ranges: Sequence[float],
                 window_s: float) -> Iterator[Row]:
    """Pure. Milliseconds of the requests by their paths below that of the job, of ``/healthz``, and of ranges of 100
    engines from etcd; each by as many clients."""
    times = [t for of in found.values() for t in of]
    name, other = f"API, {ENGINES} engines, {CLIENTS} clients", "the clients read 100 engines from etcd themselves"
    for quantile, title in ((0.99, "99th percentile"), (0.5, "median")):
        yield Row(id=f"api-p{quantile * 100:.0f}", name=f"{name}: {title} of all paths", unit="ms",
                  value=percentile(times, quantile), goal=GOAL_P99_MS if quantile == 0.99 else None,
                  samples=len(times), limit=percentile(floor, quantile),
                  alternatives={other: percentile(ranges, quantile) or 0.0})
    yield Row(id="api-rps", name=f"{name}: requests answered", value=len(times) / window_s, unit="1/s", op=">=",
              samples=len(times))
    for part, path in PATHS.items():
        of = found[path]
        yield Row(id=f"api-p99-{part}", name=f"… {OF_JOB}{path}: 99th percentile", unit="ms",
                  value=percentile(of, 0.99), samples=len(of), low=percentile(of, 0.05), high=percentile(of, 0.95),
                  limit=percentile(floor, 0.99))


def _settle(testbed: Testbed, replicas: Replicas, newest: str) -> None:
    """Waits until the leader has registered the members and advanced all operations: that happens once, and is not what
    it costs to keep them."""
    def advanced() -> bool:
        found = testbed.etcd.get(replicas.keys.operation(newest))
        registered = testbed.etcd.count(replicas.keys.registry_prefix())
        return registered >= ENGINES and found is not None and Operation.decode(found.value).phase == "draining"

    wait_until(advanced, timeout_s=_FIRST_PASSES_S, what="the leader's first passes over the job")
    time.sleep(_SETTLE_S)


def _load(testbed: Testbed, leader: psutil.Process, members: Worker, window_s: float) -> Iterator[Row]:
    before, revision, began = members.call("count"), _revision(testbed), time.monotonic()
    used = cores([leader, psutil.Process(testbed.etcd_pid)], window_s)
    after, took = members.call("count"), time.monotonic() - began
    own = {what: (after[what] - before[what]) / took for what in ("heartbeats", "loads")}
    yield Row(id="cpu-1000", name=f"leader of {ENGINES} engines that write: cores", value=used[0], unit="cores",
              goal=GOAL_CORES)
    yield Row(id="cpu-1000-etcd", name="… and etcd", value=used[1], unit="cores")
    yield Row(id="memory-1000", name="… memory of the leader", unit="MiB", value=leader.memory_info().rss / 2**20)
    yield Row(id="etcd-writes", name=f"… writes that etcd takes, {own['heartbeats']:.0f} of them heartbeats and "
              f"{own['loads']:.0f} load reports of the engines", value=(_revision(testbed) - revision) / took,
              unit="1/s", limit=sum(own.values()))
    yield Row(id="late-writes", name="… writes of the simulated engines that were late", goal=0,
              value=after["late"] - before["late"])


def _revision(testbed: Testbed) -> int:
    return testbed.etcd.range("none")[1]
