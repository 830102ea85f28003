"""P1, P1-pull-*, P1-verify-* beside files, torch DCP and Ray's object store."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.dcs.exchanges import EXCHANGES
from elastic_rl.bench.dcs import pull_latency
from elastic_rl.bench.dcs.testbed import Testbed
from elastic_rl.bench.measurement import Row


def measure(testbed: Testbed) -> Iterator[Row]:
    yield from pull_latency.measure(testbed, EXCHANGES)
