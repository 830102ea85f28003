"""P2-link: a node pulls a version from another one over TCP, against raw TCP of the same link for the same bytes."""

from __future__ import annotations

import time
from statistics import median

from elastic_rl.bench.dcs.limits import tcp_gbps
from elastic_rl.bench.dcs.testbed import Cluster, Testbed
from elastic_rl.bench.dcs.weights import Weights
from elastic_rl.bench.measurement import Row

GOAL = 0.85
_WARM = 3
"""Pulls that do not count: the first ones touch the arena's pages for the first time, as the raw link's buffer was."""


def measure(testbed: Testbed) -> list[Row]:
    weights = Weights(testbed.nbytes)
    with testbed.cluster() as cluster:
        times = _pulls(cluster, weights)
    return rows(weights.nbytes, times, tcp_gbps(testbed, weights.nbytes))


def rows(nbytes: int, times: list[float], raw_gbps: list[float]) -> list[Row]:
    """Pure. ``raw_gbps``: samples of the raw link."""
    raw = median(raw_gbps)
    speeds = [nbytes / t / 1e9 for t in times]
    return [Row.of("P2-link", "pull over TCP, of the raw link's speed", [s / raw for s in speeds], "×", goal=GOAL,
                   op=">=", limit=1.0),
            Row.of("P2-link-gbps", "pull over TCP", speeds, "GB/s", op=">=", limit=raw,
                   alternatives={"raw TCP": raw})]


def _pulls(cluster: Cluster, weights: Weights) -> list[float]:
    """Seconds of each whole pull: pin, manifest, chunks, verification. Every element differs from the version before,
    so no chunk is there already and a delta saves nothing."""
    for node in ("source", "target"):
        cluster.start(node, 2 * weights.nbytes)
    cluster.await_nodes()
    publisher, puller = cluster.publisher("source"), cluster.puller("target")
    times = []
    for i in range(cluster.testbed.samples + _WARM):
        weights.renew()
        version = publisher.publish(weights.tensors, meta={})
        start = time.monotonic()
        with puller.pull(version.stream, version.number):
            took = time.monotonic() - start
        if i >= _WARM:
            times.append(took)
        cluster.settle()
    return times
