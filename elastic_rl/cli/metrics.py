"""``elastic-rl metrics``: numbers of a run over its steps, from the records in the job's folder."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import EXTRA, File, Output, find_cluster, out
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError

app = typer.Typer()


@app.command(**EXTRA)
def metrics(ctx: typer.Context,
            names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", show_default=False, help=(
                "Metrics, such as reward_mean or kl, or patterns, such as 'seconds/*'; else the usual ones."))] = None,
            since: Annotated[int, typer.Option(min=0, metavar="STEP", help=(
                "Only steps from this one on, of each phase."))] = 0,
            last: Annotated[int | None, typer.Option(min=1, metavar="N", show_default=False, help=(
                "Only the last N of these steps."))] = None,
            file: File = None, output: Output = Format.TABLE) -> None:
    """Show numbers of a job over its steps, from the records on this host; no cluster needs to be up.

    Steps that were made again count as they were made last. -o json has all metrics where none is named."""
    from elastic_rl.host.paths import JobPaths
    from elastic_rl.report.build import read_records
    from elastic_rl.report.numbers import chosen, numbers
    cfg = find_cluster(ctx, file).cfg
    path = JobPaths.of(cfg).steps
    if not path.exists():
        raise ConfigError(f"this host has no records of job {cfg.job}: there is no {path}",
                          hint="name the job with --job=NAME and its folder with --run_dir; of several hosts, those on "
                               "which its actor has run have the records; `elastic-rl jobs` lists the jobs of a folder")
    steps = numbers(read_records(path))
    found = chosen(steps, [name.replace(" ", "_") for name in names or ()])
    shown = [s for s in steps if s.step >= since and not s.values.keys().isdisjoint(found)]
    shown = shown[-last:] if last is not None else shown
    if output is Format.JSON:
        tables.write_json([{"phase": s.phase, "step": s.step, "values": {
            name: value for name, value in s.values.items() if not names or name in found}} for s in shown])
        return
    rows: list[dict[str, Any]] = [{"phase": s.phase, "step": s.step, **{
        name: f"{s.values[name]:.4g}" for name in found if name in s.values}} for s in shown]
    tables.show(out, rows, ("phase", "step", *found), output)
