"""hosts-1000-*: 10,000 engines on 1,000 hosts, whose agents collect their heartbeats, and the same with engines that
write their heartbeats themselves.

The same leader, etcd and engines, one after the other. With ``--quick`` there are a tenth of them, and the rows say so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import psutil

from elastic_rl.bench.control.api import GOAL_CORES, GOAL_P99_MS, PATHS
from elastic_rl.bench.control.testbed import TTL_S, Replicas, Testbed, cores
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.workers import Worker
from elastic_rl.report.build import percentile
from elastic_rl.runtime.waiting import wait_until

HOSTS, QUICK_HOSTS, MEMBERS_PER_HOST = 1000, 100, 10
CLIENTS, PAUSE_S = 4, 0.2
"""Clients of the API, and the pause of each after a request: people, dashboards and scripts. Without pauses they would
take all that the engines leave of two cores, and measure that."""
SETTINGS = {"coordinator": {"max_engines": HOSTS * MEMBERS_PER_HOST}}
_ALTERNATIVE = "each engine writes its own"
_FIRST_PASSES_S = 300.0


@dataclass(frozen=True)
class Cost:
    """What the heartbeats of all members cost, in one of the two ways."""

    writes: float
    """A second, by etcd's revisions."""
    leader: float
    """Cores; so are the next two."""
    follower: float
    etcd: float
    p99_ms: float
    """The 99th percentile of the leader's API."""
    late: float
    """Heartbeats a second that were written later than a whole period after they were due."""
    memory_mib: float
    """Memory of the leader."""
    p99_of_path_ms: Mapping[str, float] = field(default_factory=dict)
    """The same for each path, by its name (``PATHS``)."""


def measure(testbed: Testbed) -> Iterator[Row]:
    hosts, settle_s, window_s = (QUICK_HOSTS, 4.0, 4.0) if testbed.options.quick else (HOSTS, 20.0, 30.0)
    members = hosts * MEMBERS_PER_HOST
    with testbed.replicas("a", "b", **SETTINGS) as replicas, testbed.hosts(replicas.keys, hosts, MEMBERS_PER_HOST
                                                                           ) as simulated:
        simulated.call("begin", who="agents")
        wait_until(lambda: testbed.etcd.count(replicas.keys.registry_prefix()) >= members, timeout_s=_FIRST_PASSES_S,
                   what="the leader's first passes over the job")
        leader, found = replicas.leader(), {}
        for who in ("agents", "members"):
            simulated.call("begin", who=who)
            time.sleep(settle_s)
            found[who] = _cost(testbed, replicas, leader, simulated, window_s)
        yield from rows(found["agents"], found["members"], members, hosts)


def rows(collected: Cost, own: Cost, members: int, hosts: int) -> Iterator[Row]:
    """The rows of one run; this function is pure."""
    late = "" if not own.late else (f"of the heartbeats of {members} members {own.late:.0f} a second were late: the "
                                    "simulation, or etcd, was at its limit")

    def row(name: str, what: str, of: Callable[[Cost], float], unit: str, *, is_compared: bool = True,
            parts: Mapping[str, float] = MappingProxyType({}), **bounds: Any) -> Row:
        beside, unmeasured = dict(parts), dict[str, str]()
        if is_compared and late:
            unmeasured[_ALTERNATIVE] = late
        elif is_compared:
            beside[_ALTERNATIVE] = of(own)
        return Row(id=f"hosts-1000-{name}", name=what, value=of(collected), unit=unit, alternatives=beside,
                   unmeasured_alternatives=unmeasured, **bounds)

    yield row("writes", f"heartbeats alone of {members} engines on {hosts} hosts, whose agents collect them: writes "
              "that etcd takes", lambda c: c.writes, "1/s", limit=hosts / TTL_S)
    yield row("cpu", "… the leader", lambda c: c.leader, "cores", goal=GOAL_CORES)
    yield row("cpu-follower", "… the other replica", lambda c: c.follower, "cores")
    yield row("cpu-etcd", "… etcd", lambda c: c.etcd, "cores")
    yield row("memory", "… memory of the leader", lambda c: c.memory_mib, "MiB", is_compared=False)
    yield row("api-p99", f"… API of the leader, {CLIENTS} clients: 99th percentile of all paths", lambda c: c.p99_ms,
              "ms", goal=GOAL_P99_MS, parts=collected.p99_of_path_ms)
    yield row("late", "… heartbeats that were written late", lambda c: c.late, "1/s", is_compared=False, goal=0)


def _cost(testbed: Testbed, replicas: Replicas, leader: str, simulated: Worker, window_s: float) -> Cost:
    names = [leader, *(name for name in replicas.running if name != leader)]
    processes = [*map(replicas.process, names), psutil.Process(testbed.etcd_pid)]
    before, revision, began = simulated.call("count"), testbed.etcd.revision(), time.monotonic()
    of_leader, of_follower, of_etcd = cores(processes, window_s)
    writes, took = testbed.etcd.revision() - revision, time.monotonic() - began
    with testbed.api_clients(replicas, leader, CLIENTS) as clients:
        answered = clients.call("get", paths=[replicas.path + path for path in PATHS.values()],
                                seconds=window_s, pause_s=PAUSE_S)["ms"]
    late, whole = simulated.call("count")["late"] - before["late"], time.monotonic() - began
    p99_ms = percentile([t for of in answered.values() for t in of], 0.99) or 0.0
    return Cost(writes / took, of_leader, of_follower, of_etcd, p99_ms, late / whole,
                processes[0].memory_info().rss / 2**20,
                {name: percentile(answered[replicas.path + path], 0.99) or 0.0 for name, path in PATHS.items()})
