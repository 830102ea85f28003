"""The training loop as a whole: a short real run, measured from its own records."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_rl import config
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options
from elastic_rl.bench.recorder import Emit
from elastic_rl.bench.suite import require_known
from elastic_rl.config import Config
from elastic_rl.errors import ElasticRLError
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.report.build import effective_steps, read_records
from elastic_rl.report.charts import PHASE_ORDER

_WARM_STEPS = 2
"""First steps that do not count: caches fill and lazy imports happen in them."""
_PHASES = tuple(phase for phase in PHASE_ORDER if phase != "publish_stall")
ROWS = ("samples-per-s", "step-s", *(f"step-s-{phase.replace('_', '-')}" for phase in _PHASES), "publish-stall-s",
        "pull-apply-s")


def run(options: Options, emit: Emit) -> None:
    """Trains 12 steps with ``quick``, else 60, on a cluster of its own and measures them. A run that is interrupted or
    fails is measured by the steps that it finished. Raises ElasticRLError when the run failed, and ConfigError."""
    from elastic_rl import train
    require_known(options.rows, ROWS)
    with tempfile.TemporaryDirectory(prefix="elastic-rl-bench-") as folder:
        cluster = Cluster(configure(Path(folder), options))
        try:
            info = cluster.up()
            code = train.run(cluster.cfg, info)
        finally:
            for row in rows(read_records(cluster.cfg.job_dir / "steps.jsonl")):
                if options.selects(row.id):
                    emit(row)
            cluster.down()
        if code:
            raise ElasticRLError(f"the measured run ended with exit code {code}")


def configure(folder: Path, options: Options) -> Config:
    """The default job, cut short (the loop takes as long with a model that hardly learned), and the settings of the
    options. Raises ConfigError."""
    steps = 12 if options.quick else 60
    return config.load(None, [f"--job=bench-{secrets.token_hex(3)}", f"--run_dir={folder}", "--sft.max_steps=25",
                              f"--train.steps={steps}", f"--train.eval_every_steps={steps}", *options.settings])


def rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows from the records of a run. Pure."""
    steps = effective_steps(records)[_WARM_STEPS:]
    seconds = [s["seconds"] for s in steps]
    out = [Row.of("samples-per-s", "samples trained a second",
                  [s["samples"] / s["seconds"]["total"] for s in steps if s["seconds"].get("total")], "1/s", op=">="),
           Row.of("step-s", "step time", [s["total"] for s in seconds], "s")]
    out += [Row.of(f"step-s-{phase.replace('_', '-')}", f"step time: {phase.replace('_', ' ')}",
                   [s[phase] for s in seconds if phase in s], "s") for phase in _PHASES]
    pulls = {(e["id"], e["version"]): float(e["pull_apply_s"])
             for s in steps for e in s.get("engines") or [] if e.get("pull_apply_s")}
    stalls = [s["publish_stall"] for s in seconds if "publish_stall" in s]
    return [*out, Row.of("publish-stall-s", "publish stall", stalls, "s"),
            Row.of("pull-apply-s", "pull and apply in an engine", list(pulls.values()), "s")]
