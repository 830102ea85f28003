"""P2-fleet: a version spreads to many hosts whose links are the limit.

Every host's link is held to the same speed each way (``links``). One pull alone sets the scale. The alternatives are
measured over the same links (``plain_transfer``). A few cores cannot fill sixteen links of ``LINK_BYTES_PER_S``, each
with two processes and four copies on its way, as a host each would; so the same is measured with slower links.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median

from elastic_rl.bench.dcs.testbed import STREAM, Cluster, Testbed
from elastic_rl.bench.dcs.weights import Weights
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.suite import why_of
from elastic_rl.bench.workers import Worker
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.net.addresses import free_port

HOSTS = 16
LINKS_BYTES_PER_S = {"P2-fleet": 64e6, "P2-fleet-slow": 16e6}
GOAL_SINGLES, GOAL_SENT = 2.0, 2.2
ALTERNATIVES = {"each": "plain TCP, the source sends to each host", "chain": "plain TCP, a chain of hosts"}
_MOST_BYTES, _QUICK_BYTES = 256 << 20, 64 << 20
"""Every host's arena is in the memory of this one. Half of it over the slow links."""
_SOURCE = "source"
_TRANSFER_S = 900.0


@dataclass
class Measured:
    """Measurements at one speed of the links: seconds of a pull alone, seconds of all hosts and bytes out of the source
    for the checkpoint service (the name is empty) and for each alternative."""

    nbytes: int
    bytes_per_s: float
    singles: list[float] = field(default_factory=list)
    fleets: dict[str, list[float]] = field(default_factory=dict)
    sent: dict[str, list[float]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


def measure(testbed: Testbed) -> Iterator[Row]:
    nbytes = min(testbed.nbytes, _QUICK_BYTES if testbed.options.quick else _MOST_BYTES)
    for row, bytes_per_s in LINKS_BYTES_PER_S.items():
        if not testbed.options.selects(row, f"{row}-sent", f"{row}-s", f"{row}-single-s"):
            continue
        weights = Weights(nbytes // 2 if row.endswith("slow") else nbytes)
        found = Measured(weights.nbytes, bytes_per_s)
        with testbed.cluster() as cluster:
            links, names = _start(cluster, found)
            _pulls(cluster, weights, links, names, found)
        yield from rows(row, found)
        for kind, name in ALTERNATIVES.items():
            testbed.options.say(f"  {name}")
            try:
                with testbed.cluster() as cluster:
                    _plain(cluster, kind, found)
            except Exception as e:  # whatever it is: it must not cost the other alternatives
                found.why[name] = why_of(e)
            yield from rows(row, found)


def rows(row: str, found: Measured) -> list[Row]:
    """Pure."""
    single, ideal, nbytes = median(found.singles), found.nbytes / found.bytes_per_s, found.nbytes
    name = f"{HOSTS} hosts with links of {found.bytes_per_s / 1e6:.0f} MB/s pull {nbytes >> 20} MiB"
    times = {other: median(t) for other, t in found.fleets.items() if other}
    sent = {other: median(s) / nbytes for other, s in found.sent.items() if other}
    out = [Row.of(row, f"{name}, in single pulls", [t / single for t in found.fleets[""]], "×", goal=GOAL_SINGLES,
                  alternatives={other: t / single for other, t in times.items()}, limit=ideal / single),
           Row.of(f"{row}-sent", "… copies that leave the publisher's node", [s / nbytes for s in found.sent[""]], "×",
                  goal=GOAL_SENT, alternatives=sent, limit=1.0),
           Row.of(f"{row}-s", f"… until all {HOSTS} have it", found.fleets[""], "s", alternatives=times, limit=ideal),
           Row.of(f"{row}-single-s", "… until one host alone has it", found.singles, "s", limit=ideal)]
    return [r.model_copy(update={"unmeasured_alternatives": found.why}) for r in out[:3]] + out[3:]


def _start(cluster: Cluster, found: Measured) -> tuple[Worker, list[str]]:
    links = cluster.worker("elastic_rl.bench.dcs.links", str(found.bytes_per_s))
    names = [f"host-{i:02}" for i in range(HOSTS)]
    for name in [_SOURCE, *names]:
        port = free_port()
        link = int(links.call("add", node=name, port=port)["port"])
        # One disk for all hosts is slower than a disk for each.
        cluster.start(name, 2 * found.nbytes + found.nbytes // 4, port=port, advertise_port=link, disk_bytes=0)
    cluster.await_nodes()
    return links, names


def _pulls(cluster: Cluster, weights: Weights, links: Worker, names: Sequence[str], found: Measured) -> None:
    publisher = cluster.publisher(_SOURCE)
    pullers = [cluster.puller(name) for name in names]
    fleets, sent = found.fleets.setdefault("", []), found.sent.setdefault("", [])
    with ThreadPoolExecutor(HOSTS) as pool:
        for round_ in range(cluster.testbed.samples - 1):
            for group in (pullers[:1], pullers):
                weights.renew()
                version = publisher.publish(weights.tensors, meta={}).number
                before, seconds = _sent(links), _all(pool.map, group, version)
                if round_ and group is pullers:
                    fleets.append(seconds)
                    sent.append(_sent(links) - before)
                elif round_:
                    found.singles.append(seconds)
                cluster.settle()


def _plain(cluster: Cluster, kind: str, found: Measured) -> None:
    """One transfer to all hosts; it takes as long each time, since the links are the limit."""
    links = cluster.worker("elastic_rl.bench.dcs.links", str(found.bytes_per_s))
    hosts = cluster.worker("elastic_rl.bench.dcs.plain_transfer", str(found.nbytes))
    names = [_SOURCE, *(f"host-{i:02}" for i in range(HOSTS))]
    ports = hosts.call("listen", names=names)["ports"]
    hosts.call("connect", links=[int(links.call("add", node=name, port=port)["port"])
                                 for name, port in zip(names, ports, strict=True)])
    before = _sent(links)
    found.fleets[ALTERNATIVES[kind]] = [float(hosts.call(kind, timeout_s=_TRANSFER_S)["seconds"])]
    found.sent[ALTERNATIVES[kind]] = [_sent(links) - before]


def _sent(links: Worker) -> float:
    """Bytes out of the source so far."""
    return float(links.call("counts")[_SOURCE]["out"])


def _all(run: Callable[..., object], pullers: Sequence[Puller], version: int) -> float:
    """Seconds until every one of them has the version."""
    def pull(puller: Puller) -> None:
        puller.pull(STREAM, version).close()

    start = time.monotonic()
    list(run(pull, pullers))  # type: ignore[call-overload]
    return time.monotonic() - start
