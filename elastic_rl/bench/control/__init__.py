"""The control plane measured: fail-over of the leader and of etcd, the cost of a thousand engines, and of ten thousand
on a thousand hosts, requests and streams of the API."""

from __future__ import annotations

from elastic_rl.bench.options import Options, refuse_settings
from elastic_rl.bench.recorder import Emit
from elastic_rl.bench.suite import Suite

_API_PATHS = ("job", "pools", "pool", "members", "engines", "engine", "events", "versions", "operations",
              "operations-running", "steps", "alerts")

SUITE = Suite(__name__, {
    "store_failover": tuple(f"store-{what}-{fault}{end}" for fault in ("kill", "stop")
                            for what in ("failover", "watch") for end in ("", "-max")),
    "failover": tuple(f"failover-{fault}{end}" for fault in ("kill", "stop", "term") for end in ("", "-max")),
    "api": ("cpu-1000", "cpu-1000-etcd", "memory-1000", "etcd-writes", "late-writes", "scrape", "api-p99", "api-p50",
            "api-rps", *(f"api-p99-{path}" for path in _API_PATHS)),
    "watch_delay": ("watch-delay", "watch-delay-first"),
    "listing": tuple(f"list-10k-{what}{end}" for what in ("versions", "events") for end in ("", "-all")),
    "heartbeat": ("heartbeat", "heartbeat-cpu"),
    "scale": tuple(f"hosts-1000-{name}" for name in (
        "writes", "cpu", "cpu-follower", "cpu-etcd", "memory", "api-p99", "late")),
})


def run(options: Options, emit: Emit, suite: Suite = SUITE) -> None:
    """Measures the selected rows on processes of its own that all end here. Raises ConfigError."""
    refuse_settings(options)
    suite.modules(options.rows)  # an unknown id is an error before anything heavy is imported
    from elastic_rl.bench.control.testbed import Testbed
    suite.run(options, emit, lambda: Testbed.start(options))
