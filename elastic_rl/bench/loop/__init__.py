"""The training loop measured: its steps, beside bare engines with a bare trainer, TRL and
transformers, and its outages."""

from __future__ import annotations

from contextlib import nullcontext

from elastic_rl.bench.options import Options
from elastic_rl.bench.recorder import Emit
from elastic_rl.bench.suite import Suite

_PHASES = ("sync", "generate", "reward", "advantage", "train", "other", "between", "train-ranks")
_IDLE_STAGES = ("sync", "generate", "advantage", "train", "other")
_ASYNC_IDLE = ("groups", "producer", "producer-no-room")
_OUTAGES = ("etcd", "router", "engines", "engines-s", "dcs", "actor", "trainer")

SUITE = Suite(__name__, {
    "steps": ("samples-per-s", "step-s", *(f"step-s-{phase}" for phase in _PHASES), "publish-stall-s", "pull-apply-s",
              *(f"idle-s-{stage}" for stage in _IDLE_STAGES)),
    "overhead": ("overhead", "overhead-s", "overhead-tokens"),
    "async_vs_sync": ("async-vs-sync", "async-step-s", "async-tokens",
                      *(f"async-idle-s-{part}" for part in _ASYNC_IDLE), "async-staleness",
                      "async-own-cores", "async-own-cores-s", "async-parts", "async-parts-s",
                      "async-queue-overhead", "async-queue-overhead-s", "async-queue-s"),
    "vs_trl": ("vs-trl-small", "vs-trl-small-s", "vs-trl-small-tokens"),
    "vs_trl_long": ("vs-trl-long", "vs-trl-long-s", "vs-trl-long-tokens"),
    "trainer_vs_megatron": ("trainer-vs-megatron", "trainer-tokens-per-s"),
    "sft_vs_transformers": ("sft-vs-transformers", "sft-tokens-per-s"),
    "outages": tuple(f"outage-{part}" for part in _OUTAGES),
})


def run(options: Options, emit: Emit) -> None:
    """Measures the selected rows on clusters and processes of its own that all end here. A run that is interrupted or
    fails is measured by the steps that it finished. Raises ElasticRLError when the measured run failed, and
    ConfigError."""
    SUITE.modules(options.rows)  # an unknown id is an error before anything heavy is imported
    from elastic_rl.bench.loop.testbed import Testbed
    with Testbed.start(options) as testbed:
        SUITE.run(options, emit, lambda: nullcontext(testbed))
        testbed.require_run()
