"""Commands that work on this machine: clusters, runs, benches, preflight checks and settings."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl import __version__
from elastic_rl.cli import follow, only, tables, test_hosts
from elastic_rl.cli.common import (
    EXTRA,
    File,
    Output,
    cluster_to_delete,
    cluster_to_start,
    cluster_to_stop,
    err,
    load,
    named_cluster,
    out,
    overrides,
    say,
)
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError, ElasticRLError

if TYPE_CHECKING:
    from elastic_rl.config import Config
    from elastic_rl.host.local_cluster import Cluster
    from elastic_rl.job.check import JobFinding

app = typer.Typer()
config_app = typer.Typer(no_args_is_help=True, help="Show the configuration or its schema.", rich_markup_mode=None)


# -- the cluster and the run -------------------------------------------------------------------------------------------
Address = Annotated[str, typer.Option("--address", metavar="IP", help=(
    "IP address of this host under which others reach the cluster, with TLS; a cluster with a name keeps it."))]
HostName = Annotated[str, typer.Option("--name", metavar="HOST", help=(
    "Name of this host in the cluster; else its host name."))]
Labels = Annotated[list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help=(
    "Label of this host, as `elastic-rl hosts` shows it; may be repeated. Those given take the place of all before; "
    "`--label=` removes all, and where none is given they stay."))]
PreemptionNotice = Annotated[str | None, typer.Option("--preemption-notice", metavar="PATH_OR_URL", help=(
    "Of a spot machine: where its provider announces that it takes the machine back. aws, gcp, azure, a URL or a path; "
    "empty: nowhere. The host is then drained."))]


@app.command(**EXTRA)
def up(ctx: typer.Context, file: File = None, address: Address = "", name: HostName = "", label: Labels = None,
       preemption_notice: PreemptionNotice = None,
       hosts: Annotated[int, typer.Option(min=0, max=200, metavar="N", show_default=False, help=(
           "So many hosts in namespaces of this machine, host-1 to host-N, to try several hosts out; needs root. "
           "0: as many as before."))] = 0,
       control_hosts: Annotated[int, typer.Option(min=0, max=200, metavar="N", show_default=False, help=(
           "With --hosts: so many of them, from host-1 on, have a member of etcd and a coordinator, such as 3 of them, "
           "any of which may then be lost. 0: as before; at first it is 1."))] = 0,
       insecure_network: Annotated[bool, typer.Option("--insecure-network", help=(
           "All users and hosts that reach the hosts of this cluster are trusted: jobs may use what talks without a "
           "password between hosts (train.queue=transfer_queue)."))] = False,
       foreground: Annotated[bool, typer.Option("--foreground", help=(
           "Stay until SIGTERM or Ctrl-C, which then suspends the cluster: the next `up` resumes its runs."))] = False,
       ) -> None:
    """Start a local cluster, or the parts of it that do not run. A running one keeps the settings that are not
    given.

    With --cluster=NAME it is one for any number of jobs, which `elastic-rl train --cluster=NAME` adds.

    With --foreground it is for what supervises it, such as systemd, Slurm or Kubernetes. When that command is killed,
    what it has started runs on, and the next one finds it; `elastic-rl down` ends it, too.

    With --hosts they share this machine, and nothing else: `test-hosts` powers them off and cuts them off."""
    from elastic_rl.host import cluster_settings
    from elastic_rl.host.joined_host import JoinedHost
    from elastic_rl.host.local_cluster import SAVE_GRACE_S
    if insecure_network:
        ctx.args.append("--coordinator.insecure_network=true")
    cluster, names_job = cluster_to_start(ctx, file, say=_say)
    if hosts or control_hosts or test_hosts.hosts_of(cluster).are_beside:
        if names_job or address or name or label or preemption_notice or foreground:
            raise ConfigError("hosts on this machine have names and addresses already, and no job yet", hint=(
                "leave out what is of one host; `elastic-rl train --cluster=NAME --job=NAME` adds a job"))
        _up_hosts(cluster, hosts, control_hosts)
        return
    before = cluster_settings.snapshot(cluster.paths.settings)
    with signals_interrupt(), cluster.in_foreground() if foreground else contextlib.nullcontext():
        with first_signal_interrupts():
            info = cluster.up(name=name, address=address, labels=_labels(label), preemption_notice=preemption_notice)
        try:
            if cluster.named and names_job:
                cluster, info = _admit(ctx, file, cluster, before)
            _print_up(cluster, info, with_job=names_job or not cluster.named)
            if foreground:
                JoinedHost(cluster, _say).follow()
                with ignore_signals():  # another command takes the cluster down: who supervises this one waits for it
                    _print_stopped(cluster.suspend())
        except KeyboardInterrupt:
            if not foreground:
                raise
            with ignore_signals():
                _say(f"suspending {cluster.cfg.cluster_name}: saving versions, at most {SAVE_GRACE_S:.0f} s a job")
                _print_stopped(cluster.suspend())


def _admit(ctx: typer.Context, file: Path | None, cluster: Cluster, before: bytes | None) -> tuple[Cluster, Any]:
    """Adds the job of the command line to a cluster with a name that this command has started. Where the job is refused
    the cluster keeps the settings that it had ``before``, if it had any."""
    try:
        of_job = named_cluster(ctx, file, say=_say)
        with first_signal_interrupts():
            return of_job, of_job.admit(resubmit=True)
    except ElasticRLError:
        if before is not None:
            cluster.restore_settings(before, of_cluster=True)
        raise


def _up_hosts(cluster: Cluster, count: int, control_hosts: int) -> None:
    """Brings up hosts in namespaces of this machine; 0: as many as there were, of which as many have etcd."""
    from elastic_rl.host import kept_state
    test = test_hosts.hosts_of(cluster)
    with first_signal_interrupts():
        info = test.up(count, control_hosts=control_hosts)
    out.print(f"up: {cluster.cfg.cluster_name}", highlight=False)
    _print_access(cluster.cfg, info, with_job=False)
    options = kept_state.cluster_options(cluster.cfg)
    for host in test.all():
        say(f"  {host.name:<11} {host.address}")
    say(f"  hosts       elastic-rl hosts {options}")
    say(f"  try faults  elastic-rl test-hosts power-off {test.all()[-1].name} {options}")


def _print_up(cluster: Cluster, info: Any, *, with_job: bool) -> None:
    """Says where everything of a cluster is that is up, and which runs go on."""
    out.print(f"up: {cluster.cfg.cluster_name}", highlight=False)
    _print_access(cluster.cfg, info, with_job=with_job)
    if not cluster.host.is_local:
        say(f"  join        elastic-rl node --join=FILE --address=IP, on another machine, with a copy of "
            f"{cluster.paths.join_file}")
    for job in map(cluster.of_job, cluster.jobs):
        if job.run.look().wanted:
            follow.say_goes_on(job)


@app.command(**EXTRA)
def node(ctx: typer.Context, join: Annotated[Path, typer.Option("--join", metavar="FILE", help=(
             "The file cluster.join in the folder of the cluster on its first host."))],
         address: Address = "", name: HostName = "", label: Labels = None, preemption_notice: PreemptionNotice = None,
         coordinator: Annotated[bool | None, typer.Option("--coordinator/--no-coordinator", show_default=False, help=(
             "Whether a coordinator runs here, too; else as before."))] = None,
         etcd: Annotated[bool | None, typer.Option("--etcd/--no-etcd", show_default=False, help=(
             "Whether a member of the cluster's own etcd runs here, too; else as before. With 3 or 5 members the "
             "cluster stands the loss of any 1 or 2 of their hosts."))] = None,
         grace: Annotated[float, typer.Option(min=0, max=86400, metavar="SECONDS", help=(
             "Time for what the host holds to move to others when this is told to end."))] = 60.0) -> None:
    """Make this machine a host of a cluster, until SIGTERM or Ctrl-C: it then leaves, once what it holds has moved to
    others. A second signal does not wait for that.

    The only setting is --run_dir. When this command is killed, what it has started runs on, and the next one finds
    it."""
    from elastic_rl.config import given as given_settings
    from elastic_rl.host.join_file import JoinFile
    from elastic_rl.host.joined_host import JoinedHost
    from elastic_rl.host.local_cluster import Cluster
    given = given_settings(None, overrides(ctx.args))
    if other := sorted(given.keys() - {"run_dir"}):
        raise ConfigError(f"a host that joins has the settings of its cluster, and no {', '.join(other)} of its own",
                          hint="give them to `elastic-rl up` on the cluster's first host")
    file = JoinFile.read(join.expanduser())
    cluster = Cluster(file.config(given.get("run_dir")), say=_say)
    with cluster.in_foreground():
        with signals_interrupt():
            with first_signal_interrupts():
                cluster.join(file, name=name, address=address, labels=_labels(label), coordinator=coordinator,
                             etcd=etcd, preemption_notice=preemption_notice)
            host = JoinedHost(cluster, _say)
            try:
                host.follow()
            except KeyboardInterrupt:
                _say(f"host {cluster.host.name} leaves cluster {file.cluster}, in at most {grace:g} s; once more: at "
                     "once")
                with contextlib.suppress(KeyboardInterrupt):
                    host.leave(grace)
        with ignore_signals():
            _print_stopped(cluster.down())


def _labels(given: Sequence[str] | None) -> dict[str, str] | None:
    """Labels as name=value; None where nothing is given. An empty one is no label, so that alone it removes all. Raises
    ConfigError."""
    from elastic_rl.config import LABEL, LABEL_VALUE
    for text in filter(None, given or ()):
        if not re.fullmatch(f"{LABEL}={LABEL_VALUE}", text):
            raise ConfigError(f"--label={text} is no label",
                              hint="write NAME=VALUE, of letters, digits and ._/-, at most 63 each; one option a label")
    return dict(text.split("=", 1) for text in given if text) if given else None


@app.command(**EXTRA)
def down(ctx: typer.Context, file: File = None,
         purge: Annotated[bool, typer.Option("--purge", help="Delete its state too: records and versions.")] = False,
         yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Stop every process of a cluster and its jobs, also those that a crash left behind. The jobs keep their state, and
    can be resumed."""
    if purge:
        _purge(cluster_to_delete(ctx, file, asks=not yes), yes=yes)
        return
    cluster = cluster_to_stop(ctx, file)
    jobs, hosts = cluster.jobs, test_hosts.hosts_of(cluster)
    _print_stopped(hosts.down() if hosts.are_beside else cluster.down())
    for job in map(cluster.of_job, jobs):
        _print_kept(job)


def _purge(cluster: Cluster, *, yes: bool) -> None:
    """Names what is deleted, asks unless ``yes``, then stops the job and deletes its state. Raises Abort on a no, and
    ConfigError where it cannot ask."""
    from elastic_rl.host import kept_state
    cfg, folders = cluster.cfg, kept_state.folders(cluster.cfg)
    for folder in folders:
        _progress(f"delete  {folder.path}  {tables.size(folder.nbytes)}: {folder.what}")
    for place in kept_state.in_cluster(cfg):
        _progress(f"delete  {place}")
    for place in kept_state.elsewhere(cfg):
        _progress(f"keep    {place}")
    if (folders or cluster.known) and not yes:
        if not (sys.stdin.isatty() and err.is_terminal):
            raise ConfigError(f"deleting the state of job {cfg.job} must be confirmed",
                              hint="there is no terminal to ask on: add --yes, and name the job with --job=NAME")
        typer.confirm(f"Stop job {cfg.job} and delete its state for good?", abort=True, err=True)
    _print_stopped(cluster.remove_job() if cluster.named else cluster.down(purge=True))
    deleted = [f"deleted     {folder.path}" for folder in folders]
    for line in deleted or [f"job {cfg.job} has no state in {cfg.run_dir}"]:
        out.print(tables.printable(line), highlight=False, markup=False, soft_wrap=True)


def _print_stopped(names: Sequence[str]) -> None:
    out.print("stopped: " + (", ".join(names) or "nothing was running"), highlight=False)


def _print_kept(cluster: Cluster) -> None:
    """Says what a stopped job keeps, and the commands that go on with it."""
    from elastic_rl.host import kept_state
    kept = [f"{f.path}  {tables.size(f.nbytes)}: {f.what}" for f in kept_state.folders(cluster.cfg)]
    kept += [*kept_state.in_cluster(cluster.cfg), *kept_state.elsewhere(cluster.cfg)] if cluster.known else []
    outcome = cluster.run.last_seen().outcome
    lines = [*([("run", outcome)] if outcome else []), *(("kept", line) for line in kept)]
    if kept and not kept_state.keeps_versions(cluster.cfg):
        lines.append(("lost", "its versions were in memory only, and are gone with the nodes"))
    lines += kept_state.commands(cluster.cfg) if kept else ()
    for name, line in lines:
        out.print(tables.printable(f"{name:<11} {line}"), highlight=False, markup=False, soft_wrap=True)


@app.command(**EXTRA)
def train(ctx: typer.Context, file: File = None,
          with_cluster: Annotated[bool, typer.Option("--with-cluster", help=(
              "Start a cluster first, and stop it at the end; the job keeps its state."))] = False,
          keep_up: Annotated[bool, typer.Option("--keep-up", help="Leave the cluster running.")] = False,
          detach: Annotated[bool, typer.Option("--detach", "-d", help="Start the run, and do not follow it.")] = False,
          faults: Annotated[bool, typer.Option("--faults", help="Kill and scale things during the run.")] = False,
          from_job: Annotated[str, typer.Option("--from-job", metavar="JOB", help=(
              "Begin a new job with the newest policy of this one, whose cluster is up."))] = "",
          part: Annotated[only.Only | None, typer.Option("--only", show_default=False, help=(
              "Debug one half of a run, and change nothing of the job. rollout: generate and reward its steps and keep "
              "their groups, without a trainer, as a job JOB-rollout-N. train: from steps that were kept "
              "(`train.keep_steps`), with ranks of this host, and without a cluster and engines."))] = None,
          from_steps: Annotated[Path | None, typer.Option("--from-steps", metavar="FOLDER", show_default=False, help=(
              "With --only train: a folder `kept_steps` of another job; else that of this one."))] = None,
          ) -> None:
    """Train on a cluster that is up, or on one for this run only; a job that was stopped resumes.

    On a cluster that is up the run goes on without its terminal: Ctrl-C asks whether to detach or to stop."""
    only.require(part, from_steps, with_cluster=with_cluster, keep_up=keep_up, detach=detach, faults=faults,
                 from_job=bool(from_job))
    if part is only.Only.TRAIN:
        with signals_interrupt():
            only.train(named_cluster(ctx, file).cfg, from_steps)
        return
    from elastic_rl.host import cluster_settings, inherited_model, kept_state, preflight
    from elastic_rl.host.local_cluster import Cluster
    from elastic_rl.host.paths import JobPaths
    from elastic_rl.job import check as job_check
    if detach and with_cluster and not keep_up:
        raise ConfigError("a run that is detached needs a cluster that stays up",
                          hint="add --keep-up; or `elastic-rl up`, then `elastic-rl train --detach`")
    cluster = named_cluster(ctx, file, say=_say)
    if part is only.Only.ROLLOUT:
        job, cluster = cluster.cfg.job, Cluster(only.rollout(cluster.cfg, with_cluster=with_cluster), say=_say)
        only.say_rollout(cluster.cfg, job)
    _require_unfinished(cluster)
    if test_hosts.hosts_of(cluster).are_beside and not with_cluster:
        raise typer.Exit(_train_on_hosts(cluster, faults=faults, from_job=from_job, detach=detach))
    if with_cluster and cluster.named:
        raise ConfigError(f"cluster {cluster.cfg.cluster} is not started for one run: it outlives its jobs",
                          hint=f"`elastic-rl up {kept_state.cluster_options(cluster.cfg)}`, then `elastic-rl train` "
                               "without --with-cluster")
    preflight.require_temporary(cluster.cfg)
    code = int(Exit.FAILED)
    is_new = (with_cluster and not cluster.known and not from_job
              and not inherited_model.folder(cluster.cfg).exists())
    if is_new:  # else the run does it, which alone knows what the job has begun with
        _say_warnings(job_check.require(cluster.cfg))
    before = cluster_settings.snapshot(JobPaths.of(cluster.cfg).submitted_settings) if cluster.known else None
    owned = cluster.owned() if with_cluster and not keep_up else contextlib.nullcontext(cluster.up_before)
    with signals_interrupt(), owned as was_up:
        try:
            with first_signal_interrupts():
                info = (cluster.up(resubmit=False) if with_cluster else
                        cluster.admit() if cluster.named else cluster.connect())
            code = _train(cluster, info, faults=faults, from_job=from_job, checked=is_new, detach=detach,
                          may_detach=not with_cluster or keep_up)
        except ElasticRLError:
            # A start that was refused must not change what the job has.
            if before is not None and (with_cluster or cluster.named):
                cluster.restore_settings(before)
            if with_cluster and was_up:
                keep_up = True
                err.print("the cluster, which was there before, keeps running", highlight=False)
            raise
        finally:
            if with_cluster and not keep_up:
                with ignore_signals():
                    _stop(cluster, after=sys.exception())
    if with_cluster and keep_up:
        out.print("the cluster keeps running", highlight=False)
        _print_access(cluster.cfg, info)
    raise typer.Exit(code)


def _require_unfinished(cluster: Cluster) -> None:
    """Raises ConfigError for a job that has done all its steps, before anything is started or recorded for it."""
    from elastic_rl.etcd.cluster_records import JobPhase
    from elastic_rl.job import run_start
    reading = cluster.run.look()
    if reading.phase is JobPhase.FINISHED and reading.step >= max(cluster.cfg.total_steps, 1):
        raise run_start.already_done(cluster.cfg, reading.step)


def _say_warnings(found: Sequence[JobFinding]) -> None:
    for finding in found:
        if finding.hint or finding.fault:
            _progress(f"{_state(finding)}  {finding.part}: {finding.fault or finding.detail}")
            _progress(f"      → {finding.hint}")


def _stop(cluster: Cluster, *, after: BaseException | None) -> None:
    """Stops a cluster. Where that fails too, ``after`` an error, that first one is the error of the command."""
    from elastic_rl.host.local_cluster import SAVE_GRACE_S
    _say(f"stopping the cluster: saving versions, at most {SAVE_GRACE_S:.0f} s")
    try:
        cluster.down()
    except ElasticRLError as e:
        if after is None:
            raise
        _progress(f"the cluster cannot be stopped: {e.message}")
        return
    _print_kept(cluster)


def _train(cluster: Cluster, info: Any, *, faults: bool, from_job: str, checked: bool, detach: bool, may_detach: bool
           ) -> int:
    """Submits the run, and follows it unless it is detached at once. ``checked``: its checks were made. ``may_detach``:
    whether it goes on without this process. Returns the exit code."""
    cluster.submit(faults=faults, from_job=from_job, checked=checked)
    if detach:
        follow.say_goes_on(cluster)
        return Exit.OK
    return follow.follow(cluster, info, may_detach=may_detach)


def _train_on_hosts(cluster: Cluster, *, faults: bool, from_job: str, detach: bool) -> int:
    """Submits the run on the first of the hosts in namespaces of this machine, and follows it from here unless it is
    detached at once. Returns the exit code."""
    with signals_interrupt():
        test_hosts.hosts_of(cluster).submit(faults=faults, from_job=from_job)
        if detach:
            follow.say_goes_on(cluster)
            return Exit.OK
        return follow.follow(cluster, cluster.connect(), may_detach=True)


def _print_access(cfg: Config, info: Any, *, with_job: bool = True) -> None:
    from elastic_rl.host import kept_state
    from elastic_rl.host.paths import ClusterPaths
    options = kept_state.options(cfg)
    lines = [f"admin API   {' '.join(info.coordinators)}", f"etcd        {' '.join(info.etcd_endpoints)}",
             f"tokens      {info.tokens_file}", *([f"authority   {info.ca_file}"] if info.ca_file else []),
             f"logs        {ClusterPaths.of(cfg).logs}",
             *([f"dashboard   elastic-rl dashboard {options}", f"status      elastic-rl status {options}",
                f"scale       elastic-rl scale 3 {options}"] if with_job else
               [f"train       elastic-rl train {kept_state.cluster_options(cfg)} --job=NAME"]),
             f"stop        elastic-rl down {kept_state.cluster_options(cfg)}"]
    for line in lines:
        out.print("  " + line, highlight=False, markup=False, soft_wrap=True)


@app.command(**EXTRA)
def doctor(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Check this machine, and say how to fix what is wrong."""
    from elastic_rl.host import preflight
    findings = preflight.examine(load(ctx, file))
    tables.show(out, [f.row() for f in findings], ("check", "verdict", "found", "fix"), output)
    if preflight.any_failed(findings):
        raise typer.Exit(Exit.PREFLIGHT)


@app.command(**EXTRA)
def bench(ctx: typer.Context,
          name: Annotated[str, typer.Argument(help="Bench to run: control, dcs, loop or recovery.")],
          quick: Annotated[bool, typer.Option("--quick", help="Fewer samples and bytes.")] = False,
          size: Annotated[str, typer.Option(help="Bytes that a row moves, such as 64MiB; dcs only.")] = "",
          rows: Annotated[str, typer.Option(help="Ids of the rows to measure, such as P1-pull-8,P3.")] = "",
          write: Annotated[Path | None, typer.Option(help="Append the results to this Markdown file.")] = None,
          output: Output = Format.TABLE) -> None:
    """Run a bench, and compare its results with their goals.

    Each row is printed, and written, as soon as it is measured; Ctrl-C keeps those. The bench loop takes settings of
    its job as --key.sub=value."""
    from elastic_rl.bench import BENCHES, Benches, measurement
    from elastic_rl.bench.options import Options, parse_size
    from elastic_rl.bench.recorder import MarkdownFile, Printer, Recorder
    benches: Benches = ctx.obj or BENCHES
    if name not in benches.by_name:
        raise ConfigError(f"there is no bench {name!r}", hint=f"known: {', '.join(sorted(benches.by_name))}")
    options = Options(program=benches.program, quick=quick, size_bytes=parse_size(size) if size else 0, say=_progress,
                      rows=tuple(r.strip() for r in rows.split(",") if r.strip()), settings=tuple(overrides(ctx.args)))
    file = MarkdownFile(write, name, options.command(name)) if write is not None else None
    recorder = Recorder(Printer(_progress if output is Format.JSON else _print_row), *([file] if file else []))
    complete = False
    try:
        with first_signal_interrupts():
            benches.by_name[name](options, recorder.emit)
        complete = True
        if file is not None:
            file.finish()
    finally:
        if output is Format.JSON and (complete or recorder.rows):
            tables.write_json(measurement.result(name, recorder.rows, complete=complete))


def _print_row(line: str) -> None:
    """Prints a row to stdout, in one line also where the terminal is narrow."""
    out.print(tables.printable(line), markup=False, highlight=False, soft_wrap=True)


def _progress(line: str) -> None:
    """Prints progress to stderr, apart from the result."""
    say(line, to_err=True)


@config_app.command("show", **EXTRA)
def config_show(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Show the configuration with all settings applied, as YAML (or JSON), without secrets."""
    from elastic_rl.config import secrets, yaml_text
    values = secrets.redacted(load(ctx, file).model_dump(mode="json"))
    if output is Format.JSON:
        tables.write_json(values)
    else:
        sys.stdout.write(yaml_text.dump(values))


@config_app.command("check", **EXTRA)
def config_check(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Say everything that is wrong with a job's settings, plug-ins, model and data; code 2 when something is. Starts
    nothing. It runs the plug-ins: prompts are read, and the reward is asked what the data's own answers are worth."""
    from dataclasses import asdict

    from elastic_rl.job import check as job_check
    cfg = load(ctx, file)
    found = []
    for finding in job_check.check(cfg):
        found.append(finding)
        if output is not Format.JSON:
            _print_row(f"{_state(finding):<6} {finding.part}: {finding.fault or finding.detail}")
            if finding.hint:
                _print_row(f"       → {finding.hint}")
    if output is Format.JSON:
        tables.write_json([asdict(f) for f in found])
    if any(f.fault for f in found):
        raise typer.Exit(Exit.USAGE)


def _state(finding: JobFinding) -> str:
    return "FAULT" if finding.fault else "warn" if finding.hint else "skip" if finding.skipped else "ok"


@config_app.command("schema")
def config_schema() -> None:
    """Show every key with its type, default and meaning, as JSON Schema."""
    from elastic_rl.config import Config
    tables.write_json(Config.model_json_schema())


@config_app.command("explain")
def config_explain(key: Annotated[str, typer.Argument(metavar="KEY", help=(
        "A setting, such as train.lr, or a section, such as train."))]) -> None:
    """Say what a setting does, what it may be and what its default is; of a section, what its settings are for."""
    from elastic_rl.config import reference
    _say(reference.explain(key))


@app.command()
def version() -> None:
    """Print the version of elastic-rl."""
    sys.stdout.write(__version__ + "\n")


# -- signals -----------------------------------------------------------------------------------------------------------
def _say(line: str) -> None:
    out.print(line, markup=False, highlight=False)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt within the block, as Ctrl-C does, so that every ``finally`` runs."""
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handlers(interrupt, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def first_signal_interrupts() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt within the block; later ones do nothing, so that
    they do not interrupt the cleanup."""
    interrupted = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    with _handlers(interrupt, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def ignore_signals() -> Iterator[None]:
    """Signals do nothing within the block: a second Ctrl-C does not interrupt the cleanup after the first."""
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
