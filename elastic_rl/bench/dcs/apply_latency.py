"""P1, second half, P4 and memory-engine: new weights in real engines, by the checkpoint service and by the others.

P1-apply: from a trainer that has the tensors to N engines that have applied them, against the best alternative.
P4: how long an engine is paused for it, against the model's bare ``load_weights`` from memory that is mapped already;
and how long a stream of tokens falls silent.
memory-engine: what applying adds to the memory of an engine's processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from elastic_rl.bench.dcs import loaders, updates
from elastic_rl.bench.dcs.engines import BenchEngine, Model, configure, everywhere, start
from elastic_rl.bench.dcs.inter_token_latency import Listener, longest
from elastic_rl.bench.dcs.memory import Peak
from elastic_rl.bench.dcs.testbed import Cluster, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.bench.suite import why_of
from elastic_rl.bench.timing import speedup, with_alternatives
from elastic_rl.engine.server import pack

COUNTS = (1, 2)
GOAL_FASTER, GOAL_PAUSE = 2.0, 1.2
_MOST_BYTES = 256 << 20
_ENGINE_BYTES = 1500 << 20
"""Memory of an engine beside the weights."""


@dataclass
class Measured:
    """Seconds by number of engines; pauses and bare loads of one engine; memory grown, bytes."""

    ours: dict[int, list[float]] = field(default_factory=dict)
    others: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)
    silent: list[float] = field(default_factory=list)
    """Seconds without a token during an update; and, ``spoken``, between two tokens otherwise."""
    spoken: list[float] = field(default_factory=list)
    grown: dict[str, list[float]] = field(default_factory=dict)


def measure(testbed: Testbed) -> list[Row]:
    found = Measured()
    cfg = configure(testbed.folder, min(testbed.nbytes, _MOST_BYTES))
    model = Model(testbed.folder, cfg)
    with testbed.cluster() as cluster:
        engines = start(cluster, model, cfg, _affordable(model.nbytes))
        dcs_update = updates.DcsUpdate(cluster, engines[:1], model.nbytes)
        _memory(found, cluster, dcs_update, engines, model)
        for n in range(1, len(engines) + 1):
            _count(found, cluster, engines[:n], model, testbed.samples)
        _bare(found, dcs_update, engines[0], testbed)
        _silence(found, dcs_update, engines[0], model, testbed)
    return rows(found, model.nbytes)


def rows(found: Measured, nbytes: int) -> list[Row]:
    """Pure."""
    out = []
    size = f"{nbytes >> 20} MiB"
    for n in COUNTS:
        name = f"publish → {n} engine{'s' if n > 1 else ''} applied {size}"
        if n not in found.ours:
            out.append(Row.unmeasured(f"P1-apply-{n}", name, "this machine's memory holds fewer engines"))
            continue
        ours, others = found.ours[n], found.others.get(n, {})
        if others:
            faster, by = speedup(ours, others)
            out.append(Row.of(f"P1-apply-{n}", f"{name}: faster than the best alternative", faster, "×", op=">=",
                              goal=GOAL_FASTER, alternatives=by))
        else:
            out.append(Row.unmeasured(f"P1-apply-{n}", name, "no alternative could be measured"))
        out.append(with_alternatives(Row.of(f"P1-apply-{n}-s", name, ours, "s"), others))
    out += [Row.unmeasured(f"P1-apply-{name.replace(',', '').replace(' ', '-')}", f"publish → applied: {name}", why)
            for name, why in found.why.items()]
    bare = median(found.bare)
    grown = {name: median(values) / 2**20 for name, values in found.grown.items()}
    ours_mib = grown.pop("", 0.0)
    return [*out,
            Row.of("P4", "engine pause over its bare load_weights", [p / bare for p in found.pauses], "×",
                   goal=GOAL_PAUSE, limit=1.0),
            Row.of("P4-pause-s", "engine pause", found.pauses, "s", limit=bare),
            Row.of("P4-silence-s", "longest time without a token of a stream while weights change", found.silent, "s",
                   limit=bare + (median(found.spoken) if found.spoken else 0.0),
                   alternatives={"between two tokens otherwise": median(found.spoken)} if found.spoken else {}),
            Row.of("memory-engine", f"engine: memory that applying {size} adds", [ours_mib], "MiB", alternatives=grown)]


def _affordable(nbytes: int) -> int:
    """How many engines the free memory holds, with their staging and the versions in memory."""
    free = psutil.virtual_memory().available - 6 * nbytes
    count = min(free // (_ENGINE_BYTES + 3 * nbytes), max(COUNTS))
    if count < 1:
        raise Unmeasurable(f"{free >> 20} MiB of free memory hold no engine")
    return int(count)


def _count(found: Measured, cluster: Cluster, engines: Sequence[BenchEngine], model: Model, samples: int) -> None:
    """All ways at one number of engines; each ends with the same weights in the engines as ours, or does not count."""
    n = len(engines)
    dcs_update = updates.DcsUpdate(cluster, engines, model.nbytes)
    for engine in engines:
        engine.pauses.clear()
    found.ours[n] = _times(dcs_update.update, model, samples, after=dcs_update.forget)
    if n == 1:
        found.pauses = engines[0].pauses[1:]
    others = found.others.setdefault(n, {})
    for name, make in updates.alternatives(cluster, engines, model.nbytes).items():
        cluster.testbed.options.say(f"  {n} engines: {name}")
        try:
            with make() as update:
                times = _times(update, model, samples)
            _require_same(name, dcs_update, engines, model)
            others[name] = times
        except Exception as e:  # whatever it is: it must not cost the others
            found.why[name] = why_of(e)
    found.why.setdefault("checkpoint-engine", updates.checkpoint_engine())


def _times(update: updates.Update, model: Model, samples: int, *, after: Callable[[], object] = lambda: None
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


def _require_same(name: str, dcs_update: updates.DcsUpdate, engines: Sequence[BenchEngine], model: Model) -> None:
    """What an alternative left in the engines is what the checkpoint service brings."""
    left = everywhere(engines, lambda e: e.checksums())
    dcs_update.update(model.tensors)
    dcs_update.forget()
    if left != everywhere(engines, lambda e: e.checksums()):
        raise Unmeasurable(f"{name} left other weights in the engines than the checkpoint service does")


def _memory(found: Measured, cluster: Cluster, dcs_update: updates.DcsUpdate, engines: Sequence[BenchEngine],
            model: Model) -> None:
    """Of the first updates after the start: what is kept for the next ones counts too. Another way is measured on an
    engine of its own."""
    with Peak(engines[0].pids) as peak:
        for _ in range(2):
            model.renew()
            dcs_update.update(model.tensors)
            dcs_update.forget()
    found.grown[""] = [float(peak.grown)]
    if len(engines) > 1:
        with updates.from_disk(cluster, engines[1:2], in_memory=True) as update, Peak(engines[1].pids) as peak:
            for _ in range(2):
                model.renew()
                update(model.tensors)
        found.grown["SGLang from_disk, tmpfs"] = [float(peak.grown)]


def _bare(found: Measured, dcs_update: updates.DcsUpdate, engine: BenchEngine, testbed: Testbed) -> None:
    times = testbed.folder / "bare"
    with dcs_update.reference() as reference:
        request = {"reference": reference, "times": str(times)}
        for _ in range(testbed.samples + 1):
            engine.session(lambda: engine.post("/update_weights_from_tensor", load_format=loaders.BARE,
                                               serialized_named_tensors=[pack(request)]))
    found.bare = [float(line) for line in Path(times).read_text().split()][1:]


def _silence(found: Measured, dcs_update: updates.DcsUpdate, engine: BenchEngine, model: Model, testbed: Testbed) -> None:
    for i in range(testbed.samples + 1):
        model.renew()
        with Listener(engine.url) as listener:
            begin = time.monotonic()
            dcs_update.update(model.tensors)
            end = time.monotonic()
            listener.wait_for_more()
        dcs_update.forget()
        if i:
            found.silent.append(longest(listener.at, begin, end))
            found.spoken.append(median(b - a for a, b in zip(listener.at, listener.at[1:], strict=False)))
