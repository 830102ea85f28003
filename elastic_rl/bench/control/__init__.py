"""The control plane measured: how soon another leads, what a thousand members cost, how quick the API and its streams
are; beside torchft's lighthouse where both do the same."""

from __future__ import annotations

from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options
from elastic_rl.bench.suite import Suite

SUITE = Suite(__name__, {
    "store_failover": ("store-failover-kill", "store-failover-stop", "store-watch-kill", "store-watch-stop"),
    "failover": ("failover-kill", "failover-stop", "failover-term"),
    "load": ("api-p99", "cpu-1000", "memory-1000", "etcd-writes"),
    "watch_delay": ("watch-delay",),
    "listing": ("list-10k",),
    "heartbeat": ("heartbeat", "heartbeat-cpu"),
})


def run(options: Options) -> list[Row]:
    """Measures the wanted rows on processes of their own that all end here."""
    from elastic_rl.bench.control.testbed import Testbed
    return SUITE.run(options, lambda: Testbed.start(options))
