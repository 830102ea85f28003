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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from elastic_rl import __version__, listing
from elastic_rl.command import EXTRA, File, Output, err, find_cluster, load, out
from elastic_rl.config import Config
from elastic_rl.errors import ConfigError, DeadlineExceeded, ElasticRLError, MachineUnfit, StoreUnavailable
from elastic_rl.listing import Format
from elastic_rl.versions.commands import app as versions_app

EXIT_FAILED, EXIT_USAGE, EXIT_STORE, EXIT_MACHINE, EXIT_REFUSED, EXIT_DEADLINE, EXIT_INTERRUPTED = 1, 2, 3, 4, 5, 6, 130

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Fault-tolerant, elastic reinforcement learning for LLMs. Any setting is also --key.sub=value.",
                  epilog="exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 store unavailable, 4 machine unfit, "
                         "5 refused by the API, 6 deadline, 130 interrupted")
config_app = typer.Typer(no_args_is_help=True, help="Show the configuration or its schema.", rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(versions_app, name="versions")


# -- output ------------------------------------------------------------------------------------------------------------
def _show(rows: Sequence[dict[str, Any]], columns: Sequence[str], output: Format, wide: Sequence[str] = ()) -> None:
    listing.show(out, rows, columns, output, wide=wide)


def _client(ctx: typer.Context, file: Path | None) -> Any:
    from elastic_rl.admin_client import AdminClient
    return AdminClient(find_cluster(ctx, file).connect())


# -- the cluster and the run ------------------------------------------------------------------------------------------
@app.command(context_settings=EXTRA)
def up(ctx: typer.Context, file: File = None) -> None:
    """Start a local cluster (etcd, coordinators, DCS node), or what is missing of it."""
    from elastic_rl.cluster import Cluster
    cluster = Cluster(load(ctx, file), say=_say)
    with _interruptible():
        info = cluster.up()
    out.print(f"up: {info.job}", highlight=False)
    _how_to_talk(info)


@app.command(context_settings=EXTRA)
def down(ctx: typer.Context, file: File = None) -> None:
    """Stop everything of a job, also what a crash left behind."""
    stopped = find_cluster(ctx, file).down()
    out.print("stopped: " + (", ".join(stopped) or "nothing was running"), highlight=False)


@app.command(context_settings=EXTRA)
def train(ctx: typer.Context, file: File = None,
          with_cluster: Annotated[bool, typer.Option("--with-cluster", help="Bring a cluster up, then down.")] = False,
          keep_up: Annotated[bool, typer.Option("--keep-up", help="Leave the cluster running.")] = False,
          faults: Annotated[bool, typer.Option("--faults", help="Kill and scale things during the run.")] = False,
          ) -> None:
    """Train on a cluster that is up, or with --with-cluster on one that lives as long as the run."""
    from elastic_rl.cluster import Cluster
    cfg = load(ctx, file)
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
@app.command(context_settings=EXTRA)
def status(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """How far the run is, its pools, and who is a member."""
    api = _client(ctx, file)
    found = {"job": api.get("/v1/job"), "pools": api.items("/v1/pools"), "members": api.items("/v1/members")}
    if output is Format.JSON:
        listing.write_json(found)
        return
    job = found["job"]
    inner = [v for v in job.values() if isinstance(v, dict)]
    flat = {k: v for part in (job, *inner) for k, v in part.items() if not isinstance(v, dict | list)}
    for key, value in flat.items():
        out.print(f"{key.replace('_', ' '):<16} {listing.cell(value, key)}", highlight=False, markup=False)
    out.print()
    _show(found["pools"], _columns(found["pools"], ("name", "desired", "ready", "starting", "draining")), output)
    out.print()
    _show(found["members"], ("role", "id", "pid", "step", "phase", "progress_at"), output, ("host", "url", "epoch"))


def _columns(rows: Sequence[dict[str, Any]], wanted: Sequence[str]) -> list[str]:
    """The wanted columns that exist, else all."""
    present = [c for c in wanted if any(c in r for r in rows)]
    return present if len(present) > 1 or not rows else list(rows[0])


@app.command(context_settings=EXTRA)
def scale(ctx: typer.Context, desired: Annotated[int, typer.Argument(help="Number of engines.")], file: File = None,
          pool: Annotated[str, typer.Option(help="Pool to scale.")] = "rollout", output: Output = Format.TABLE) -> None:
    """Change the desired number of engines of a pool."""
    answer = _client(ctx, file).post(f"/v1/pools/{pool}/scale", {"desired": desired})
    if output is Format.JSON:
        listing.write_json(answer)
    else:
        out.print(f"pool {pool}: {desired} engines desired", highlight=False)


@app.command(context_settings=EXTRA)
def pools(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Pools of engines: how many are wanted, and how many there are."""
    _show(_client(ctx, file).items("/v1/pools"), ("name", "desired", "ready", "starting", "draining"), output)


@app.command(context_settings=EXTRA)
def engines(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Engines with their state and the version they serve."""
    _show(_client(ctx, file).items("/v1/engines"),
          ("id", "state", "version", "pull_apply_s", "pause_s", "updated_at", "reason"), output,
          ("pool", "host", "url", "pid", "applying", "epoch", "started_at"))


@app.command(context_settings=EXTRA)
def events(ctx: typer.Context, file: File = None, output: Output = Format.TABLE,
           limit: Annotated[int, typer.Option(min=1, help="Newest so many.")] = 50) -> None:
    """What happened, newest last."""
    _show(_client(ctx, file).items("/v1/events", most=limit)[::-1], ("at", "severity", "kind", "message"), output,
          ("subject", "data"))


@app.command(context_settings=EXTRA)
def doctor(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Check this machine and say how to mend what is wrong."""
    from elastic_rl import doctor as doctors
    findings = doctors.examine(load(ctx, file))
    _show([f.row() for f in findings], ("check", "verdict", "found", "mend"), output)
    if doctors.unfit(findings):
        raise typer.Exit(EXIT_MACHINE)


@app.command()
def bench(name: Annotated[str, typer.Argument(help="Measurement to run: dcs or loop.")],
          quick: Annotated[bool, typer.Option("--quick", help="Fewer samples and bytes.")] = False,
          size: Annotated[str, typer.Option(help="Bytes that a row moves, such as 64MiB; dcs only.")] = "",
          rows: Annotated[str, typer.Option(help="Ids of the rows to measure, such as P1,P3; dcs only.")] = "",
          write: Annotated[Path | None, typer.Option(help="Append the result to this Markdown file.")] = None,
          output: Output = Format.TABLE) -> None:
    """Measure something and compare it with its goal."""
    from elastic_rl import measure
    from elastic_rl.bench import BENCHES
    from elastic_rl.bench.options import Options, parse_size
    if name not in BENCHES:
        raise ConfigError(f"there is no bench {name!r}", hint=f"known: {', '.join(sorted(BENCHES))}")
    options = Options(quick=quick, size_bytes=parse_size(size) if size else 0, say=_tell,
                      rows=tuple(r.strip() for r in rows.split(",") if r.strip()))
    with _interruptible():
        found = BENCHES[name](options)
    if write is not None:
        measure.append_markdown(write, name, options.command(name), found)
    if output is Format.JSON:
        listing.write_json(measure.result(name, found))
    else:
        out.print(measure.table(name, found))


def _tell(line: str) -> None:
    """Progress, away from the result."""
    err.print(line, markup=False, highlight=False)


@config_app.command("show", context_settings=EXTRA)
def config_show(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """The configuration with everything applied, as YAML (or JSON)."""
    values = load(ctx, file).model_dump(mode="json")
    if output is Format.JSON:
        listing.write_json(values)
    else:
        sys.stdout.write(yaml.safe_dump(values, sort_keys=False))


@config_app.command("schema")
def config_schema() -> None:
    """Every key with its type, default and meaning, as JSON Schema."""
    listing.write_json(Config.model_json_schema())


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
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["versions"] and (len(args) == 1 or (args[1].startswith("-") and args[1] not in ("-h", "--help"))):
        args.insert(1, "ls")  # what one wants most often
    try:
        app(args=args)
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
