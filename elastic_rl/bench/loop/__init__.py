"""The training loop measured: its steps, beside bare engines with a bare trainer, and its outages."""

from __future__ import annotations

from contextlib import nullcontext

from elastic_rl.bench.options import Options
from elastic_rl.bench.recorder import Emit
from elastic_rl.bench.suite import Suite

_STAGES = ("sync", "generate", "reward", "advantage", "train", "other", "between", "train-ranks")
_IDLE_STAGES = ("sync", "generate", "advantage", "train", "other")
_ASYNC_IDLE = ("groups", "producer", "producer-no-room")
_OUTAGES = ("etcd", "router", "engines", "engines-s", "dcs", "actor", "trainer")

SUITE = Suite(__name__, {
    "steps": ("samples-per-s", "step-s", *(f"step-s-{stage}" for stage in _STAGES), "publish-stall-s", "pull-apply-s",
              *(f"idle-s-{stage}" for stage in _IDLE_STAGES)),
    "overhead": ("overhead", "overhead-s", "overhead-tokens"),
    "actor_bytes": ("actor-bytes", "actor-bytes-wire", "actor-bytes-step"),
    "step_cost": ("cpu-a-step", "etcd-a-step", "sync-small"),
    "rollout_rate": ("rollout-rate", "rollout-rate-wall", "rollout-rate-parse"),
    "unequal": ("unequal", "unequal-s"),
    "straggler": ("straggler", "straggler-samples-per-s"),
    "async_vs_sync": ("async-vs-sync", "async-step-s", "async-tokens",
                      *(f"async-idle-s-{part}" for part in _ASYNC_IDLE), "async-staleness",
                      "async-own-cores", "async-own-cores-s", "async-parts", "async-parts-s",
                      "async-queue-overhead", "async-queue-overhead-s", "async-queue-s"),
    "trainer_vs_megatron": ("trainer-vs-megatron", "trainer-tokens-per-s"),
    "outages": tuple(f"outage-{part}" for part in _OUTAGES),
})


def run(options: Options, emit: Emit, suite: Suite = SUITE) -> None:
    """Measures the selected rows on clusters and processes of its own that all end here. A run that is interrupted or
    fails is measured by the steps that it finished. Raises ElasticRLError when the measured run failed, and
    ConfigError."""
    suite.modules(options.rows)  # an unknown id is an error before anything heavy is imported
    from elastic_rl.bench.loop.testbed import Testbed
    with Testbed.start(options) as testbed:
        suite.run(options, emit, lambda: nullcontext(testbed))
        testbed.require_run()
