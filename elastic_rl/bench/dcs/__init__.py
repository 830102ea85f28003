"""The checkpoint service measured: each row beside what else could do the same, and beside the machine's limit.

A row that cannot be measured here is in the result all the same and says why.
"""

from __future__ import annotations

from elastic_rl.bench.options import Options, refuse_settings
from elastic_rl.bench.recorder import Emit
from elastic_rl.bench.suite import Suite

SUITE = Suite(__name__, {
    "limits": ("limit-memcpy", "limit-tcp", "limit-disk"),
    "deltas": ("P5-bytes", "P5-encode", "P5-decode"),
    "pull_latency": ("P1",),
    "link_throughput": ("P2-link",),
    "fleet": ("P2-fleet", "P2-fleet-sent", "P2-fleet-slow", "P2-fleet-slow-sent"),
    "commit": ("commit-100k",),
    "node_memory": ("memory-node",),
    "stall": ("P3", "memory-trainer"),
    "apply_latency": ("P1-apply-1", "P1-apply-2", "P4", "memory-engine"),
})


def run(options: Options, emit: Emit) -> None:
    """Measures the selected rows on processes of its own that all end here. Raises ConfigError."""
    refuse_settings(options)
    SUITE.modules(options.rows)  # an unknown id is an error before anything heavy is imported
    from elastic_rl.bench.dcs.testbed import Testbed
    SUITE.run(options, emit, lambda: Testbed.start(options))
