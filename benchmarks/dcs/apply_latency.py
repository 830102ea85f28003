"""P1-apply-*, P4-* and memory-engine beside SGLang's own updates, torch DCP and Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.dcs import loaders, updates
from elastic_rl.bench.dcs import apply_latency
from elastic_rl.bench.dcs.testbed import Testbed
from elastic_rl.bench.measurement import Row


def measure(testbed: Testbed) -> Iterator[Row]:
    yield from apply_latency.measure(testbed, apply_latency.Alternatives(
        ways=updates.alternatives, loaders=(loaders.DCP,),
        unmeasured={"checkpoint-engine": updates.checkpoint_engine()}))
