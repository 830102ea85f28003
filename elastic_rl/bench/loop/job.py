"""Real runs for the bench: their settings, and one run on a cluster of its own from its start to its end."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_rl import config, train
from elastic_rl.bench.options import Options
from elastic_rl.config import Config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.faults.injector import FaultPlan
from elastic_rl.host.local_cluster import Cluster

WARM_STEPS = 2
"""First steps that do not count: caches fill and lazy imports happen in them."""
ASYNC_STALENESS = 2
ASYNC_SETTINGS = ("--train.schedule=fully_async", f"--train.max_staleness={ASYNC_STALENESS}")
TRANSFER_QUEUE_SETTINGS = (*ASYNC_SETTINGS, "--train.queue=transfer_queue")
ONE_UPDATE_SETTINGS = ("--train.schedule=fully_async", "--train.updates_per_step=1")
PART_SETTINGS = (*ONE_UPDATE_SETTINGS, "--train.prompts_per_part=2")
"""Settings for the job with long responses: a quarter of a step."""
_SHORT_STEPS = ("--sft.max_steps=0", "--train.prompts_per_step=16", "--train.group_size=4",
                "--train.updates_per_step=1")


def configure(folder: Path, options: Options, more: Sequence[str] = ()) -> Config:
    """The default job, cut short (the loop takes as long with a model that hardly learned), the settings of the
    options, and ``more`` of them. Raises ConfigError."""
    steps = 12 if options.quick else 60
    return config.load(None, [*place(folder, options), "--sft.max_steps=25", f"--train.steps={steps}",
                              f"--train.eval_every_steps={steps}", *options.settings, *more])


def configure_short_steps(folder: Path, options: Options, steps: int, more: Sequence[str] = ()) -> Config:
    """A job of so many short steps, with the settings of the options, which do not change that number, and ``more`` of
    them. Raises ConfigError."""
    return config.load(None, [*place(folder, options), *_SHORT_STEPS, *options.settings, *more,
                              f"--train.steps={steps}", f"--train.eval_every_steps={steps}"])


def place(folder: Path, options: Options) -> list[str]:
    """Settings of a bench's own job and folder. Raises ConfigError for options that name others."""
    for key in ("job", "run_dir"):
        if key in config.given(None, options.settings):
            raise ConfigError(f"`bench loop` takes no --{key}: it trains a job of its own in a folder of its own, "
                              "injures its parts, and takes its cluster down at the end", hint=f"leave --{key} out")
    return [f"--job=bench-{secrets.token_hex(3)}", f"--run_dir={folder}"]


def run(cfg: Config, *, plan: FaultPlan | None = None,
        then: Callable[[Config, ClusterInfo], object] = lambda cfg, info: None) -> None:
    """Trains to the end, with the faults of ``plan``, and calls ``then`` while the cluster is still up. Raises
    ElasticRLError when the run failed."""
    cluster = Cluster(cfg)
    try:
        info = cluster.up()
        code = (train.run(cluster.cfg, info) if plan is None else
                train.run(cluster.cfg, info, faults=True, fault_plan=plan))
        if code:
            raise ElasticRLError(f"the measured run ended with exit code {code}")
        then(cluster.cfg, info)
    finally:
        cluster.down()


