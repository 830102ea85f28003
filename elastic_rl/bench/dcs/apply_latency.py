"""P1-apply-*, P4-* and memory-engine: new weights in real engines, by the checkpoint service, and by alternatives where
some are given.

P1-apply: from a trainer that has the tensors to N engines that have applied them.
P4: how long an engine is paused for it, against the model's bare ``load_weights`` from memory that is mapped already;
and the longest time between two tokens of a stream meanwhile.
memory-engine: what applying adds to the memory of an engine's processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from elastic_rl.bench.dcs import loaders
from elastic_rl.bench.dcs.dcs_update import DcsUpdate, Update
from elastic_rl.bench.dcs.engines import BenchEngine, Model, configure, everywhere, start
from elastic_rl.bench.dcs.memory import Peak
from elastic_rl.bench.dcs.testbed import Cluster, Testbed
from elastic_rl.bench.dcs.token_gaps import Listener, longest
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.bench.suite import why_of
from elastic_rl.bench.timing import speedup, with_alternatives
from elastic_rl.engine.server.sglang_server import pack

COUNTS = (1, 2)
GOAL_FASTER, GOAL_PAUSE = 2.0, 1.2
_MOST_BYTES = 256 << 20
_ENGINE_BYTES = 1500 << 20
"""Memory of an engine beside the weights."""


@dataclass(frozen=True)
class Alternatives:
    """Other ways to bring weights into engines."""

    ways: Callable[[Cluster, Sequence[BenchEngine], int], Mapping[str, Callable[[], AbstractContextManager[Update]]]]
    """Gives them by name, for these engines and a model of so many bytes; the memory of the first is measured, too."""
    loaders: Sequence[str]
    """Weight loaders of them that engines must know, as ``package.module.function``."""
    unmeasured: Mapping[str, str]
    """Name → why it is not among the ways."""


NONE = Alternatives(ways=lambda cluster, engines, nbytes: {}, loaders=(), unmeasured={})


@dataclass
class Measured:
    """Seconds by number of engines, of the checkpoint service and of the alternatives; pauses and bare loads of one
    engine; times between tokens; growth of memory, bytes."""

    ours: dict[int, list[float]] = field(default_factory=dict)
    others: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Longest time between two tokens during an update."""
    usual_gaps: list[float] = field(default_factory=list)
    """Median time between two tokens."""
    grown: dict[str, list[float]] = field(default_factory=dict)
    """Way → bytes by which the memory of an engine grew; the checkpoint service has an empty name."""


def measure(testbed: Testbed, alternatives: Alternatives = NONE) -> Iterator[Row]:
    found = Measured()
    cfg = configure(testbed.folder, min(testbed.nbytes, _MOST_BYTES))
    model = Model(testbed.folder, cfg)
    with testbed.cluster() as cluster:
        engines = start(cluster, model, cfg, _affordable(model.nbytes), alternatives.loaders)
        ours = DcsUpdate(cluster, engines[:1], model.nbytes)
        _memory(found, cluster, ours, engines, model, alternatives)
        yield memory_row(found, model.nbytes)
        for n in COUNTS:
            if n > len(engines):
                rows = missing_rows(n, "this machine's memory holds fewer engines")
                yield from rows if alternatives is not NONE else rows[-1:]
                continue
            for _ in _count(found, cluster, engines[:n], model, testbed.samples, alternatives):
                yield from count_rows(found, n, model.nbytes)
        _bare(found, ours, engines[0], testbed)
        yield from pause_rows(found)
        _gaps(found, ours, engines[0], model, testbed)
        yield gap_row(found)


def count_rows(found: Measured, n: int, nbytes: int) -> Iterator[Row]:
    """Pure."""
    name = f"publish → {_engines(n)} applied {nbytes >> 20} MiB"
    ours, others = found.ours[n], found.others.get(n, {})
    if others:
        faster, by = speedup(ours, others)
        yield Row.of(f"P1-apply-{n}", f"{name}: faster than the best alternative", faster, "×", op=">=",
                     goal=GOAL_FASTER, alternatives=by, unmeasured_alternatives=found.why)
    elif found.why:
        yield Row.unmeasured(f"P1-apply-{n}", name, "no alternative could be measured",
                             unmeasured_alternatives=found.why)
    yield with_alternatives(Row.of(f"P1-apply-{n}-s", name, ours, "s"), others)


def missing_rows(n: int, why: str) -> list[Row]:
    return [Row.unmeasured(f"P1-apply-{n}{end}", f"publish → {_engines(n)} applied", why) for end in ("", "-s")]


def pause_rows(found: Measured) -> list[Row]:
    """Pure."""
    bare = median(found.bare)
    return [Row.of("P4", "engine pause over its bare load_weights", [p / bare for p in found.pauses], "×",
                   goal=GOAL_PAUSE),
            Row.of("P4-pause-s", "engine pause", found.pauses, "s", alternatives={"bare load_weights": bare})]


def gap_row(found: Measured) -> Row:
    """Pure."""
    usual = median(found.usual_gaps)
    return Row.of("P4-token-gap-s", "longest time between two tokens of a stream while weights change", found.gaps, "s",
                  limit=usual, alternatives={"between two tokens otherwise": usual})


def memory_row(found: Measured, nbytes: int) -> Row:
    """Pure."""
    grown = {name: median(values) / 2**20 for name, values in found.grown.items()}
    return Row.of("memory-engine", f"engine: memory that applying {nbytes >> 20} MiB adds", [grown.pop("")], "MiB",
                  alternatives=grown)


def _engines(n: int) -> str:
    return f"{n} engine{'s' if n > 1 else ''}"


def _affordable(nbytes: int) -> int:
    """How many engines the free memory holds, with their staging and the versions in memory."""
    free = psutil.virtual_memory().available - 6 * nbytes
    count = min(free // (_ENGINE_BYTES + 3 * nbytes), max(COUNTS))
    if count < 1:
        raise Unmeasurable(f"{free >> 20} MiB of free memory hold no engine")
    return int(count)


def _count(found: Measured, cluster: Cluster, engines: Sequence[BenchEngine], model: Model, samples: int,
           alternatives: Alternatives) -> Iterator[None]:
    """Measures all ways at one number of engines, and yields after each. An alternative counts only when it leaves the
    same weights in the engines as the checkpoint service."""
    n = len(engines)
    ours = DcsUpdate(cluster, engines, model.nbytes)
    for engine in engines:
        engine.pauses.clear()
    found.ours[n] = _times(ours.update, model, samples, after=ours.settle)
    if n == 1:
        found.pauses = engines[0].pauses[1:]
    yield
    others = found.others.setdefault(n, {})
    for name, make in alternatives.ways(cluster, engines, model.nbytes).items():
        cluster.testbed.options.say(f"  {_engines(n)}: {name}")
        try:
            with make() as update:
                times = _times(update, model, samples)
            _require_same(name, ours, engines, model)
            others[name] = times
        except Exception as e:  # whatever it is: it must not cost the other alternatives
            found.why[name] = why_of(e)
        yield
    found.why.update(alternatives.unmeasured)
    yield


def _times(update: Update, model: Model, samples: int, *, after: Callable[[], object] = lambda: None
           ) -> list[float]:
    out = []
    for i in range(samples + 1):
        model.renew()
        start_at = time.monotonic()
        update(model.tensors)
        if i:
            out.append(time.monotonic() - start_at)
        after()
    return out


def _require_same(name: str, ours: DcsUpdate, engines: Sequence[BenchEngine], model: Model) -> None:
    """What an alternative left in the engines is what the checkpoint service brings."""
    left = everywhere(engines, lambda e: e.checksums())
    ours.update(model.tensors)
    ours.settle()
    if left != everywhere(engines, lambda e: e.checksums()):
        raise Unmeasurable(f"{name} left other weights in the engines than the checkpoint service does")


def _memory(found: Measured, cluster: Cluster, ours: DcsUpdate, engines: Sequence[BenchEngine],
            model: Model, alternatives: Alternatives) -> None:
    """Measures the first updates after the start, since what is kept for the next ones counts too. The alternative is
    measured on another engine."""
    with Peak(engines[0].pids) as peak:
        for _ in range(2):
            model.renew()
            ours.update(model.tensors)
            ours.settle()
    found.grown[""] = [float(peak.grown)]
    if len(engines) > 1 and (ways := alternatives.ways(cluster, engines[1:2], model.nbytes)):
        name, make = next(iter(ways.items()))
        with make() as update, Peak(engines[1].pids) as peak:
            for _ in range(2):
                model.renew()
                update(model.tensors)
        found.grown[name] = [float(peak.grown)]


def _bare(found: Measured, ours: DcsUpdate, engine: BenchEngine, testbed: Testbed) -> None:
    times = testbed.folder / "bare"
    with ours.reference() as reference:
        request = {"reference": reference, "times": str(times)}
        for _ in range(testbed.samples + 1):
            engine.session(lambda: engine.post("/update_weights_from_tensor", load_format=loaders.BARE,
                                               serialized_named_tensors=[pack(request)]))
    found.bare = [float(line) for line in Path(times).read_text(encoding="utf-8").split()][1:]


def _gaps(found: Measured, ours: DcsUpdate, engine: BenchEngine, model: Model, testbed: Testbed) -> None:
    for i in range(testbed.samples + 1):
        model.renew()
        with Listener(engine.url) as listener:
            begin = time.monotonic()
            ours.update(model.tensors)
            end = time.monotonic()
            listener.wait_for_more()
        ours.settle()
        if i:
            found.gaps.append(longest(listener.at, begin, end))
            found.usual_gaps.append(median(b - a for a, b in zip(listener.at, listener.at[1:], strict=False)))
