"""Recovery measured: how soon each part of a real cluster, and of a real run on it, is back after kill -9, what becomes
of a run when hosts are lost, join and leave, and what the durable plane costs while nothing happens."""

from __future__ import annotations

from elastic_rl.bench.options import Options, refuse_settings
from elastic_rl.bench.recorder import Emit
from elastic_rl.bench.suite import Suite

_SERVICES = ("etcd", "coordinator", "dcs")
_PARTS = ("driver", "router", "rank", "engine", "ray-head", "raylet", "role")
_OF_TRAINER = ("host-loss-trainer", "shrink", "grow", "scale-1-4-1")


def _with_max(*rows: str) -> tuple[str, ...]:
    return tuple(f"{row}{end}" for row in rows for end in ("", "-max"))


SUITE = Suite(__name__, {
    "overhead": _with_max("overhead"),
    "services": _with_max(*(f"service-kill-{service}" for service in _SERVICES)),
    "agent": _with_max("agent-kill"),
    "run_parts": _with_max(*(f"{part}-kill" for part in _PARTS), "global-restart"),
    "trainer_hosts": (*_with_max(*_OF_TRAINER), *(f"{row}-redone" for row in _OF_TRAINER)),
    "engine_hosts": _with_max("join", "host-loss-engines", "drain", "join-trainer-dead", "host-loss-driver"),
})
_ON_HOSTS = ("trainer_hosts", "engine_hosts")
"""Modules whose runs are on several hosts of this machine."""


def run(options: Options, emit: Emit, suite: Suite = SUITE) -> None:
    """Measures the selected rows on one cluster, and one run, of its own that end here; then those of several hosts, on
    clusters of their own. Raises ConfigError."""
    refuse_settings(options)
    suite.modules(options.rows)  # an unknown id is an error before anything heavy is imported
    from elastic_rl.bench.recovery.host_runs import HostsTestbed
    from elastic_rl.bench.recovery.testbed import Testbed
    suite.run(options, emit, lambda: Testbed.start(options), among=suite.rows.keys() - set(_ON_HOSTS))
    suite.run(options, emit, lambda: HostsTestbed.start(options), among=_ON_HOSTS)
