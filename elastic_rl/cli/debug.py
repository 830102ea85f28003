"""``elastic-rl debug``: a step of a run made again, on this host alone."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import EXTRA, File, Output, find_cluster, out
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError

if TYPE_CHECKING:
    from elastic_rl.config import Config

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make a step of a run again.")
_SHOWN = ("loss", "grad_norm", "lr", "kl", "logprob_diff_max", "clip_fraction", "tokens", "train_s")
"""Metrics of the table, those of records first; JSON has all."""


@app.command("step", **EXTRA)
def step(ctx: typer.Context,
         number: Annotated[int, typer.Argument(metavar="N", min=1, help="An RL step of `train.keep_steps`.")],
         model: Annotated[Path | None, typer.Option("--model", metavar="FOLDER", help=(
             "Weights with which the step begins; else those with which the job began."))] = None,
         timeout: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time for the step.")] = 600.0,
         file: File = None, output: Output = Format.TABLE) -> None:
    """Train from the batch of a step again, without engines and a cluster, also with other sizes such as
    --trainer.data_parallel=1, and compare it with the run's own step."""
    from elastic_rl.data import step_file
    from elastic_rl.host.paths import JobPaths
    from elastic_rl.trainer import replay
    cfg = find_cluster(ctx, file).cfg
    paths = JobPaths.of(cfg)
    kept = step_file.read(paths.kept_steps, number, step_file.identity(cfg.job, paths.job_id))
    replay.require_replayable(cfg, kept.batch)
    weights = initial_weights(cfg, model, option="--model")
    with tempfile.TemporaryDirectory(prefix="erl-debug-") as folder:
        found = replay.run(cfg, {number: step_file.path_of(paths.kept_steps, number)}, weights, Path(folder),
                           timeout_s=timeout)[0]
    recorded = _recorded(cfg, number)
    if output is Format.JSON:
        tables.write_json({"step": number, "samples": kept.batch.samples, "versions": kept.versions,
                           "weights": str(weights), "recorded": recorded,
                           "metrics": {name: value if math.isfinite(value) else None for name, value in found.items()}})
        return
    rows = [{"metric": name, "now": f"{found[name]:.8g}", "run": _text(recorded.get(name))}
            for name in _SHOWN if name in found]
    tables.put(out, tables.facts({"step": number, "samples": kept.batch.samples, "weights": str(weights),
                                  "ranks": cfg.trainer.ranks}), output)
    tables.show(out, rows, ("metric", "now", "run"), output)


def initial_weights(cfg: Config, given: Path | None, *, option: str) -> Path:
    """The model folder that steps are made again from: a ``given`` one, else that with which the job began. ``option``:
    the one that names it. Raises ConfigError where there is none."""
    from elastic_rl.host import inherited_model
    weights = given or inherited_model.began_with(cfg)
    if not (weights / "config.json").exists():
        raise ConfigError(f"there is no model in {weights}", hint=(
            f"`elastic-rl versions export policy/N FOLDER` exports one; name it with {option}=FOLDER"))
    return weights.resolve()


def _recorded(cfg: Config, number: int) -> dict[str, Any]:
    """What this host's copy of the records has of the step: the last one, of steps that were made again."""
    from elastic_rl.host.paths import JobPaths
    from elastic_rl.report.build import read_records
    path = JobPaths.of(cfg).steps
    found = [r for r in (read_records(path) if path.exists() else [])
             if r.get("kind") == "step" and r.get("step") == number]
    return dict(found[-1]) if found else {}


def _text(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, int | float) else "–"
