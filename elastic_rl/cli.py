"""The ``elastic-rl`` command.

Every command takes ``-c FILE`` and any setting as ``--key.sub=value``. Exit codes: 0 all is well; 1 the run failed or
something unforeseen; 2 wrong usage or configuration; 3 the store or the coordinators do not answer; 4 the machine is
unfit; 5 the API refused the request; 6 a deadline passed; 130 interrupted.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from elastic_rl import __version__
from elastic_rl import config as configuration
from elastic_rl.config import Config
from elastic_rl.errors import ConfigError, DeadlineExceeded, ElasticRLError, MachineUnfit, StoreUnavailable

EXIT_FAILED, EXIT_USAGE, EXIT_STORE, EXIT_MACHINE, EXIT_REFUSED, EXIT_DEADLINE, EXIT_INTERRUPTED = 1, 2, 3, 4, 5, 6, 130
_EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Fault-tolerant, elastic reinforcement learning for LLMs. Any setting is also --key.sub=value.",
                  epilog="exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 store unavailable, 4 machine unfit, "
                         "5 refused by the API, 6 deadline, 130 interrupted")
config_app = typer.Typer(no_args_is_help=True, help="Show the configuration or its schema.", rich_markup_mode=None)
app.add_typer(config_app, name="config")
out = Console()
err = Console(stderr=True)


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


File = Annotated[Path | None, typer.Option("-c", "--config", help="YAML file of settings.")]
Output = Annotated[Format, typer.Option("-o", "--output", help="table or json.")]


# -- settings and output ----------------------------------------------------------------------------------------------
def overrides(args: Sequence[str]) -> list[str]:
    """Settings of a command line: ``--key.sub=value`` and ``--key.sub value``. Raises ConfigError for anything else."""
    found, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            raise ConfigError(f"unexpected argument {arg!r}", hint="settings are given as --key.sub=value")
        if "=" not in arg:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{arg} has no value", hint=f"write {arg}=VALUE")
            arg += "=" + rest.pop(0)
        found.append(arg)
    return found


def _load(ctx: typer.Context, file: Path | None) -> Config:
    return configuration.load(file, overrides(ctx.args))


def _show(rows: Sequence[dict[str, Any]], columns: Sequence[str], output: Format) -> None:
    """A listing: every field as JSON, the named columns as a table."""
    if output is Format.JSON:
        _json(list(rows))
        return
    table = Table(box=None, header_style="bold", padding=(0, 2))
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(c), c) for c in columns))
    out.print(table if rows else "none")


def _json(value: Any) -> None:
    """Plain JSON on stdout, never wrapped or coloured."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def _cell(value: Any, column: str) -> str:
    if value is None or value == "":
        return "–"
    if column.endswith("at") and isinstance(value, int | float) and value > 1e9:
        return time.strftime("%H:%M:%S", time.localtime(value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _find_cluster(cfg: Config, named: bool) -> Any:
    """The cluster of the job; where no job was named and exactly one is up under run_dir, that one."""
    from elastic_rl.cluster import Cluster, ClusterInfo
    cluster = Cluster(cfg)
    if not named and ClusterInfo.load(cluster.dir) is None:
        up = [p.parent.parent.name for p in cluster.cfg.run_dir.glob("*/cluster/cluster.json")]
        if len(up) == 1:
            return Cluster(cfg.model_copy(update={"job": up[0]}))
        if up:
            raise ConfigError(f"several clusters are up: {', '.join(sorted(up))}", hint="name one with --job=NAME")
    return cluster


def _client(ctx: typer.Context, file: Path | None) -> Any:
    from elastic_rl.admin_client import AdminClient
    named = file is not None or any(a.startswith("--job") for a in ctx.args)
    return AdminClient(_find_cluster(_load(ctx, file), named).connect())


# -- the cluster and the run ------------------------------------------------------------------------------------------
@app.command(context_settings=_EXTRA)
def up(ctx: typer.Context, file: File = None) -> None:
    """Start a local cluster (etcd, coordinators, DCS node), or what is missing of it."""
    from elastic_rl.cluster import Cluster
    cluster = Cluster(_load(ctx, file), say=_say)
    with _interruptible():
        info = cluster.up()
    out.print(f"up: {info.job}", highlight=False)
    _how_to_talk(info)


@app.command(context_settings=_EXTRA)
def down(ctx: typer.Context, file: File = None) -> None:
    """Stop everything of a job, also what a crash left behind."""
    named = file is not None or any(a.startswith("--job") for a in ctx.args)
    stopped = _find_cluster(_load(ctx, file), named).down()
    out.print("stopped: " + (", ".join(stopped) or "nothing was running"), highlight=False)


@app.command(context_settings=_EXTRA)
def train(ctx: typer.Context, file: File = None,
          with_cluster: Annotated[bool, typer.Option("--with-cluster", help="Bring a cluster up, then down.")] = False,
          keep_up: Annotated[bool, typer.Option("--keep-up", help="Leave the cluster running.")] = False,
          faults: Annotated[bool, typer.Option("--faults", help="Kill and scale things during the run.")] = False,
          ) -> None:
    """Train on a cluster that is up, or with --with-cluster on one that lives as long as the run."""
    from elastic_rl.cluster import Cluster
    cfg = _load(ctx, file)
    cluster = Cluster(cfg, say=_say)
    code = EXIT_FAILED
    with _interruptible():
        try:
            info = cluster.up() if with_cluster else cluster.connect()
            code = _train(cluster.cfg, info, faults=faults)
        finally:
            if with_cluster and not keep_up:
                with _deaf():
                    _say("taking the cluster down")
                    cluster.down()
    if with_cluster and keep_up:
        out.print("the cluster is left running", highlight=False)
        _how_to_talk(info)
    raise typer.Exit(code)


def _train(cfg: Config, info: Any, *, faults: bool) -> int:
    from elastic_rl import train as training
    from elastic_rl.coordinator.store import Store
    from elastic_rl.live import LiveView, summary
    _log_to(Path(info.cluster_dir) / "logs" / "train.log", cfg)
    store = Store.from_config(cfg.etcd, info.etcd)
    view = LiveView(job=cfg.job, steps=cfg.train.steps, steps_path=cfg.job_dir / "steps.jsonl", store=store)
    try:
        code = training.run(cfg, info, faults=faults, on_tick=view.tick)
    finally:
        view.close()
        store.close()
    report = cfg.job_dir / "report.json"
    if report.exists():
        out.print(summary(json.loads(report.read_text()), cfg.job_dir / "report.html"))
    if code:
        err.print(f"the run ended with exit code {code}; the logs are in {info.cluster_dir}/logs", markup=False)
    return code


def _log_to(path: Path, cfg: Config) -> None:
    """This process's own log lines would tear the live view apart, so they go to a file."""
    from elastic_rl.telemetry.logs import JsonLines
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(JsonLines("train"))
    logging.basicConfig(level=cfg.telemetry.log_level.upper(), handlers=[handler], force=True)


def _how_to_talk(info: Any) -> None:
    lines = [f"admin API   {' '.join(info.coordinators)}", f"etcd        {' '.join(info.etcd)}",
             f"tokens      {info.tokens_file}", f"logs        {info.cluster_dir}/logs",
             f"look        elastic-rl status --job={info.job}", f"scale       elastic-rl scale 3 --job={info.job}",
             f"stop        elastic-rl down --job={info.job}"]
    for line in lines:
        out.print("  " + line, highlight=False, markup=False, soft_wrap=True)


# -- looking and changing ---------------------------------------------------------------------------------------------
@app.command(context_settings=_EXTRA)
def status(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """How far the run is, its pools, and who is a member."""
    api = _client(ctx, file)
    found = {"job": api.get("/v1/job"), "pools": api.items("/v1/pools"), "members": api.items("/v1/members")}
    if output is Format.JSON:
        _json(found)
        return
    job = found["job"]
    inner = [v for v in job.values() if isinstance(v, dict)]
    flat = {k: v for part in (job, *inner) for k, v in part.items() if not isinstance(v, dict | list)}
    for key, value in flat.items():
        out.print(f"{key.replace('_', ' '):<16} {_cell(value, key)}", highlight=False, markup=False)
    out.print()
    _show(found["pools"], _columns(found["pools"], ("name", "desired", "ready", "starting", "draining")), output)
    out.print()
    _show(found["members"], ("role", "id", "pid", "host", "step", "phase", "progress_at"), output)


def _columns(rows: Sequence[dict[str, Any]], wanted: Sequence[str]) -> list[str]:
    """The wanted columns that exist, else all."""
    present = [c for c in wanted if any(c in r for r in rows)]
    return present if len(present) > 1 or not rows else list(rows[0])


@app.command(context_settings=_EXTRA)
def scale(ctx: typer.Context, desired: Annotated[int, typer.Argument(help="Number of engines.")], file: File = None,
          pool: Annotated[str, typer.Option(help="Pool to scale.")] = "rollout", output: Output = Format.TABLE) -> None:
    """Change the desired number of engines of a pool."""
    answer = _client(ctx, file).post(f"/v1/pools/{pool}/scale", {"desired": desired})
    if output is Format.JSON:
        _json(answer)
    else:
        out.print(f"pool {pool}: {desired} engines desired", highlight=False)


@app.command(context_settings=_EXTRA)
def engines(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Engines with their state and the version they serve."""
    _show(_client(ctx, file).items("/v1/engines"),
          ("id", "state", "version", "applying", "url", "pid", "pull_apply_s", "updated_at", "reason"), output)


@app.command(context_settings=_EXTRA)
def versions(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Versions in the checkpoint service."""
    _show(_client(ctx, file).items("/v1/versions"),
          ("stream", "number", "state", "epoch", "nbytes", "nodes", "committed_at", "meta"), output)


@app.command(context_settings=_EXTRA)
def events(ctx: typer.Context, file: File = None, output: Output = Format.TABLE,
           limit: Annotated[int, typer.Option(min=1, help="Newest so many.")] = 50) -> None:
    """What happened, newest last."""
    _show(_client(ctx, file).items("/v1/events")[-limit:], ("at", "severity", "kind", "subject", "message"), output)


@app.command(context_settings=_EXTRA)
def doctor(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Check this machine and say how to mend what is wrong."""
    from elastic_rl import doctor as doctors
    findings = doctors.examine(_load(ctx, file))
    _show([f.row() for f in findings], ("check", "verdict", "found", "mend"), output)
    if doctors.unfit(findings):
        raise typer.Exit(EXIT_MACHINE)


@app.command()
def bench(name: Annotated[str, typer.Argument(help="Measurement to run.")],
          quick: Annotated[bool, typer.Option("--quick", help="Fewer samples.")] = False,
          output: Output = Format.TABLE) -> None:
    """Measure something and compare it with its goal."""
    from elastic_rl import measure
    from elastic_rl.bench import BENCHES
    if name not in BENCHES:
        raise ConfigError(f"there is no bench {name!r}", hint=f"known: {', '.join(sorted(BENCHES))}")
    with _interruptible():
        rows = BENCHES[name](quick)
    if output is Format.JSON:
        _json(measure.result(name, rows))
    else:
        out.print(measure.table(name, rows))


@config_app.command("show", context_settings=_EXTRA)
def config_show(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """The configuration with everything applied, as YAML (or JSON)."""
    values = _load(ctx, file).model_dump(mode="json")
    if output is Format.JSON:
        _json(values)
    else:
        sys.stdout.write(yaml.safe_dump(values, sort_keys=False))


@config_app.command("schema")
def config_schema() -> None:
    """Every key with its type, default and meaning, as JSON Schema."""
    _json(Config.model_json_schema())


@app.command()
def version() -> None:
    """The release of elastic-rl."""
    sys.stdout.write(__version__ + "\n")


# -- signals and errors -----------------------------------------------------------------------------------------------
def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that every ``finally`` runs."""
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handlers(interrupt, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def _deaf() -> Iterator[None]:
    """A second Ctrl-C does not stop the cleaning up after the first."""
    with _handlers(lambda number, frame: None, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def _handlers(handler: Callable[[int, Any], None], numbers: Sequence[signal.Signals]) -> Iterator[None]:
    before = {n: signal.signal(n, handler) for n in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def exit_code(error: ElasticRLError) -> int:
    """The documented exit code of an error."""
    from elastic_rl.admin_client import RequestRefused
    match error:
        case ConfigError():
            return EXIT_USAGE
        case StoreUnavailable():
            return EXIT_STORE
        case MachineUnfit():
            return EXIT_MACHINE
        case RequestRefused():
            return EXIT_REFUSED
        case DeadlineExceeded():
            return EXIT_DEADLINE
        case _:
            return EXIT_FAILED


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: errors of ours become a message, a hint and an exit code; a traceback is a bug."""
    try:
        app(args=list(argv) if argv is not None else None)
    except ElasticRLError as e:
        err.print(f"error: {e.message}", markup=False, highlight=False, soft_wrap=True)
        if e.hint:
            err.print(f"hint: {e.hint}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(exit_code(e))
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
