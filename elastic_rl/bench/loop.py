"""The training loop as a whole: a short real run, measured from its own records."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elastic_rl.bench.measurement import Row
from elastic_rl.config import Config, parse
from elastic_rl.errors import ElasticRLError
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.report.build import effective_steps, read_records
from elastic_rl.report.charts import PHASE_ORDER

_WARM_STEPS = 2
"""First steps that do not count: caches fill and lazy imports happen in them."""


def run(quick: bool) -> list[Row]:
    """Trains 12 steps (60 if not ``quick``) on a cluster of its own and measures them."""
    from elastic_rl import train
    with tempfile.TemporaryDirectory(prefix="elastic-rl-bench-") as folder:
        cfg = settings(Path(folder), steps=12 if quick else 60)
        cluster = Cluster(cfg)
        try:
            info = cluster.up()
            code = train.run(cluster.cfg, info)
        finally:
            cluster.down()
        if code:
            raise ElasticRLError(f"the measured run ended with exit code {code}")
        return rows(read_records(cluster.cfg.job_dir / "steps.jsonl"))


def settings(folder: Path, *, steps: int) -> Config:
    """The default job, cut short: a hardly warmed-up model costs the loop as much as a good one."""
    return parse({"job": f"bench-{secrets.token_hex(3)}", "run_dir": str(folder),
                  "sft": {"max_steps": 25}, "train": {"steps": steps, "eval_every_steps": steps}})


def rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Rows from the records of a run. Pure."""
    steps = effective_steps(records)[_WARM_STEPS:]
    seconds = [s["seconds"] for s in steps]
    out = [Row.of("samples-per-s", "samples trained a second",
                  [s["samples"] / s["seconds"]["total"] for s in steps if s["seconds"].get("total")], "1/s", op=">="),
           Row.of("step-s", "step time", [s["total"] for s in seconds], "s")]
    out += [Row.of(f"step-s-{phase.replace('_', '-')}", f"step time: {phase.replace('_', ' ')}",
                   [s[phase] for s in seconds if phase in s], "s") for phase in PHASE_ORDER if phase != "publish_stall"]
    pulls = {(e["id"], e["version"]): float(e["pull_apply_s"])
             for s in steps for e in s.get("engines") or [] if e.get("pull_apply_s")}
    stalls = [s["publish_stall"] for s in seconds if "publish_stall" in s]
    return [*out, Row.of("publish-stall-s", "publish stall", stalls, "s"),
            Row.of("pull-apply-s", "pull and apply in an engine", list(pulls.values()), "s")]
