"""``elastic-rl chaos``: runs the chaos suite, against a cluster of its own or one that runs.

The suite (``chaos_tests``) and what it imports are loaded by the commands that need them.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import EXTRA, File, Output, err, find_cluster, location, names_target, out, overrides, say
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError

if TYPE_CHECKING:
    from chaos_tests.abort import AbortSwitch
    from chaos_tests.blast_radius import BlastRadius
    from chaos_tests.nemesis.schedule import Schedule
    from chaos_tests.runner import Outcome
    from chaos_tests.target import Target

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=(
    "Prove that jobs recover from faults: on a cluster of its own, in simulated worlds, or on your cluster."))
_COLUMNS = ("kind", "name", "where", "what")
_SEEDS = 1_000_000
_PROBLEMS_SHOWN = 40

Seed = Annotated[int | None, typer.Option("--seed", min=0, show_default=False, help=(
    "Seed of the faults and of the job; else one is chosen, and printed."))]
Minutes = Annotated[float, typer.Option("--minutes", min=0.0, metavar="M", show_default=False, help=(
    "Run so long, with faults at seconds of it; else as long as the scenario says."))]
Steps = Annotated[int, typer.Option("--steps", min=0, metavar="N", show_default=False, help=(
    "Run so many steps, with faults at steps of them."))]
Faults = Annotated[int | None, typer.Option("--faults", min=0, metavar="N", show_default=False, help=(
    "Number of faults; else in proportion to the length, and 5 at most on a cluster that runs."))]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", show_default=False, help=(
    "Folder of the results; else a new one in RUN_DIR/chaos."))]
Baseline = Annotated[bool | None, typer.Option("--baseline/--no-baseline", show_default=False, help=(
    "Whether the same job runs without faults first; else as the scenario says."))]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the schedule, and start nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a cluster that runs is struck.")]
Only = Annotated[str, typer.Option("--only", metavar="PARTS", help=(
    "Of a cluster that runs, strike only these: engines, trainer, roles, driver, router, coordinators, dcs, etcd, "
    "hosts, with commas in between. Without it all but etcd and hosts, which have to be named."))]
AtOnce = Annotated[int, typer.Option("--at-once", min=1, metavar="N", help=(
    "Of a cluster that runs, most faults at once."))]
AllowLast = Annotated[bool, typer.Option("--allow-last", help=(
    "Of a cluster that runs, strike also the last replica of a part: the job pauses until it is replaced."))]
RecoveryMinutes = Annotated[float, typer.Option("--recovery-minutes", min=0.1, metavar="M", help=(
    "Of a cluster that runs, abort when the job has not recovered from a fault after so long."))]


# -- what there is -----------------------------------------------------------------------------------------------------
@app.command("list")
def list_(output: Output = Format.TABLE) -> None:
    """List the scenarios, the faults that they draw from, and the simulated worlds."""
    from chaos_tests.faults.catalogue import FAULTS
    from chaos_tests.scenarios import SCENARIOS
    from chaos_tests.sim.worlds import WORLDS
    rows: list[dict[str, Any]] = [
        {"kind": "scenario", "name": s.name, "where": s.tier.value, "what": s.what, "steps": s.steps,
         "minutes": s.minutes, "faults": s.count, "baseline": s.baseline, "settings": dict(s.settings)}
        for s in SCENARIOS.values()]
    rows += [{"kind": "fault", "name": name, "where": entry.part.value, "what": entry.what, "weight": entry.weight,
              "takes_all": entry.takes_all} for name, entry in FAULTS.items()]
    rows += [{"kind": "world", "name": name, "where": "sim", "what": world.what} for name, world in WORLDS.items()]
    tables.show(out, rows, _COLUMNS, output)


# -- runs --------------------------------------------------------------------------------------------------------------
@app.command("run", **EXTRA)
def run(ctx: typer.Context,
        scenario: Annotated[str, typer.Option("--scenario", metavar="NAME", help="As `chaos list` shows it.")],
        seed: Seed = None, minutes: Minutes = 0.0, steps: Steps = 0, faults: Faults = None, file: File = None,
        out_folder: Out = None, baseline: Baseline = None, dry_run: DryRun = False, yes: Yes = False, only: Only = "",
        at_once: AtOnce = 1, allow_last: AllowLast = False, recovery_minutes: RecoveryMinutes = 10.0,
        output: Output = Format.TABLE) -> None:
    """Run a scenario: a job, faults that a seed draws, and a verdict on every rule; code 1 where one is broken.

    Without --job it brings up a cluster of its own, with the job of the scenario, on which settings may be put as
    --key.sub=value, and takes it down afterwards. With --job=NAME, or --cluster=NAME, it strikes that job, which runs
    already and goes on afterwards: it says what it may strike, and asks. Ctrl-C, or `chaos abort FOLDER`, ends it and
    undoes what can be undone."""
    _require_scenario(scenario)
    if minutes and steps:
        raise ConfigError("a run is as long as --minutes or as --steps says", hint="leave one of them out")
    chosen = seed if seed is not None else secrets.randbelow(_SEEDS)
    attaches = names_target(ctx, file)

    def schedule(target: Target | None, radius: BlastRadius | None) -> Schedule:
        return _drawn(scenario, chosen, minutes=minutes, steps=steps, faults=faults, target=target, radius=radius,
                      settings=() if attaches else _settings(ctx))

    if attaches:
        radius = _radius(only, at_once, faults, allow_last)
        _attached(ctx, file, schedule, radius, out_folder, recovery_minutes, dry_run=dry_run, yes=yes, output=output)
    else:
        if file is not None:
            raise ConfigError("a scenario has the settings of its job", hint=(
                "give others as --key.sub=value; or name a job that runs with --job=NAME"))
        _own(ctx, schedule(None, None), out_folder, baseline, dry_run=dry_run, output=output)


@app.command("replay", **EXTRA)
def replay(ctx: typer.Context, path: Annotated[Path, typer.Argument(metavar="FOLDER|SCHEDULE", help=(
               "Folder of the results of a run, or its schedule.json."))],
           file: File = None, out_folder: Out = None, baseline: Baseline = None, dry_run: DryRun = False,
           yes: Yes = False, only: Only = "", at_once: AtOnce = 1, allow_last: AllowLast = False,
           recovery_minutes: RecoveryMinutes = 10.0, output: Output = Format.TABLE) -> None:
    """Run a schedule again: the same faults, at the same steps or seconds, of the same job.

    With --job=NAME it strikes that job, which runs already, as `chaos run` does."""
    from chaos_tests import runner
    schedule = runner.schedule_at(path)
    if not names_target(ctx, file):
        _own(ctx, replace(schedule, settings=(*schedule.settings, *_settings(ctx))), out_folder, baseline,
             dry_run=dry_run, output=output)
        return
    if not schedule.by_time:
        raise ConfigError("this schedule is by the steps of a job of its own", hint=(
            "a job that runs is struck by time: `elastic-rl chaos run --minutes` makes a schedule for it"))
    radius = _radius(only, at_once, schedule.faults, allow_last)
    _attached(ctx, file, lambda target, radius: schedule, radius, out_folder, recovery_minutes, dry_run=dry_run,
              yes=yes, output=output)


@app.command("shrink")
def shrink(path: Annotated[Path, typer.Argument(metavar="FOLDER|SCHEDULE", help=(
               "Folder of the results of a run that has failed, or its schedule.json."))],
           tries: Annotated[int, typer.Option("--tries", min=1, help="Most runs.")] = 20,
           out_folder: Out = None, output: Output = Format.TABLE) -> None:
    """Look for fewer faults with which a schedule still fails, by running parts of it, on clusters of their own."""
    from chaos_tests import runner
    from chaos_tests.nemesis.schedule import shrunk
    schedule = runner.schedule_at(path)
    runner.scenario_of(schedule)
    folder = out_folder or _new_folder(schedule, Path("runs"), "shrink")
    folder.mkdir(parents=True, exist_ok=True)
    runs = 0

    def fails(part: Schedule) -> bool:
        nonlocal runs
        runs += 1
        outcome = _run_to_end(lambda switch: runner.run(part, folder / f"try-{runs}", baseline=False, say=_progress,
                                                        switch=switch))
        if outcome.aborted:
            raise typer.Exit(Exit.INTERRUPTED)
        _progress(f"try {runs}: {part.faults} faults: {'it fails' if outcome.wrong else 'it passes'}")
        return bool(outcome.wrong)

    found = shrunk(schedule, fails, tries=tries)
    (folder / runner.SCHEDULE).write_text(found.to_json(), encoding="utf-8")
    if output is Format.JSON:
        tables.write_json({"faults": found.faults, "of": schedule.faults, "runs": runs,
                           "schedule": str(folder / runner.SCHEDULE)})
        return
    say(f"{found.faults} of {schedule.faults} faults are left after {runs} runs")
    say(f"again    elastic-rl chaos replay {folder / runner.SCHEDULE}")


@app.command("abort")
def abort(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the results of the run.")]) -> None:
    """End a run, and undo what can be undone: processes that it has stopped go on. Also where the run itself was
    killed."""
    from chaos_tests import abort as switch
    done = switch.abort(folder)
    if done is None:
        say("the run ends, and undoes what can be undone")
        return
    say("the process of that run has ended before" if not done else "the process of that run was killed; undone now:")
    for line in done:
        say(f"  {line}")


@app.command("check")
def check(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the results of a run.")],
          output: Output = Format.TABLE) -> None:
    """Judge a run again by its log, which may have been made on another machine; code 1 where a rule is broken."""
    from chaos_tests import report, runner
    if not (folder / report.EVENTS).exists():
        raise ConfigError(f"there is no {report.EVENTS} in {folder}", hint="name a folder that `chaos run` has written")
    try:
        outcome = runner.outcome_of(folder)
    except ValueError as e:
        raise ConfigError(str(e)) from e
    _show(outcome, output)


# -- without real parts ------------------------------------------------------------------------------------------------
@app.command("sim")
def sim(seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each world.")] = 200,
        first: Annotated[int, typer.Option("--first", min=0, help="The first seed.")] = 0,
        worlds: Annotated[list[str] | None, typer.Option("--worlds", metavar="NAME", show_default=False, help=(
            "Only this world; may be repeated."))] = None,
        minutes: Annotated[float, typer.Option("--minutes", min=0.0, help="Begin no further run after so long.")
                           ] = float("inf"),
        jobs: Annotated[int, typer.Option("--jobs", min=0, help="Processes; 0: one for each core.")] = 0,
        coverage: Annotated[bool, typer.Option("--coverage", help=(
            "Say how often each kind of fault, step and branch of a world happened, and what never did."))] = False,
        ) -> None:
    """Run simulated worlds with many seeds; code 1 where a rule is broken."""
    from chaos_tests.sim import command, workers
    from chaos_tests.sim.worlds import WORLDS
    names = worlds or [*WORLDS]
    if unknown := [name for name in names if name not in WORLDS]:
        raise ConfigError(f"there are no worlds {', '.join(unknown)}", hint=f"known: {', '.join(WORLDS)}")
    logging.disable()  # what the product logs in worlds that fail is expected
    if command.run_worlds(names, range(first, first + seeds), minutes, say, jobs=jobs or workers.cores(),
                          coverage=coverage):
        raise typer.Exit(Exit.FAILED)


@app.command("selftest")
def selftest(seeds: Annotated[int, typer.Option("--seeds", min=1, help="Most runs for each bug.")] = 600) -> None:
    """Plant bugs into the product, each of which the suite must catch; code 1 where it misses one."""
    from chaos_tests.sim import command
    logging.disable()  # what the product logs in worlds that fail is expected
    if command.selftest(seeds, say):
        raise typer.Exit(Exit.FAILED)


# -- a cluster of its own, or one that runs ----------------------------------------------------------------------------
def _require_scenario(name: str) -> None:
    from chaos_tests.scenarios import SCENARIOS
    if name not in SCENARIOS:
        raise ConfigError(f"there is no scenario {name!r}", hint=f"known: {', '.join(SCENARIOS)}")


def _settings(ctx: typer.Context) -> list[str]:
    """The settings of a command line for the job of a scenario: its folder is that of the results."""
    return [word for word in overrides(ctx.args) if not word.startswith("--run_dir=")]


def _radius(only: str, at_once: int, faults: int | None, allow_last: bool) -> BlastRadius:
    from chaos_tests import blast_radius
    usual = blast_radius.BlastRadius()
    return blast_radius.BlastRadius(parts=blast_radius.parts(only), at_once=at_once, allow_last=allow_last,
                                    faults=usual.faults if faults is None else faults)


def _drawn(scenario: str, seed: int, *, minutes: float, steps: int, faults: int | None, target: Target | None,
           radius: BlastRadius | None, settings: Sequence[str]) -> Schedule:
    from chaos_tests import blast_radius
    from chaos_tests.scenarios import SCENARIOS
    of, allowed = SCENARIOS[scenario], None
    if target is not None and radius is not None:
        if steps or not (minutes or of.minutes):
            raise ConfigError("a job that runs is struck by time", hint="give --minutes")
        of = replace(of, together=of.together if radius.at_once > 1 else 0.0)
        allowed, _ = radius.allowed(of.faults, blast_radius.replicas_of(target.context()))
        faults = min(radius.faults, of.usual_count(minutes=minutes)) if faults is None else faults
    try:
        return of.schedule(seed, steps=steps, minutes=minutes, faults=faults, only=allowed, settings=settings)
    except ValueError as e:
        raise ConfigError(f"no schedule can be drawn: {e}", hint="give fewer --faults, or a longer run") from e


def _own(ctx: typer.Context, schedule: Schedule, folder: Path | None, baseline: bool | None, *, dry_run: bool,
         output: Format) -> None:
    from chaos_tests import abort, runner
    if dry_run:
        sys.stdout.write(schedule.to_json())
        return
    folder = folder or _new_folder(schedule, location(ctx, None).run_dir)
    for killed, done in abort.undo_of_killed_runs(folder.parent).items():
        _progress(f"undone of the run in {killed}, which was killed: {', '.join(done)}")
    _progress(f"scenario {schedule.scenario}, seed {schedule.seed}: the results go to {folder}")
    _show(_run_to_end(lambda switch: runner.run(schedule, folder, baseline=baseline, say=_progress, switch=switch)),
          output)


def _attached(ctx: typer.Context, file: Path | None, schedule_of: Callable[[Target, BlastRadius], Schedule],
              radius: BlastRadius, folder: Path | None, recovery_minutes: float, *, dry_run: bool, yes: bool,
              output: Format) -> None:
    from chaos_tests import abort, blast_radius, runner
    from chaos_tests.target import running_cluster
    with running_cluster(find_cluster(ctx, file)) as target:
        schedule = schedule_of(target, radius)
        replicas = blast_radius.replicas_of(target.context())
        if replicas[blast_radius.Part.HOSTS] > 1:  # a pid of a record may be another process's here
            raise ConfigError("a job that runs can be struck on a cluster of one host only, and this one has "
                              f"{replicas[blast_radius.Part.HOSTS]}",
                              hint="leave --job out: a cluster is made for the run")
        _, refused = radius.allowed({name: 1.0 for strike in schedule.strikes for name in strike.faults}, replicas)
        if refused:
            raise ConfigError("the schedule strikes what is out of the blast radius: " + "; ".join(
                f"{name}: {why}" for name, why in sorted(refused.items())),
                hint="--only names the parts that may be struck, --allow-last allows the last replica of one")
        if dry_run:
            sys.stdout.write(schedule.to_json())
            return
        folder = folder or _new_folder(schedule, target.cfg.run_dir)
        for killed, done in abort.undo_of_killed_runs(folder.parent).items():
            _progress(f"undone of the run in {killed}, which was killed: {', '.join(done)}")
        _say_strikes(schedule, radius, target, replicas)
        _progress(f"the results go to {folder}; `elastic-rl chaos abort {folder}`, or Ctrl-C, ends it")
        if not yes:
            _confirm(target.cfg.job)
        limits = runner.Limits(
            overlap=max(1, radius.at_once // max((len(s.faults) for s in schedule.strikes), default=1)),
            recovery_s=60.0 * recovery_minutes, aborts_itself=True,
            guard=lambda context: blast_radius.guarded(radius, context))
        _show(_run_to_end(lambda switch: runner.run_attached(schedule, folder, target, limits, say=_progress,
                                                             switch=switch)), output)


def _say_strikes(schedule: Schedule, radius: BlastRadius, target: Target, replicas: Any) -> None:
    """Prints exactly what will be struck."""
    from chaos_tests.faults.catalogue import FAULTS
    _progress(f"{target.name} will be struck with {schedule.faults} faults in {schedule.minutes:g} minutes, "
              f"{radius.at_once} at once at most:")
    for strike in schedule.strikes:
        for name in strike.faults:
            entry = FAULTS[name]
            count = replicas.get(entry.part, 0)
            _progress(f"  {strike.second:6.0f} s  {name:<22} {entry.what} ({entry.part.value}: {count} now)")


def _confirm(job: str) -> None:
    if not (sys.stdin.isatty() and err.is_terminal):
        raise ConfigError(f"striking job {job} must be confirmed", hint="there is no terminal to ask on: add --yes")
    typer.confirm(f"Strike job {job}?", abort=True, err=True)


def _run_to_end(run: Callable[[Callable[[AbortSwitch], None]], Outcome]) -> Outcome:
    """Calls ``run`` with what it calls with its abort switch, which a signal then uses."""
    switches = list[Any]()
    with _signals(lambda name: [switch.request(name) for switch in switches]):
        return run(switches.append)


@contextmanager
def _signals(on_signal: Callable[[str], object]) -> Iterator[None]:
    """Within the block, SIGINT, SIGTERM and SIGHUP end nothing but call ``on_signal``: a cluster that is being brought
    up or taken down is not left half done."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, frame: on_signal(signal.Signals(number).name)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _new_folder(schedule: Schedule, run_dir: Path, what: str = "") -> Path:
    words = [schedule.scenario, str(schedule.seed), *([what] if what else []), time.strftime("%m%d-%H%M%S")]
    return run_dir.resolve() / "chaos" / "-".join(words)


def _show(outcome: Outcome, output: Format) -> None:
    """Prints the outcome of a run, and ends the command with its code."""
    again = f"elastic-rl chaos replay {outcome.folder / 'schedule.json'}"
    if output is Format.JSON:
        tables.write_json({**asdict(outcome), "folder": str(outcome.folder), "failed": outcome.failed, "again": again})
    else:
        for line in outcome.wrong[:_PROBLEMS_SHOWN]:
            say(f"VIOLATION  {line}")
        if len(outcome.wrong) > _PROBLEMS_SHOWN:
            say(f"and {len(outcome.wrong) - _PROBLEMS_SHOWN} more")
        say(f"aborted: {outcome.aborted}" if outcome.aborted else
            "every rule was kept" if not outcome.wrong else f"{len(outcome.wrong)} violations")
        say(f"results  {outcome.folder}")
        say(f"again    {again}")
    if outcome.failed:
        by_signal = outcome.aborted in {s.name for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        raise typer.Exit(Exit.INTERRUPTED if by_signal else Exit.FAILED)


def _progress(line: str) -> None:
    """Nobody may be there to read it: the run goes on, and takes down what it has brought up."""
    with suppress(OSError):
        say(line, to_err=True)
