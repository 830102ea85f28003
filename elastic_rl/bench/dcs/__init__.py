"""The checkpoint service measured, beside the machine's limit."""

from __future__ import annotations

from elastic_rl.bench.options import Options, refuse_settings
from elastic_rl.bench.recorder import Emit
from elastic_rl.bench.suite import Suite

_READERS = (1, 2, 4, 8)
_FRACTIONS = ("", "-0.5", "-5", "-20")

SUITE = Suite(__name__, {
    "limits": ("limit-memcpy", "limit-tcp", "limit-disk"),
    "deltas": tuple(f"P5-{what}{fraction}" for fraction in _FRACTIONS for what in ("bytes", "encode", "decode")),
    "pull_latency": ("P1", *(f"P1-pull-{n}" for n in _READERS), "P1-verify", *(f"P1-verify-{n}" for n in _READERS)),
    "link_throughput": ("P2-link", "P2-link-gbps"),
    "fleet": tuple(f"{row}{what}" for row in ("P2-fleet", "P2-fleet-slow")
                   for what in ("", "-sent", "-s", "-single-s")),
    "commit": ("commit-100k", "commit-100k-pull"),
    "node_memory": ("memory-node", "memory-node-share", "memory-node-idle"),
    "stall": ("P3", "P3-stall-s", "memory-trainer"),
    "apply_latency": ("memory-engine", "P1-apply-1-s", "P1-apply-2-s", "P4", "P4-pause-s", "P4-token-gap-s"),
})


def run(options: Options, emit: Emit, suite: Suite = SUITE) -> None:
    """Measures the selected rows on processes of its own that all end here. Raises ConfigError."""
    refuse_settings(options)
    suite.modules(options.rows)  # an unknown id is an error before anything heavy is imported
    from elastic_rl.bench.dcs.testbed import Testbed
    suite.run(options, emit, lambda: Testbed.start(options))
