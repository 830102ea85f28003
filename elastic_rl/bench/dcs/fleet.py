"""P2-fleet: a version spreads to many hosts whose links are the limit.

Every host's link is held to the same speed each way (``links``), slow enough that this machine's cores are idle most of
the time, as they would be with a host each. One pull alone sets the scale. A publisher's node that sent everything to
everyone would need as many times that as there are hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from elastic_rl.bench.dcs.rig import Cluster, Rig
from elastic_rl.bench.dcs.weights import Weights
from elastic_rl.bench.dcs.workers import Worker
from elastic_rl.dcs.puller import Puller
from elastic_rl.measure import Row
from elastic_rl.processes import free_port

HOSTS = 16
LINK_BYTES_PER_S = 64e6
GOAL_SINGLES, GOAL_SENT = 2.0, 2.2
_MOST_BYTES, _QUICK_BYTES = 256 << 20, 64 << 20
"""Every host's arena is in the memory of this one."""
_SOURCE = "source"


def measure(rig: Rig) -> list[Row]:
    weights = Weights(min(rig.nbytes, _QUICK_BYTES if rig.options.quick else _MOST_BYTES))
    with rig.cluster() as cluster:
        links, names = _start(cluster, weights.nbytes)
        return _measure(cluster, weights, links, names)


def rows(nbytes: int, singles: Sequence[float], fleets: Sequence[float], sent: Sequence[float]) -> list[Row]:
    """Pure. ``singles``, ``fleets``: seconds; ``sent``: bytes out of the publisher's node in each of ``fleets``."""
    single, ideal = median(singles), nbytes / LINK_BYTES_PER_S
    name = f"{HOSTS} hosts with links of {LINK_BYTES_PER_S / 1e6:.0f} MB/s pull {nbytes >> 20} MiB"
    return [Row.of("P2-fleet", f"{name}, in single pulls", [t / single for t in fleets], "×", goal=GOAL_SINGLES,
                   alternatives={"one after the other": float(HOSTS)}, limit=ideal / single),
            Row.of("P2-fleet-sent", "… and the publisher's node sends the version so often", [s / nbytes for s in sent],
                   "×", goal=GOAL_SENT, alternatives={"to each host": float(HOSTS)}, limit=1.0),
            Row.of("P2-fleet-s", f"… all {HOSTS} done", fleets, "s", limit=ideal),
            Row.of("P2-fleet-single-s", "… one alone", singles, "s", limit=ideal)]


def _start(cluster: Cluster, nbytes: int) -> tuple[Worker, list[str]]:
    links = cluster.worker("links", str(LINK_BYTES_PER_S))
    names = [f"host-{i:02}" for i in range(HOSTS)]
    for name in [_SOURCE, *names]:
        port = free_port()
        link = int(links.call("add", node=name, port=port)["port"])
        # The bytes all differ from those before: a delta would only cost.
        cluster.start(name, 2 * nbytes + nbytes // 4, port=port, delta="false",
                      module="elastic_rl.bench.dcs.linked_node", args=("--link-port", str(link)))
    cluster.await_nodes()
    return links, names


def _measure(cluster: Cluster, weights: Weights, links: Worker, names: Sequence[str]) -> list[Row]:
    publisher = cluster.publisher(_SOURCE)
    pullers = [cluster.puller(name) for name in names]
    singles: list[float] = []
    fleets: list[float] = []
    sent: list[float] = []
    with ThreadPoolExecutor(HOSTS) as pool:
        for _ in range(max(cluster.rig.samples - 2, 1)):
            for group, times in ((pullers[:1], singles), (pullers, fleets)):
                weights.renew()
                version = publisher.publish(weights.tensors, meta={}).number
                before = int(links.call("counts")[_SOURCE]["out"])
                times.append(_all(pool.map, group, version))
                if group is pullers:
                    sent.append(float(int(links.call("counts")[_SOURCE]["out"]) - before))
                cluster.sweep()
    return rows(weights.nbytes, singles, fleets, sent)


def _all(run: Callable[..., object], pullers: Sequence[Puller], version: int) -> float:
    """Seconds until every one of them has the version."""
    def pull(puller: Puller) -> None:
        puller.pull("policy", version).close()

    start = time.monotonic()
    list(run(pull, pullers))  # type: ignore[call-overload]
    return time.monotonic() - start
