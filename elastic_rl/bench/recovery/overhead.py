"""overhead: the CPU time that the durable plane takes while no job runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median

import psutil

from elastic_rl.bench.measurement import Row
from elastic_rl.bench.recovery.testbed import Testbed
from elastic_rl.host.local_cluster import AGENTS

_GOAL_CORES = 0.05
_INTERVAL_S = 10.0
_SETTLE_S = 20.0
"""Time after the start in which caches fill and first passes are done."""

CpuTimes = Mapping[str, float]
"""CPU seconds so far, by process."""


def measure(testbed: Testbed) -> Iterator[Row]:
    time.sleep(_SETTLE_S)
    readings = [_reading(testbed)]
    for _ in range(testbed.trials):
        time.sleep(_INTERVAL_S)
        readings.append(_reading(testbed))
    yield from rows(readings)


def _reading(testbed: Testbed) -> tuple[float, CpuTimes]:
    """When it was read, by a clock that never goes back, and the CPU times of the agent and of each service with what
    it has started."""
    found: dict[str, float] = {}
    for record in (*testbed.cluster.agents.running(), *testbed.cluster.services.running()):
        process = psutil.Process(record.pid)
        # The agent's children are the services that it has started again, and the other agent.
        family = [process, *(() if record.name in AGENTS else process.children(recursive=True))]
        found[record.name] = sum(times.user + times.system for p in family for times in [p.cpu_times()])
    return time.monotonic(), found


def rows(readings: Sequence[tuple[float, CpuTimes]]) -> list[Row]:
    """Cores in each interval between two readings. Pure."""
    cores = [{name: (later - before[name]) / (end - began) for name, later in after.items() if name in before}
             for (began, before), (end, after) in pairwise(readings)]
    sums = [sum(each.values()) for each in cores]
    names = sorted({name for each in cores for name in each})
    parts = {name: median(each.get(name, 0.0) for each in cores) for name in names}
    row = Row.of("overhead", "cores that agent, etcd, coordinators and DCS node take while no job runs", sums, "cores",
                 goal=_GOAL_CORES, alternatives=parts)
    return [row, Row(id="overhead-max", name=f"… at most, in an interval of {_INTERVAL_S:g} s", value=max(sums),
                     unit="cores", goal=_GOAL_CORES, samples=len(sums))]
