"""P1, P1-pull-*, P1-verify-*: from the call of publish until all of N processes of the host can use the version.

Readers are processes that follow the head and do what an engine does: have the host's node pull and verify the version,
which it does once for all of them, map it, and confirm that it stayed in place. ``P1-verify``: each reader verifies
every byte itself as well, as a restored trainer and an export do. Other exchanges may be measured beside: their readers
learn through a pipe that the bytes are there, verify nothing, and end with the same named tensors in each process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any, Protocol

import torch

from elastic_rl.bench.dcs.testbed import STREAM, Cluster, Testbed, require_memory
from elastic_rl.bench.dcs.weights import Weights
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.suite import why_of
from elastic_rl.bench.timing import with_alternatives

COUNTS = (1, 2, 4, 8)
GOAL_FLAT = 1.15
_NODE = "n0"
_ANSWER_S = 300.0

Times = dict[int, list[float]]
"""Number of processes → seconds until the last of them had the tensors."""
Named = Iterable[tuple[str, torch.Tensor]]


class Reader(Protocol):
    """A process that reads tensors; ``workers.Worker`` is one."""

    def send(self, op: str, **fields: Any) -> None: ...

    def answer(self, timeout_s: float) -> dict[str, Any]: ...


class Exchange(Protocol):
    """Where another publisher leaves the tensors."""

    def readers(self, count: int) -> list[Reader]:
        """Processes that take ``load``, with the reference that ``write`` returned, and ``release``."""

    def write(self, tensors: Named) -> dict[str, Any]:
        """Makes the tensors available; what a reader needs to find them."""

    def delete(self) -> None:
        """Deletes what was written last; no reader uses it any more."""


@dataclass
class Measured:
    """Times of the checkpoint service and of the alternatives, and why some alternatives have none."""

    pulls: Times = field(default_factory=dict)
    verified: Times = field(default_factory=dict)
    """Times of pulls in which each process verifies as well."""
    others: dict[str, Times] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


def measure(testbed: Testbed, exchanges: Mapping[str, Callable[[Cluster, Weights], Exchange]] = MappingProxyType({})
            ) -> Iterator[Row]:
    """``exchanges``: the alternatives, by name."""
    found = Measured()
    weights = Weights(testbed.nbytes)
    with testbed.cluster() as cluster:
        pull = _dcs(cluster, weights)
        found.pulls = pull(False)
        yield from rows(found)
        if testbed.options.selects("P1-verify", *(f"P1-verify-{n}" for n in COUNTS)):
            found.verified = pull(True)
            yield from verify_rows(found)
    for name, make in exchanges.items():
        testbed.options.say(f"  {name}")
        try:
            with testbed.cluster() as cluster:
                require_memory(testbed.shm, 2 * weights.nbytes)
                found.others[name] = _other(testbed, weights, make(cluster, weights))
        except Exception as e:  # whatever it is: it must not cost the other alternatives
            found.why[name] = why_of(e)
        yield from rows(found)


def rows(found: Measured) -> list[Row]:
    """``P1``: how much longer most processes take than one; ``P1-pull-N``: the seconds behind it. Pure."""
    most = max(found.pulls)
    out = [with_alternatives(
        Row.of("P1", f"publish → {most} processes have it, over 1 process", _growth(found.pulls), "×", goal=GOAL_FLAT),
        {name: _growth(times) for name, times in found.others.items()})]
    for n, times in found.pulls.items():
        row = Row.of(f"P1-pull-{n}", f"publish → {_processes(n)} it", times, "s")
        out.append(with_alternatives(row, {name: others[n] for name, others in found.others.items() if n in others}))
    return [row.model_copy(update={"unmeasured_alternatives": found.why}) for row in out]


def verify_rows(found: Measured) -> list[Row]:
    """Rows of readers that each verify. Pure."""
    return [Row.of("P1-verify", "… that each verify every byte, over 1 process", _growth(found.verified), "×"),
            *(Row.of(f"P1-verify-{n}", f"publish → {_processes(n)} it, each verified it", times, "s")
              for n, times in found.verified.items())]


def _processes(n: int) -> str:
    return f"{n} processes have" if n > 1 else "1 process has"


def _growth(times: Times) -> list[float]:
    base = median(times[min(times)])
    return [t / base for t in times[max(times)]]


def _dcs(cluster: Cluster, weights: Weights) -> Callable[[bool], Times]:
    """Starts a node and readers; the result takes the samples."""
    cluster.node(_NODE, 2 * weights.nbytes)
    publisher = cluster.publisher(_NODE)
    readers = [cluster.worker("elastic_rl.bench.dcs.reader") for _ in range(max(COUNTS))]
    for reader in readers:
        reader.call("follow", endpoint=cluster.testbed.endpoint, job=cluster.keys.job, stream=STREAM, node=_NODE)
    last = 0

    def once(active: Sequence[Reader], verify: bool) -> float:
        nonlocal last
        for reader in active:
            reader.send("pull", after=last, verify=verify, names=len(weights.tensors), nbytes=weights.nbytes)
        start = time.monotonic()
        last = publisher.publish(weights.tensors, meta={}).number
        return max(float(reader.answer(_ANSWER_S)["at"]) for reader in active) - start

    return lambda verify: _sample(cluster.testbed, weights, readers, lambda active: once(active, verify),
                                  after=cluster.settle)


def _other(testbed: Testbed, weights: Weights, exchange: Exchange) -> Times:
    def once(active: Sequence[Reader]) -> float:
        start = time.monotonic()
        reference = exchange.write(weights.tensors)
        for reader in active:
            reader.send("load", reference=reference, names=len(weights.tensors), nbytes=weights.nbytes)
        return max(float(reader.answer(_ANSWER_S)["at"]) for reader in active) - start

    return _sample(testbed, weights, exchange.readers(max(COUNTS)), once, after=exchange.delete)


def _sample(testbed: Testbed, weights: Weights, readers: Sequence[Reader], once: Callable[[Sequence[Reader]], float], *,
            after: Callable[[], object]) -> Times:
    """The counts alternate, so that drift of the machine affects all of them."""
    times: Times = {n: [] for n in COUNTS}
    for round_ in range(testbed.samples + 1):
        for n in COUNTS:
            weights.renew()
            took = once(readers[:n])
            if round_:
                times[n].append(took)
            for reader in readers:
                reader.send("release")
            for reader in readers:
                reader.answer(_ANSWER_S)
            after()
    return times
