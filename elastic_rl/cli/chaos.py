"""``elastic-rl chaos``: runs the chaos suite, against a cluster of its own or one that runs.

The suite (``chaos_tests``) and what it imports are loaded by the commands that need them.
"""

from __future__ import annotations

import logging
import os
import secrets
import shlex
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
from elastic_rl.cli.common import (
    EXTRA,
    URL_ENV,
    File,
    Output,
    err,
    find_cluster,
    location,
    names_target,
    out,
    overrides,
    say,
)
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError
from elastic_rl.runtime.files import os_error_text, replace_file
from elastic_rl.runtime.words import counted

if TYPE_CHECKING:
    from chaos_tests.abort import AbortSwitch
    from chaos_tests.blast_radius import BlastRadius
    from chaos_tests.nemesis.schedule import Schedule
    from chaos_tests.results import Outcome
    from chaos_tests.target import Target
    from elastic_rl.config import Config

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=(
    "Prove that jobs recover from faults: on a cluster of its own, in simulated worlds, or on your cluster."))
_COLUMNS = ("kind", "name", "where", "what")
_SEEDS = 1_000_000
_PROBLEMS_SHOWN = 40
_MOST_FAULTS, _MOST_STEPS, _MOST_MINUTES = 10_000, 10_000_000, 60_000.0
_OF_TARGETS = ("only", "at_once", "allow_last", "yes", "recovery_minutes")
"""Options of a run against a cluster that runs."""
_WIDER = "--only names the parts that may be struck, --allow-last allows the last replica of one"
_WHERE = ("--run_dir", "--job", "--cluster")
"""Settings that say where a job is."""


def _folder(text: str) -> Path:
    """Refuses the empty name: of a variable that is not set, it would be the present folder."""
    if not text.strip():
        raise typer.BadParameter("the name of the folder is empty")
    return Path(text)


Seed = Annotated[int | None, typer.Option("--seed", min=0, show_default=False, help=(
    "Seed of the faults and of the job; else one is chosen, and printed."))]
Minutes = Annotated[float, typer.Option("--minutes", min=0.0, max=_MOST_MINUTES, metavar="M", show_default=False, help=(
    "Run so long, with faults at seconds of it; else as long as the scenario says."))]
Steps = Annotated[int, typer.Option("--steps", min=0, max=_MOST_STEPS, metavar="N", show_default=False, help=(
    "Run so many steps, with faults at steps of them."))]
Faults = Annotated[int | None, typer.Option("--faults", min=0, max=_MOST_FAULTS, metavar="N", show_default=False, help=(
    "Number of faults; else in proportion to the length, and 5 at most on a cluster that runs."))]
MostFaults = Annotated[int | None, typer.Option("--faults", min=0, max=_MOST_FAULTS, metavar="N", show_default=False,
                                                help="Of a cluster that runs, most faults in the run; else 5.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", parser=_folder, show_default=False, help=(
    "Folder of the results; else a new one in RUN_DIR/chaos."))]
Baseline = Annotated[bool | None, typer.Option("--baseline/--no-baseline", show_default=False, help=(
    "Whether the same job runs without faults first; else as the scenario says."))]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the schedule, and start nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a cluster that runs is struck.")]
Only = Annotated[str | None, typer.Option("--only", show_default=False, metavar="PARTS", help=(
    "Of a cluster that runs, strike only these: engines, trainer, roles, driver, run, router, ray, coordinators, dcs, "
    "etcd, hosts, api, with commas in between. Without it all but etcd and hosts, which have to be named."))]
AtOnce = Annotated[int, typer.Option("--at-once", min=1, metavar="N", help=(
    "Of a cluster that runs, most faults at once."))]
AllowLast = Annotated[bool, typer.Option("--allow-last", help=(
    "Of a cluster that runs, strike also the last replica of a part: the job pauses until it is replaced."))]
RecoveryMinutes = Annotated[float, typer.Option("--recovery-minutes", min=0.1, max=_MOST_MINUTES, metavar="M", help=(
    "Of a cluster that runs, abort when the job has not recovered from a fault after so long."))]


# -- what there is -----------------------------------------------------------------------------------------------------
@app.command("list")
def list_(output: Output = Format.TABLE) -> None:
    """List the scenarios, the faults that they draw from, their traffic, and the simulated worlds."""
    from chaos_tests.faults.catalogue import FAULTS
    from chaos_tests.scenarios import SCENARIOS
    from chaos_tests.sim.worlds import WORLDS
    from chaos_tests.traffic.workloads import WORKLOADS
    rows: list[dict[str, Any]] = [
        {"kind": "scenario", "name": s.name, "where": s.tier.value, "what": s.what, "steps": s.steps,
         "minutes": s.minutes, "faults": s.count, "baseline": s.baseline, "settings": dict(s.settings),
         "traffic": [*s.traffic]}
        for s in SCENARIOS.values()]
    rows += [{"kind": "fault", "name": name, "where": entry.part.value, "what": entry.what, "weight": entry.weight,
              "takes_all": entry.takes_all} for name, entry in FAULTS.items()]
    rows += [{"kind": "traffic", "name": name, "what": load.what, "where": ", ".join(sorted(
        {s.tier.value for s in SCENARIOS.values() if name in s.traffic}))} for name, load in WORKLOADS.items()]
    rows += [{"kind": "world", "name": name, "where": "sim", "what": world.what} for name, world in WORLDS.items()]
    tables.show(out, rows, _COLUMNS, output)


# -- runs --------------------------------------------------------------------------------------------------------------
@app.command("run", **EXTRA)
def run(ctx: typer.Context,
        scenario: Annotated[str, typer.Option("--scenario", metavar="NAME", help="As `chaos list` shows it.")],
        seed: Seed = None, minutes: Minutes = 0.0, steps: Steps = 0, faults: Faults = None, file: File = None,
        out_folder: Out = None, baseline: Baseline = None, dry_run: DryRun = False, yes: Yes = False, only: Only = None,
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
    _require_effect(ctx, attaches)

    def schedule(target: Target | None, radius: BlastRadius | None) -> Schedule:
        return _drawn(scenario, chosen, minutes=minutes, steps=steps, faults=faults, target=target, radius=radius,
                      settings=() if attaches else _settings(ctx))

    if attaches:
        radius = _radius(only, at_once, faults, allow_last)
        _attached(ctx, file, schedule, radius, out_folder, recovery_minutes, dry_run=dry_run, yes=yes, output=output)
    else:
        _require_no_file(file)
        _own(ctx, replace(schedule(None, None), baseline=baseline), out_folder, dry_run=dry_run, output=output)


@app.command("replay", **EXTRA)
def replay(ctx: typer.Context, path: Annotated[Path, typer.Argument(metavar="FOLDER|SCHEDULE", parser=_folder, help=(
               "Folder of the results of a run, or its schedule.json."))],
           file: File = None, out_folder: Out = None, baseline: Baseline = None, dry_run: DryRun = False,
           yes: Yes = False, only: Only = None, at_once: AtOnce = 1, faults: MostFaults = None,
           allow_last: AllowLast = False, recovery_minutes: RecoveryMinutes = 10.0,
           output: Output = Format.TABLE) -> None:
    """Run a schedule again: the same faults, at the same steps or seconds, of the same job.

    With --job=NAME it strikes that job, which runs already, as `chaos run` does."""
    from chaos_tests import results
    from elastic_rl.config import secrets
    schedule, attaches = results.schedule_at(path), names_target(ctx, file)
    _require_effect(ctx, attaches, *(["faults"] if not attaches else []))
    if not attaches:
        _require_no_file(file)
        given = _settings(ctx)
        keys = {word.partition("=")[0] for word in given}
        kept = [word for word in schedule.settings if word.partition("=")[0] not in keys]
        schedule = replace(schedule, settings=(*kept, *given),
                           baseline=schedule.baseline if baseline is None else baseline)
        for word in kept:
            _progress(f"the schedule has the setting {secrets.redacted_setting(word)}")
        _own(ctx, schedule, out_folder, dry_run=dry_run, output=output)
        return
    if not schedule.by_time:
        raise ConfigError("this schedule is by the steps of a job of its own", hint=(
            "a job that runs is struck by time: `elastic-rl chaos run --minutes` makes a schedule for it"))
    radius = _radius(only, at_once, faults, allow_last)
    if schedule.faults > radius.faults:
        raise ConfigError(f"the schedule has {schedule.faults} faults, and {radius.faults} are allowed",
                          hint=f"--faults {schedule.faults} allows them")
    _attached(ctx, file, lambda target, radius: schedule, radius, out_folder, recovery_minutes, dry_run=dry_run,
              yes=yes, output=output)


@app.command("shrink")
def shrink(path: Annotated[Path, typer.Argument(metavar="FOLDER|SCHEDULE", parser=_folder, help=(
               "Folder of the results of a run that has failed, or its schedule.json."))],
           tries: Annotated[int, typer.Option("--tries", min=1, help="Most runs.")] = 20,
           out_folder: Out = None, output: Output = Format.TABLE) -> None:
    """Look for fewer faults with which a schedule still breaks one of the rules that it broke, by running parts of it,
    on clusters of their own. Of a schedule without its results any failure counts."""
    from chaos_tests import report, results, runner
    from chaos_tests.abort import by_operator
    from chaos_tests.nemesis.schedule import shrunk
    given = results.schedule_at(path)
    schedule = replace(given, baseline=False)
    _require_possible(schedule)
    if schedule.faults < 2:
        raise ConfigError(f"the schedule has {counted(schedule.faults, 'fault')}: there are no fewer to look for",
                          hint="run it again: `elastic-rl chaos replay`")
    broken, of = frozenset[str](), path if path.is_dir() else path.parent
    if (of / report.EVENTS).is_file():
        with _of_a_log(of):
            is_of = path.is_dir() or results.is_of(of, given)
            broken = results.outcome_of(of).broken if is_of else broken
        if not is_of:
            _progress(f"the run in {of} is of another schedule: any failure counts")
        elif not broken:
            raise ConfigError(f"the run in {of} broke no rule", hint="name one that has failed")
        else:
            _progress(f"a part fails that breaks {' or '.join(sorted(broken))}")
    folder = out_folder or _new_folder(schedule, Path("runs"), "shrink")
    with _of_files("name another folder with --out"):
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError as e:
            raise ConfigError(f"there is a folder {folder}, or a file, already", hint="name a new one with --out"
                              ) from e
    _undo_of_killed_runs(folder.parent)
    runs = 0

    def keep(part: Schedule) -> None:
        replace_file(folder / results.SCHEDULE, results.shown(part).to_json(), private=True)

    def fails(part: Schedule) -> bool:
        nonlocal runs
        runs += 1
        _progress(f"try {runs}: the results go to {folder / f'try-{runs}'}")
        outcome = _run_to_end(lambda switch: runner.run(part, folder / f"try-{runs}", say=_progress, switch=switch))
        if by_operator(outcome.aborted):
            raise typer.Exit(Exit.INTERRUPTED)
        failed = bool(outcome.broken & broken) if broken else outcome.failed
        _progress(f"try {runs}: {part.faults} faults: "
                  f"{'it fails' if failed else 'it fails in another way' if outcome.failed else 'it passes'}")
        if failed:
            keep(part)
        return failed

    found = None
    try:
        found = shrunk(schedule, fails, tries=tries)
    finally:
        if found is None and (folder / results.SCHEDULE).exists():
            _progress(f"the smallest schedule that has failed so far is in {folder / results.SCHEDULE}")
    keep(found)
    if output is Format.JSON:
        tables.write_json({"faults": found.faults, "of": schedule.faults, "runs": runs,
                           "schedule": str(folder / results.SCHEDULE)})
        return
    say(f"{found.faults} of {schedule.faults} faults are left after {runs} runs")
    say(f"again    {shlex.join(['elastic-rl', 'chaos', 'replay', str(folder / results.SCHEDULE)])}")


@app.command("abort")
def abort(folder: Annotated[Path, typer.Argument(metavar="FOLDER", parser=_folder, help=(
        "Folder of the results of the run."))]) -> None:
    """End a run, and undo what can be undone: processes that it has stopped go on, and a pool that still has the size
    that a fault gave it has its size of before. Also where the run itself was killed; code 1 where something cannot be
    undone."""
    from chaos_tests import abort as switch
    with _of_files("name the folder that `elastic-rl chaos run` has said"):
        undone = switch.abort(folder)
    if undone is None:
        say("the run ends, and undoes what can be undone")
        return
    say("the process of that run has ended before" if not undone.done else
        "the process of that run was killed; undone now:")
    for line in undone.done:
        say(f"  {tables.one_line(line)}")
    for line in undone.failed:
        say(f"not undone: {tables.one_line(line)}", to_err=True)
    if undone.failed:
        raise typer.Exit(Exit.FAILED)


@app.command("check")
def check(folder: Annotated[Path, typer.Argument(metavar="FOLDER", parser=_folder, help=(
              "Folder of the results of a run."))],
          output: Output = Format.TABLE) -> None:
    """Judge a run again by its log, which may have been made on another machine; code 1 where a rule is broken, the run
    was aborted, or it does not show what it had to."""
    from chaos_tests import report, results
    from chaos_tests.event_log import Records
    folder = folder.parent if folder.name == report.EVENTS else folder
    with _of_files("check it as a user who may read it"):
        there, its = ((of / report.EVENTS).is_file() for of in (folder, folder / report.BASELINE))
    if its and not there:
        raise ConfigError(f"the run in {folder} ended in its baseline, without faults",
                          hint=f"elastic-rl chaos check {shlex.quote(str(folder / report.BASELINE))}")
    if not there:
        raise ConfigError(f"there is no {report.EVENTS} in {folder}", hint="name a folder that `chaos run` has written")
    with _of_a_log(folder):
        outcome = results.outcome_of(folder)
        first = next(iter(Records(folder / report.EVENTS)))
        arguments, again = report.arguments(first), report.reproduce(first)
    if "must_see" not in first:
        _progress("the log is of an earlier release: it does not say which rules the run had to show")
    _show(outcome, output, arguments, again="" if (folder / results.SCHEDULE).is_file() else again, interrupted=False)


@contextmanager
def _of_files(hint: str) -> Iterator[None]:
    """The block reads or makes what the command line names. Raises ConfigError in the place of an OSError, whose code
    says that a rule was broken."""
    try:
        yield
    except OSError as e:
        raise ConfigError(os_error_text(e), hint=hint) from e


@contextmanager
def _of_a_log(folder: Path) -> Iterator[None]:
    """The block judges a log. Raises ConfigError where it cannot be judged."""
    try:
        with _of_files("check it as a user who may read it"):
            yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
        logging.getLogger(__name__).debug("the log in %s cannot be judged", folder, exc_info=True)
        raise ConfigError(str(e) if isinstance(e, ValueError) else
                          f"the log in {folder} has records of another form: {type(e).__name__} {e}",
                          hint="it is damaged, or of another release") from e


# -- without real parts ------------------------------------------------------------------------------------------------
@app.command("sim")
def sim(seeds: Annotated[int, typer.Option("--seeds", min=1, max=_MOST_STEPS, help="Runs of each world.")] = 200,
        first: Annotated[int, typer.Option("--first", min=0, max=1 << 60, help="The first seed.")] = 0,
        worlds: Annotated[list[str] | None, typer.Option("--worlds", metavar="NAME", show_default=False, help=(
            "Only this world, or these with commas in between; may be repeated."))] = None,
        minutes: Annotated[float, typer.Option("--minutes", min=0.0, metavar="M", show_default=False, help=(
            "Begin no further run after so many minutes. Runs that were not begun are said, and are no failure."))
            ] = float("inf"),
        jobs: Annotated[int, typer.Option("--jobs", min=0, max=1000, help="Processes; 0: one for each core.")] = 0,
        coverage: Annotated[bool, typer.Option("--coverage", help=(
            "Say how often each kind of fault, step and branch of a world happened, and what never did."))] = False,
        ) -> None:
    """Run simulated worlds with many seeds; code 1 where a rule is broken, or a world has not run at all."""
    from chaos_tests.sim import command, workers
    from chaos_tests.sim.worlds import WORLDS
    given = [name.strip() for word in worlds or () for name in word.split(",") if name.strip()]
    if worlds and not given:
        raise ConfigError("--worlds names no world", hint=f"known: {', '.join(WORLDS)}")
    names = [*dict.fromkeys(given or WORLDS)]
    if unknown := [name for name in names if name not in WORLDS]:
        raise ConfigError(f"there are no worlds {', '.join(unknown)}", hint=f"known: {', '.join(WORLDS)}")
    logging.disable()  # what the product logs in worlds that fail is expected
    if command.run_worlds(names, range(first, first + seeds), minutes, say, jobs=jobs or workers.cores(),
                          coverage=coverage):
        raise typer.Exit(Exit.FAILED)


@app.command("selftest")
def selftest(seeds: Annotated[int, typer.Option("--seeds", min=1, help="Most runs for each bug.")] = 600) -> None:
    """Plant bugs into the product, each of which must be caught; code 1 where one is missed.

    Those with ``world`` break a rule that a simulated world looks at while it runs. Those with ``log`` have to be found
    by the validators that judge real runs, in the event log of a simulated world, as a violation of the rule that is
    named. Of each bug it says which run caught it, and what the check says."""
    from chaos_tests.sim import command
    logging.disable()  # what the product logs in worlds that fail is expected
    if command.selftest(seeds, say):
        raise typer.Exit(Exit.FAILED)


# -- a cluster of its own, or one that runs ----------------------------------------------------------------------------
def _require_scenario(name: str) -> None:
    from chaos_tests.scenarios import SCENARIOS
    if name not in SCENARIOS:
        raise ConfigError(f"there is no scenario {name!r}", hint=f"known: {', '.join(SCENARIOS)}")


def _require_effect(ctx: typer.Context, attaches: bool, *more: str) -> None:
    """Raises ConfigError for an option that says nothing about this run. ``more``: others of them."""
    given = [name for name in (*(("baseline",) if attaches else _OF_TARGETS), *more)
             if (source := ctx.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{names}: a run against a cluster that runs has no baseline" if attaches else
                          f"{names}: only for a run against a cluster that runs",
                          hint="leave it out" if attaches else "name its job with --job=NAME, or leave it out")


def _require_no_file(file: Path | None) -> None:
    """Raises ConfigError for a file of settings of a run on a cluster of its own."""
    if file is not None:
        raise ConfigError("a scenario has the settings of its job", hint=(
            "give others as --key.sub=value; or name a job that runs with --job=NAME"))


def _require_secrets(schedule: Schedule) -> None:
    """Raises ConfigError for a schedule out of which a secret was taken before it was kept."""
    from elastic_rl.config import secrets as kept
    if missing := [word.partition("=")[0] for word in schedule.settings if kept.is_redacted(word)]:
        raise ConfigError(f"the schedule does not have the values of {', '.join(missing)}: no secret is kept",
                          hint="replay it, and give them again")


def _settings(ctx: typer.Context) -> list[str]:
    """The settings of a command line for the job of a scenario: its folder is that of the results."""
    return [word for word in overrides(ctx.args) if not word.startswith("--run_dir=")]


def _radius(only: str | None, at_once: int, faults: int | None, allow_last: bool) -> BlastRadius:
    from chaos_tests import blast_radius
    usual = blast_radius.BlastRadius()
    parts = usual.parts if only is None else blast_radius.parts(only)
    return blast_radius.BlastRadius(parts=parts, at_once=at_once, allow_last=allow_last,
                                    faults=usual.faults if faults is None else faults)


def _drawn(scenario: str, seed: int, *, minutes: float, steps: int, faults: int | None, target: Target | None,
           radius: BlastRadius | None, settings: Sequence[str]) -> Schedule:
    from chaos_tests import blast_radius
    from chaos_tests.faults.catalogue import met
    from chaos_tests.scenarios import SCENARIOS, Tier
    of = SCENARIOS[scenario]
    if not of.faults and faults:
        raise ConfigError(f"no faults are drawn in the scenario {scenario}",
                          hint="leave --faults out, or choose another one")
    if target is None or radius is None:
        from chaos_tests.target import own_config
        has = met(own_config(Path(), of.settings, settings, seed=seed), hosts=of.tier is Tier.TEST_HOSTS)
        allowed = [name for name in of.faults if not blast_radius.unmet(name, has)]
    else:
        if steps or not (minutes or of.minutes):
            raise ConfigError("a job that runs is struck by time", hint="give --minutes")
        of = replace(of, together=of.together if radius.at_once > 1 else 0.0)
        allowed, refused = radius.allowed(of.faults, blast_radius.replicas_of(target.context()),
                                          met(target.cfg, own=False))
        if not allowed and of.faults:
            raise ConfigError("no fault of the scenario may be injected: " + "; ".join(
                f"{name}: {why}" for name, why in sorted(refused.items())), hint=_WIDER)
        faults = min(radius.faults, of.usual_count(minutes=minutes)) if faults is None else faults
    try:
        return of.schedule(seed, steps=steps, minutes=minutes, faults=faults, only=allowed, settings=settings)
    except ValueError as e:
        raise ConfigError(f"no schedule can be drawn: {e}", hint="give fewer --faults, or a longer run") from e


def _require_possible(schedule: Schedule) -> None:
    """Raises ConfigError for a schedule that cannot be run on a cluster of its own, on this machine."""
    from chaos_tests import blast_radius, runner
    from chaos_tests.faults.catalogue import met
    from chaos_tests.scenarios import Tier
    from chaos_tests.target import own_config
    scenario = runner.scenario_of(schedule)
    has = met(own_config(Path(), scenario.settings, schedule.settings, seed=schedule.seed),
              hosts=scenario.tier is Tier.TEST_HOSTS)
    if unmet := {name: why for strike in schedule.strikes for name in strike.faults
                 if (why := blast_radius.unmet(name, has))}:
        raise ConfigError("the schedule has faults that are not possible here: " + "; ".join(
            f"{name}: {why}" for name, why in sorted(unmet.items())), hint="run it on another machine")
    _require_secrets(schedule)


def _own(ctx: typer.Context, schedule: Schedule, folder: Path | None, *, dry_run: bool, output: Format) -> None:
    from chaos_tests import results, runner
    from chaos_tests.scenarios import Tier
    from chaos_tests.target_hosts import require_visible
    _require_possible(schedule)
    if folder is not None and any(word.startswith("--run_dir=") for word in overrides(ctx.args)):
        raise ConfigError("--run_dir: the results go to --out", hint="leave one of them out")
    folder = folder or _new_folder(schedule, location(ctx, None).run_dir)
    if runner.scenario_of(schedule).tier is Tier.TEST_HOSTS:
        require_visible(folder)
    results.require_new(folder)
    if dry_run:
        sys.stdout.write(results.shown(schedule).to_json())
        return
    _undo_of_killed_runs(folder.parent)
    _progress(f"scenario {schedule.scenario}, seed {schedule.seed}: the results go to {folder}")
    _show(_run_to_end(lambda switch: runner.run(schedule, folder, say=_progress, switch=switch)), output)


def _attached(ctx: typer.Context, file: Path | None, schedule_of: Callable[[Target, BlastRadius], Schedule],
              radius: BlastRadius, folder: Path | None, recovery_minutes: float, *, dry_run: bool, yes: bool,
              output: Format) -> None:
    from chaos_tests import abort, blast_radius, results, runner
    from chaos_tests.faults.catalogue import met
    from chaos_tests.target import running_cluster
    if os.environ.get(URL_ENV) and not any(word.startswith(("--run_dir=", "--cluster=")) for word in ctx.args):
        raise ConfigError(f"{URL_ENV} names another cluster, and only a job of this host can be struck",
                          hint="name its cluster with --run_dir or --cluster, or unset the variable")
    with running_cluster(find_cluster(ctx, file)) as target:
        schedule = replace(schedule_of(target, radius), baseline=None)
        replicas = blast_radius.replicas_of(target.context())
        if replicas[blast_radius.Part.HOSTS] > 1:  # a pid of a record may be another process's here
            raise ConfigError("a job that runs can be struck on a cluster of one host only, and this one has "
                              f"{replicas[blast_radius.Part.HOSTS]}",
                              hint="leave --job out: a cluster is made for the run")
        _, refused = radius.allowed({name: 1.0 for strike in schedule.strikes for name in strike.faults}, replicas,
                                    met(target.cfg, own=False))
        if refused:
            raise ConfigError("the schedule strikes what is out of the blast radius: " + "; ".join(
                f"{name}: {why}" for name, why in sorted(refused.items())),
                hint=_WIDER)
        largest = max((len(strike.faults) for strike in schedule.strikes), default=1)
        if largest > radius.at_once:
            raise ConfigError(f"the schedule has {largest} faults at once, and {radius.at_once} are allowed",
                              hint=f"--at-once {largest} allows them")
        if dry_run:
            sys.stdout.write(schedule.to_json())
            return
        folder = folder or _new_folder(schedule, target.cfg.run_dir)
        results.require_new(folder)
        _say_strikes(schedule, radius, target, replicas)
        for killed, left in abort.left_by_killed_runs(folder.parent).items():
            for line in left:
                _progress(f"before, this is undone of the run in {killed}, which was killed: {line}")
        _progress(f"the results go to {folder}; `elastic-rl chaos abort {folder}`, or Ctrl-C, ends it")
        if not yes:
            _confirm(target.cfg.job)
        _undo_of_killed_runs(folder.parent)
        limits = runner.Limits(
            overlap=radius.at_once // max(1, largest),
            arguments=_arguments(ctx, radius, target.cfg, recovery_minutes),
            recovery_s=60.0 * recovery_minutes, aborts_itself=True,
            guard=lambda context: blast_radius.guarded(radius, context))
        _show(_run_to_end(lambda switch: runner.run_attached(schedule, folder, target, limits, say=_progress,
                                                             switch=switch)), output, limits.arguments)


def _arguments(ctx: typer.Context, radius: BlastRadius, cfg: Config, recovery_minutes: float) -> list[str]:
    """Words that strike the same job within the same radius."""
    from elastic_rl.config import secrets as kept
    cluster = [f"--cluster={cfg.cluster}"] if cfg.cluster else []
    where = [f"--run_dir={cfg.run_dir.resolve()}", *cluster, f"--job={cfg.job}"]
    others = [word for word in overrides(ctx.args) if word.partition("=")[0] not in _WHERE]
    return [*where, *map(kept.redacted_setting, others),
            "--only", ",".join(sorted(radius.parts)), "--at-once", str(radius.at_once),
            *(["--allow-last"] if radius.allow_last else []), "--recovery-minutes", f"{recovery_minutes:g}"]


def _say_strikes(schedule: Schedule, radius: BlastRadius, target: Target, replicas: Any) -> None:
    """Prints exactly what will be struck."""
    from chaos_tests.faults.catalogue import FAULTS
    _progress(f"{target.name} will be struck with {schedule.faults} faults in {schedule.minutes:g} minutes, "
              f"{radius.at_once} at once at most:")
    for strike in schedule.strikes:
        for name in strike.faults:
            entry = FAULTS[name]
            counts = ", ".join(f"{part.value}: {replicas.get(part, 0)} now" for part in sorted(entry.parts))
            _progress(f"  {strike.second:6.0f} s  {name:<22} {entry.what} ({counts})")


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
    """Within the block, the first SIGINT, SIGTERM or SIGHUP ends nothing but calls ``on_signal``: a cluster that is
    being brought up or taken down is not left half done. After it each does what it did before the block. One that is
    ignored, as SIGHUP under ``nohup``, stays so."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]

    def first(number: int, frame: object) -> None:
        for n, handler in before.items():
            signal.signal(n, handler)
        on_signal(signal.Signals(number).name)
        _progress(f"{signal.Signals(number).name}: the run ends, and undoes what can be undone; a second one ends the "
                  "command at once")

    before = {n: signal.getsignal(n) for n in numbers}
    for n in numbers:
        signal.signal(n, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _undo_of_killed_runs(results: Path) -> None:
    from chaos_tests import abort
    for killed, undone in abort.undo_of_killed_runs(results).items():
        for what, lines in (("undone", undone.done), ("not undone", undone.failed)):
            for line in lines:
                _progress(f"{what} of the run in {killed}, which was killed: {line}")


def _new_folder(schedule: Schedule, run_dir: Path, what: str = "") -> Path:
    words = [schedule.scenario, str(schedule.seed), *([what] if what else []), time.strftime("%m%d-%H%M%S")]
    return run_dir.resolve() / "chaos" / "-".join(words)


def _show(outcome: Outcome, output: Format, arguments: Sequence[str] = (), *, again: str = "", interrupted: bool = True
          ) -> None:
    """Prints the outcome of a run, and ends the command with its code. ``arguments``: of the line that runs its
    schedule again; ``again``: another line that does, where there is no schedule. ``interrupted``: whether a run that
    somebody has ended has the code of that: not where it is judged again."""
    from chaos_tests.abort import by_operator
    again = again or shlex.join(["elastic-rl", "chaos", "replay", str(outcome.folder / "schedule.json"), *arguments])
    if output is Format.JSON:
        tables.write_json({**asdict(outcome), "folder": str(outcome.folder), "failed": outcome.failed, "again": again})
    else:
        for line in outcome.wrong[:_PROBLEMS_SHOWN]:
            say(f"VIOLATION  {tables.one_line(line)}")
        if len(outcome.wrong) > _PROBLEMS_SHOWN:
            say(f"and {len(outcome.wrong) - _PROBLEMS_SHOWN} more")
        if outcome.aborted:
            say(f"aborted: {tables.one_line(outcome.aborted)}")
        elif outcome.wrong:
            say(f"{len(outcome.wrong)} violations")
        say(f"{len(outcome.kept)} rules kept"
            + (f", {len(outcome.unseen)} unseen: {', '.join(outcome.unseen)}" if outcome.unseen else ""))
        say(f"results  {outcome.folder}")
        say(f"again    {tables.one_line(again)}")
    if outcome.failed:
        raise typer.Exit(Exit.INTERRUPTED if interrupted and by_operator(outcome.aborted) else Exit.FAILED)


def _progress(line: str) -> None:
    """Nobody may be there to read it: the run goes on, and takes down what it has brought up."""
    with suppress(OSError):
        say(tables.one_line(line), to_err=True)
