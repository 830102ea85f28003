"""The control plane measured: how soon another leads, what a thousand members cost, how quick the API and its streams
are; beside torchft's lighthouse where both do the same."""

from __future__ import annotations

from elastic_rl.bench.options import Options, refuse_settings
from elastic_rl.bench.recorder import Emit
from elastic_rl.bench.suite import Suite

SUITE = Suite(__name__, {
    "store_failover": ("store-failover-kill", "store-failover-stop", "store-watch-kill", "store-watch-stop"),
    "failover": ("failover-kill", "failover-stop", "failover-term"),
    "load": ("api-p99", "cpu-1000", "memory-1000", "etcd-writes"),
    "watch_delay": ("watch-delay",),
    "listing": ("list-10k",),
    "heartbeat": ("heartbeat", "heartbeat-cpu"),
})


def run(options: Options, emit: Emit) -> None:
    """Measures the selected rows on processes of its own that all end here. Raises ConfigError."""
    refuse_settings(options)
    SUITE.modules(options.rows)  # an unknown id is an error before anything heavy is imported
    from elastic_rl.bench.control.testbed import Testbed
    SUITE.run(options, emit, lambda: Testbed.start(options))
