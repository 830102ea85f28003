"""P1, first half: from the call of publish until all of N processes of the host hold the version, verified and mapped.

Pullers are processes that follow the head. Their host's node verifies every chunk, once for all of them, and each maps
what was verified; what it costs when each verifies for itself as well is a row of its own. The alternatives are told
through a pipe when the bytes are there, have nothing to verify, and end with the same named tensors in each process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from elastic_rl.bench.dcs.exchanges import EXCHANGES, Exchange, Holder
from elastic_rl.bench.dcs.testbed import STREAM, Cluster, Testbed, require_memory
from elastic_rl.bench.dcs.weights import Weights
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.timing import with_alternatives

COUNTS = (1, 2, 4, 8)
GOAL_FLAT = 1.15
_NODE = "n0"
_ANSWER_S = 300.0

Times = dict[int, list[float]]
"""Number of processes → seconds until the last of them held the tensors."""


@dataclass
class Measured:
    """Ours and the others', and why some of the others are not there."""

    ours: Times = field(default_factory=dict)
    again: Times = field(default_factory=dict)
    """Ours when each process verifies once more."""
    others: dict[str, Times] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


def measure(testbed: Testbed) -> list[Row]:
    found = Measured()
    weights = Weights(testbed.nbytes)
    with testbed.cluster() as cluster:
        found.ours, found.again = _ours(cluster, weights)
    for name, make in EXCHANGES.items():
        testbed.options.say(f"  {name}")
        try:
            with testbed.cluster() as cluster:
                require_memory(cluster.testbed.shm, 2 * weights.nbytes)
                found.others[name] = _other(testbed, weights, make(cluster, weights))
        except Exception as e:  # whatever it is: it must not cost the others
            found.why[name] = str(e)
    return rows(found)


def rows(found: Measured) -> list[Row]:
    """``P1``: how flat; ``P1-hold-N``: the seconds behind it. Pure."""
    most = max(found.ours)
    out = [with_alternatives(
        Row.of("P1", f"publish → {most} processes hold it, over 1 process", _flat(found.ours), "×", goal=GOAL_FLAT),
        {name: _flat(times) for name, times in found.others.items()})]
    for n, times in found.ours.items():
        row = Row.of(f"P1-hold-{n}", f"publish → {n} process{'es' if n > 1 else ''} hold it", times, "s")
        out.append(with_alternatives(row, {name: others[n] for name, others in found.others.items() if n in others}))
    out += [Row.of(f"P1-verify-{n}", f"… and each of {n} verified it once more", times, "s")
            for n, times in found.again.items()]
    return out + [Row.unmeasured(f"P1-hold-{name.replace(' ', '-')}", f"publish → processes hold it: {name}", why)
                  for name, why in found.why.items()]


def _flat(times: Times) -> list[float]:
    base = median(times[min(times)])
    return [t / base for t in times[max(times)]]


def _ours(cluster: Cluster, weights: Weights) -> tuple[Times, Times]:
    cluster.node(_NODE, 2 * weights.nbytes)
    publisher = cluster.publisher(_NODE)
    pullers = [cluster.worker("pull_worker") for _ in range(max(COUNTS))]
    for puller in pullers:
        puller.call("follow", endpoint=cluster.testbed.endpoint, job=cluster.keys.job, stream=STREAM, node=_NODE)
    last = 0

    def once(active: Sequence[Holder], verify: bool) -> float:
        nonlocal last
        for puller in active:
            puller.send("hold", after=last, verify=verify, names=len(weights.tensors), nbytes=weights.nbytes)
        start = time.monotonic()
        last = publisher.publish(weights.tensors, meta={}).number
        return max(float(puller.answer(_ANSWER_S)["at"]) for puller in active) - start

    def sampled(verify: bool) -> Times:
        return _sample(cluster.testbed, weights, pullers, lambda active: once(active, verify), after=cluster.sweep)

    return sampled(False), sampled(True)


def _other(testbed: Testbed, weights: Weights, exchange: Exchange) -> Times:
    def once(active: Sequence[Holder]) -> float:
        start = time.monotonic()
        reference = exchange.write(weights.tensors)
        for holder in active:
            holder.send("load", reference=reference, names=len(weights.tensors), nbytes=weights.nbytes)
        return max(float(holder.answer(_ANSWER_S)["at"]) for holder in active) - start

    return _sample(testbed, weights, exchange.holders(max(COUNTS)), once, after=exchange.forget)


def _sample(testbed: Testbed, weights: Weights, holders: Sequence[Holder], once: Callable[[Sequence[Holder]], float], *,
            after: Callable[[], object]) -> Times:
    """The counts take turns, so that what drifts on the machine reaches all of them."""
    times: Times = {n: [] for n in COUNTS}
    for round_ in range(testbed.samples + 1):
        for n in COUNTS:
            weights.renew()
            took = once(holders[:n])
            if round_:
                times[n].append(took)
            for holder in holders:
                holder.send("rest")
            for holder in holders:
                holder.answer(_ANSWER_S)
            after()
    return times
