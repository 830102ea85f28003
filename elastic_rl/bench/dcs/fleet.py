"""P2-fleet: a version spreads to many hosts whose links are the limit.

Every host's link is held to the same speed each way (``links``). One pull alone sets the scale. A publisher's node that
sent everything to everyone would need as many times that as there are hosts. A few cores cannot fill sixteen links of
``LINK_BYTES_PER_S``, each with two processes and four copies on its way, as a host each would; so the same is measured
with links that they can fill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from elastic_rl.bench.dcs.testbed import Cluster, Testbed
from elastic_rl.bench.dcs.weights import Weights
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.workers import Worker
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.runtime import free_port

HOSTS = 16
LINK_BYTES_PER_S, SLOW_LINK_BYTES_PER_S = 64e6, 16e6
GOAL_SINGLES, GOAL_SENT = 2.0, 2.2
_MOST_BYTES, _QUICK_BYTES = 256 << 20, 64 << 20
"""Every host's arena is in the memory of this one. Half of it over the slow links."""
_SOURCE = "source"


def measure(testbed: Testbed) -> list[Row]:
    nbytes = min(testbed.nbytes, _QUICK_BYTES if testbed.options.quick else _MOST_BYTES)
    return [*_fleet(testbed, "P2-fleet", nbytes, LINK_BYTES_PER_S),
            *_fleet(testbed, "P2-fleet-slow", nbytes // 2, SLOW_LINK_BYTES_PER_S)]


def _fleet(testbed: Testbed, row: str, nbytes: int, bytes_per_s: float) -> list[Row]:
    weights = Weights(nbytes)
    with testbed.cluster() as cluster:
        links, names = _start(cluster, weights.nbytes, bytes_per_s)
        return rows(row, weights.nbytes, bytes_per_s, *_measure(cluster, weights, links, names))


def rows(row: str, nbytes: int, bytes_per_s: float, singles: Sequence[float], fleets: Sequence[float],
         sent: Sequence[float]) -> list[Row]:
    """Pure. ``singles``, ``fleets``: seconds; ``sent``: bytes out of the publisher's node in each of ``fleets``."""
    single, ideal = median(singles), nbytes / bytes_per_s
    name = f"{HOSTS} hosts with links of {bytes_per_s / 1e6:.0f} MB/s pull {nbytes >> 20} MiB"
    return [Row.of(row, f"{name}, in single pulls", [t / single for t in fleets], "×", goal=GOAL_SINGLES,
                   alternatives={"one after the other": float(HOSTS)}, limit=ideal / single),
            Row.of(f"{row}-sent", "… and the publisher's node sends the version so often", [s / nbytes for s in sent],
                   "×", goal=GOAL_SENT, alternatives={"to each host": float(HOSTS)}, limit=1.0),
            Row.of(f"{row}-s", f"… all {HOSTS} done", fleets, "s", limit=ideal),
            Row.of(f"{row}-single-s", "… one alone", singles, "s", limit=ideal)]


def _start(cluster: Cluster, nbytes: int, bytes_per_s: float) -> tuple[Worker, list[str]]:
    links = cluster.worker("links", str(bytes_per_s))
    names = [f"host-{i:02}" for i in range(HOSTS)]
    for name in [_SOURCE, *names]:
        port = free_port()
        link = int(links.call("add", node=name, port=port)["port"])
        # The bytes all differ from those before: a delta would only cost.
        cluster.start(name, 2 * nbytes + nbytes // 4, port=port, advertise_port=link, delta="false")
    cluster.await_nodes()
    return links, names


def _measure(cluster: Cluster, weights: Weights, links: Worker, names: Sequence[str]
             ) -> tuple[list[float], list[float], list[float]]:
    """Seconds of one pull, of all, and bytes out of the publisher's node, time by time."""
    publisher = cluster.publisher(_SOURCE)
    pullers = [cluster.puller(name) for name in names]
    singles: list[float] = []
    fleets: list[float] = []
    sent: list[float] = []
    with ThreadPoolExecutor(HOSTS) as pool:
        for _ in range(max(cluster.testbed.samples - 2, 1)):
            for group, times in ((pullers[:1], singles), (pullers, fleets)):
                weights.renew()
                version = publisher.publish(weights.tensors, meta={}).number
                before = int(links.call("counts")[_SOURCE]["out"])
                times.append(_all(pool.map, group, version))
                if group is pullers:
                    sent.append(float(int(links.call("counts")[_SOURCE]["out"]) - before))
                cluster.sweep()
    return singles, fleets, sent


def _all(run: Callable[..., object], pullers: Sequence[Puller], version: int) -> float:
    """Seconds until every one of them has the version."""
    def pull(puller: Puller) -> None:
        puller.pull("policy", version).close()

    start = time.monotonic()
    list(run(pull, pullers))  # type: ignore[call-overload]
    return time.monotonic() - start
