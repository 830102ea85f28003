"""Commands for jobs that run without a terminal: jobs, attach, stop. They need the folders of the jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import completion, follow, tables
from elastic_rl.cli.common import EXTRA, File, Output, find_cluster, location, out, say, set_job
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError, ElasticRLError, EtcdUnavailable

if TYPE_CHECKING:
    from elastic_rl.host.job_run import RunReading
    from elastic_rl.host.local_cluster import Cluster

app = typer.Typer()
_Job = Annotated[str, typer.Argument(
    metavar="JOB", show_default=False, autocompletion=completion.jobs, help=(
        "Name of the job, as --job; else the one whose cluster is up."))]

_COLUMNS = ("job", "state", "step", "since", "message")
_WIDE = ("pid", "submitted", "folder")


@app.command(**EXTRA)
def attach(ctx: typer.Context, job: _Job = "", file: File = None) -> None:
    """Follow the run of a job, as train does; one that has ended is summed up, and gives its exit code.

    Ctrl-C asks whether to detach or to stop."""
    set_job(ctx, job)
    cluster = find_cluster(ctx, file, say=say)
    reading = cluster.run.look()  # where etcd is away, the view says so until it is back
    raise typer.Exit(follow.show_end(cluster, reading) if reading.over else
                     follow.follow(cluster, cluster.connect(), may_detach=True, attached=True))


@app.command(**EXTRA)
def stop(ctx: typer.Context, job: _Job = "", file: File = None) -> None:
    """Stop the run of a job. It writes its report, the job keeps its state, and train resumes it; the cluster stays
    up."""
    from elastic_rl.host import kept_state
    set_job(ctx, job)
    cluster = find_cluster(ctx, file, stored=False, say=say)
    stopped = cluster.stop_run()
    reading = cluster.run.look()
    say(f"stopped: {cluster.run.name} ({reading.outcome or 'it has ended'}); "
        f"`elastic-rl train {kept_state.options(cluster.cfg)}` resumes it" if stopped else
        f"job {cluster.cfg.job} does not run: {_state(reading) or 'it was never started'}")


@app.command(**EXTRA)
def jobs(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """List the jobs in run_dir: whether they run, how far they are, how they ended. It works without a cluster."""
    silent = set[Path]()
    rows = [row_of(cluster, silent) for cluster in _clusters(location(ctx, file).run_dir)]
    if output is not Format.JSON:
        rows = [{**row, **{at: tables.moment(row[f"{at}_at"]) for at in ("since", "submitted")}} for row in rows]
    tables.show(out, rows, _COLUMNS, output, wide=_WIDE)


def _clusters(run_dir: Path) -> Iterator[Cluster]:
    from elastic_rl.host.cluster_settings import location
    from elastic_rl.host.local_cluster import Cluster
    from elastic_rl.host.paths import jobs_of_user
    for name in jobs_of_user(run_dir.expanduser()):
        try:
            yield Cluster(location({"job": name, "run_dir": str(run_dir)}))
        except ConfigError:  # a copy of a job's folder, under a name that no job can have
            continue


def row_of(cluster: Cluster, silent: set[Path] | None = None) -> dict[str, Any]:
    """A job, as ``jobs`` shows it. ``silent``: folders of clusters whose etcd did not answer: they are not asked again.
    """
    from elastic_rl.host import kept_state
    from elastic_rl.host.paths import JobPaths
    paths = JobPaths.of(cluster.cfg)
    row: dict[str, Any] = {"job": cluster.cfg.job, "state": "", "step": None, "since_at": None,
                           "submitted_at": None, "pid": 0, "message": "", "folder": str(paths.folder)}
    silent = silent if silent is not None else set()
    try:
        row["step"] = _last_step(paths.steps)
        reading = cluster.run.last_seen() if cluster.dir in silent else cluster.run.read()
    except EtcdUnavailable:
        silent.add(cluster.dir)
        reading = cluster.run.last_seen()
    except (ElasticRLError, OSError) as e:
        return {**row, "message": f"how it goes cannot be read: {e}"}
    row |= {"state": _state(reading), "pid": reading.pid, "since_at": reading.since or None,
            "submitted_at": reading.submitted_at or None,
            "message": reading.outcome or reading.waits_for}
    if cluster.dir in silent:
        row["message"] = "etcd does not answer: this is what was seen of it last"
    elif reading.wanted and not reading.alive and not cluster.agents.running():
        row["message"] = ("its process and the host agent have ended; `elastic-rl up "
                          f"{kept_state.cluster_options(cluster.cfg)}` starts them again")
    return row


def _state(reading: RunReading) -> str:
    """The state of a run, for people and programs; empty where there is none."""
    return "stopping" if reading.stopping else str(reading.phase or "")


def _last_step(path: Path) -> int | None:
    from elastic_rl.report.build import parse_lines
    from elastic_rl.telemetry.log_files import tail
    steps = [int(r["step"]) for r in parse_lines(tail(path).splitlines()) if r["kind"] in ("step", "sampled", "sft")]
    return steps[-1] if steps else None
