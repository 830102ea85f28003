"""``elastic-rl chaos``: what it refuses, what it prints, and its exit codes. No cluster is brought up here."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from chaos_tests import abort, blast_radius, collectors, observation, report, results, runner
from chaos_tests import target as chaos_target
from chaos_tests.event_log import FORM, EventLog, Kind
from chaos_tests.faults.catalogue import FAULTS, Need, Part
from chaos_tests.nemesis.schedule import Schedule, Strike
from chaos_tests.report.build import build
from chaos_tests.report.html import render
from chaos_tests.results import Outcome
from chaos_tests.scenarios import SCENARIOS
from chaos_tests.sim.worlds import WORLDS
from elastic_rl import config
from elastic_rl.cli import chaos, main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.errors import ConfigError
from elastic_rl.faults import ptrace
from elastic_rl.faults.undo import Undo, UndoRegistry

SCHEDULE = Schedule(3, 24, (Strike(3, ("engine_killed",)), Strike(9, ("driver_killed", "router_killed"))),
                    scenario="quick", settings=("--train.lr=0.5",))


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main.main(["chaos", *args])
    return int(e.value.code or 0)


def test_list_has_every_scenario_fault_and_world(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "-o", "json") == Exit.OK
    rows = json.loads(capsys.readouterr().out)
    for kind, names in (("scenario", SCENARIOS), ("fault", FAULTS), ("world", WORLDS)):
        assert [row["name"] for row in rows if row["kind"] == kind] == [*names]
    assert all(row["what"] for row in rows)
    assert run("list") == Exit.OK and "soak" in capsys.readouterr().out


def test_dry_run_prints_a_schedule_that_can_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "--scenario", "drawn", "--seed", "5", "--train.lr=0.5", "--dry-run") == Exit.OK
    text = capsys.readouterr().out
    made = Schedule.from_json(text, FAULTS)
    assert made == SCENARIOS["drawn"].schedule(5, settings=["--train.lr=0.5"])
    file = tmp_path / "s.json"
    file.write_text(text)
    assert run("replay", str(file), "--dry-run") == Exit.OK and capsys.readouterr().out == text
    assert run("run", "--scenario", "drawn", "--seed", "5", "--minutes", "4", "--faults", "3", "--dry-run") == Exit.OK
    by_time = Schedule.from_json(capsys.readouterr().out, FAULTS)
    assert (by_time.minutes, by_time.faults) == (4.0, 3)


@pytest.mark.parametrize(("args", "said"), [
    (["run", "--scenario", "unheard-of"], "known: quick"),
    (["run", "--scenario", "quick", "--minutes", "3", "--steps", "9"], "leave one of them out"),
    (["run", "--scenario", "quick", "--steps", "20", "--faults", "30"], "give fewer --faults"),
    (["replay", "/nonexistent"], "no schedule can be read"),
    (["check", "/nonexistent"], "there is no events.jsonl"),
    (["abort", "/nonexistent"], "no chaos run was in"),
    (["run", "--scenario", "quick", "--minutes", "nan"], "Input should be"),
    (["run", "--scenario", "quick", "--minutes", "inf"], "Input should be"),
    (["run", "--scenario", "quick", "--minutes", "1e300"], "Input should be"),
    (["run", "--scenario", "quick", "--minutes", "-1"], "Input should be"),
    (["run", "--scenario", "quick", "--minutes", "9", "--faults", "10000000"], "Input should be"),
    (["run", "--scenario", "quick", "--minutes", "9", "--faults", "9999"], "need more than 540"),
    (["run", "--scenario", "quick", "--minutes", "0.5"], "more than 30 seconds"),
    (["run", "--scenario", "growth", "--faults", "5"], "no faults are drawn in the scenario growth"),
    (["run", "--scenario", "quick", "--out=o", "--run_dir=r", "--dry-run"], "--run_dir: the results go to --out"),
    (["sim", "--worlds", "steps,unheard-of"], "there are no worlds unheard-of"),
    (["run", "--scenario", "quick", "--only", "engines"], "--only: only for a run against a cluster that runs"),
    (["run", "--scenario", "quick", "--yes", "--at-once", "2"], "--at-once, --yes: only for a run"),
    (["run", "--scenario", "quick", "--allow-last", "--recovery-minutes", "3"], "--allow-last, --recovery-minutes"),
    (["run", "--scenario", "quick", "--baseline", "--job=j"], "--baseline: a run against a cluster that runs has no"),
    (["run", "--scenario", "quick", "--dry-run", "--nonsense.x=1"], "nonsense"),
    (["run", "--scenario", "quick", "--job=j", "--recovery-minutes", "nan"], "Input should be"),
    (["run", "--scenario", "quick", "--job=j", "--only", ",,"], "no part is named that may be struck"),
    (["run", "--scenario", "hosts", "--out=/tmp/r", "--dry-run"], "below /tmp, of which each test host has its own"),
    *[([name, ""], "the name of the folder is empty") for name in ("abort", "check", "replay", "shrink")],
    *[([name, "x" * 300], "File name too long") for name in ("abort", "check", "replay")],
    (["sim", "--worlds", "unheard-of"], "known: steps")])
def test_what_makes_no_sense_is_refused(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*args) == Exit.USAGE
    assert said in capsys.readouterr().err


def test_job_that_does_not_run_is_no_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["run", "--scenario", "quick", "--minutes", "2", f"--run_dir={tmp_path}", "--job=j", "--yes"]
    assert run(*args) == Exit.UNAVAILABLE
    assert "elastic-rl up --job=j" in capsys.readouterr().err
    assert not (tmp_path / "chaos").exists()


def test_missing_client_of_the_observer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as e:
        observation.require_client()
    assert e.value.hint == "pip install 'elastic-rl[chaos]'"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The runs that were asked for; each ends with the outcome that a test has put in ``outcomes``."""
    made = list[dict[str, Any]]()

    def fake(schedule: Schedule, folder: Path, **options: Any) -> Outcome:
        made.append({"schedule": schedule, "folder": folder, **options})
        with abort.running(folder) as switch:
            options["switch"](switch)
            if "driver_killed" in SIGNALLED:
                os.kill(os.getpid(), signal.SIGTERM)
            failing = any("router_killed" in strike.faults for strike in schedule.strikes)
            return Outcome(folder, ["I5: a group is lost"] if failing else [], switch.why)

    monkeypatch.setattr(runner, "run", fake)
    return made


SIGNALLED = set[str]()


def test_run_says_how_to_repeat_it_and_ends_with_its_verdict(runs: list[dict[str, Any]], tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    file.write_text(SCHEDULE.to_json())
    out = tmp_path / "r"
    assert run("replay", str(file), f"--out={out}") == Exit.FAILED
    assert runs[0]["schedule"] == SCHEDULE
    printed = capsys.readouterr().out
    assert "VIOLATION  I5: a group is lost" in printed
    assert f"elastic-rl chaos replay {out / 'schedule.json'}" in printed
    assert run("run", "--scenario", "growth", "--seed", "1", "--steps", "10", "--no-baseline",
               f"--out={tmp_path / 'g'}", "-o", "json") == Exit.OK
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] is False and result["folder"] == str(tmp_path / "g") and (
        runs[1]["schedule"].baseline is False)


def test_results_go_into_a_new_folder_of_the_run_dir(runs: list[dict[str, Any]], tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "--scenario", "growth", "--seed", "4", f"--run_dir={tmp_path}", "--train.lr=0.5") == Exit.OK
    assert runs[0]["folder"].parent == tmp_path / "chaos" and runs[0]["folder"].name.startswith("growth-4-")
    assert runs[0]["schedule"].settings == ("--train.lr=0.5",)


def test_signal_uses_the_abort_switch_and_is_the_exit_code(runs: list[dict[str, Any]], tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("test_chaos_command.SIGNALLED", {"driver_killed"})
    assert run("run", "--scenario", "growth", "--seed", "4", f"--out={tmp_path / 'r'}") == Exit.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before


def test_run_that_somebody_has_aborted_has_the_exit_code_of_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                     ) -> None:
    def made(schedule: Schedule, folder: Path, *, switch: Any, **_: Any) -> Outcome:
        with abort.running(folder) as aborts:
            (folder / abort.ABORT_FILE).touch()
            return Outcome(folder, (), aborts.why)

    monkeypatch.setattr(runner, "run", made)
    assert run("run", "--scenario", "growth", "--seed", "4", f"--out={tmp_path / 'r'}") == Exit.INTERRUPTED


def test_signal_that_is_ignored_stays_so() -> None:
    """``nohup`` ignores SIGHUP: a logout does not end the run."""
    before, seen = signal.signal(signal.SIGHUP, signal.SIG_IGN), list[str]()
    try:
        with chaos._signals(seen.append):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not seen and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_run_does_not_end_where_nobody_reads_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(line: str, *, to_err: bool = False) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(chaos, "say", closed)
    chaos._progress("stopping the job")


def test_failing_schedule_is_shrunk_to_the_fault_that_makes_it_fail(runs: list[dict[str, Any]], tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "s.json", tmp_path / "small"
    file.write_text(SCHEDULE.to_json())
    assert run("shrink", str(file), f"--out={out}", "-o", "json") == Exit.OK
    assert json.loads(capsys.readouterr().out)["faults"] == 1
    found = results.schedule_at(out)
    assert [strike.faults for strike in found.strikes] == [("router_killed",)]
    assert len({made["folder"] for made in runs}) == len(runs), "each run has a folder of its own"


@pytest.mark.parametrize(("why", "code"), [("no step was made for 900 s, and no fault is under way", Exit.OK),
                                           ("SIGINT", Exit.INTERRUPTED)])
def test_hang_is_shrunk_too_and_what_was_found_is_kept_where_somebody_ends_it(
        why: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
        ) -> None:
    tries = list[Schedule]()

    def made(schedule: Schedule, folder: Path, **_: Any) -> Outcome:
        tries.append(schedule)
        hangs = any("router_killed" in strike.faults for strike in schedule.strikes)
        ended = why if len(tries) > 1 else "no step was made for 900 s, and no fault is under way"
        return Outcome(folder, (), ended if hangs else "")

    monkeypatch.setattr(runner, "run", made)
    file, out = tmp_path / "s.json", tmp_path / "small"
    file.write_text(SCHEDULE.to_json())
    assert run("shrink", str(file), f"--out={out}") == code
    assert results.schedule_at(out).faults < SCHEDULE.faults
    assert ("smallest schedule that has failed so far" in capsys.readouterr().err) == (code != Exit.OK)


@pytest.mark.parametrize("broken", [True, False])
def test_part_that_fails_in_another_way_than_the_run_is_none(broken: bool, tmp_path: Path,
                                                             monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    """What shrinks to a fault that was not seen to happen says nothing of the rule that was broken."""
    def made(schedule: Schedule, folder: Path, **_: Any) -> Outcome:
        names = {name for strike in schedule.strikes for name in strike.faults}
        return Outcome(folder, ["I9: no alert"] if "engine_killed" in names else ["run: it did not happen"])

    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "schedule.json").write_text(SCHEDULE.to_json())
    (folder / report.EVENTS).touch()
    monkeypatch.setattr(runner, "run", made)
    monkeypatch.setattr(results, "outcome_of", lambda path: Outcome(path, ["I9: no alert"] if broken else []))
    assert run("shrink", str(folder), f"--out={tmp_path / 'small'}") == (Exit.OK if broken else Exit.USAGE)
    said = capsys.readouterr().err
    if broken:
        assert [strike.faults for strike in results.schedule_at(tmp_path / "small").strikes] == [("engine_killed",)]
        assert "it fails in another way" in said and "I9" in said
    else:
        assert "broke no rule" in said


@pytest.mark.parametrize(("records", "wrong"), [
    ([{"step": 10**13}], "step"), ([{"step": 900_000_000}, {"step": 1}], "")])
def test_log_that_was_sent_takes_no_time_for_steps_that_are_not_in_it(
        records: list[dict[str, int]], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / report.EVENTS)
    log.write(Kind.RUN, form=FORM, scenario="quick", target="one host",
              schedule={**json.loads(SCHEDULE.to_json()), "steps": 10**10}, settings={"train": {"max_staleness": 0}})
    for record in records:
        log.write(Kind.STEP, **record)
    log.write(Kind.END, phase="finished", report={"steps": 10**10}, committed_steps=None, aborted="", records={})
    log.close()
    assert run("check", str(tmp_path)) == (Exit.USAGE if wrong else Exit.FAILED)
    assert wrong in capsys.readouterr().err


def test_check_judges_a_log_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / report.EVENTS)
    log.write(Kind.RUN, form=FORM, scenario="quick", schedule=json.loads(SCHEDULE.to_json()),
              settings={"train": {"max_staleness": 0}})
    assert run("check", str(tmp_path)) == Exit.FAILED
    assert "the log has no end" in capsys.readouterr().out
    (tmp_path / report.EVENTS).write_text("{}\n")
    assert run("check", str(tmp_path)) == Exit.USAGE


def test_abort_fails_where_something_cannot_be_undone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with abort.running(tmp_path):
        pass
    assert run("abort", str(tmp_path)) == Exit.OK
    registry = UndoRegistry(tmp_path)
    registry._append({**registry.note(Undo.CONTINUE, os.getpid()), "machine": "another"})
    assert run("abort", str(tmp_path)) == Exit.FAILED
    assert "not undone: continue" in capsys.readouterr().err


def test_second_run_of_a_folder_is_refused_before_anything_of_the_first_one_is_replaced(tmp_path: Path) -> None:
    with abort.running(tmp_path):
        (tmp_path / "schedule.json").write_text("of the first one")
        with pytest.raises(ConfigError, match="another process runs in"):
            runner.run(SCHEDULE, tmp_path)
        assert (tmp_path / "schedule.json").read_text() == "of the first one"


def test_every_part_of_the_blast_radius_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    only = next(option.help for option in get_args(chaos.Only) if hasattr(option, "help"))
    words = set(only.replace(",", " ").replace(".", " ").split())
    assert {part.value for part in Part} <= words


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[runner.Limits]:
    """The limits with which a job that runs was struck. It has three of each part, on one host."""
    made = list[runner.Limits]()

    @contextmanager
    def running_cluster(cluster: Any) -> Iterator[Any]:
        yield SimpleNamespace(name="job j", cfg=config.parse({"job": "j", "run_dir": str(tmp_path)}),
                              context=lambda: None)

    def fake(schedule: Schedule, folder: Path, target: Any, limits: runner.Limits, **options: Any) -> Outcome:
        made.append(limits)
        return Outcome(folder, [])

    monkeypatch.setattr(chaos, "find_cluster", lambda ctx, file: None)
    monkeypatch.setattr(chaos_target, "running_cluster", running_cluster)
    monkeypatch.setattr(blast_radius, "replicas_of", lambda context: dict.fromkeys(Part, 3) | {Part.HOSTS: 1})
    monkeypatch.setattr(runner, "run_attached", fake)
    return made


def by_time(*strikes: tuple[str, ...]) -> Schedule:
    return Schedule(1, 0, tuple(Strike(0, names, 10.0 * n) for n, names in enumerate(strikes, 1)), minutes=9.0,
                    scenario="quick")


@pytest.mark.parametrize(("schedule", "args", "said"), [
    (by_time(*[("engine_killed",)] * 6), (), "--faults 6 allows them"),
    (by_time(*[("engine_killed",)] * 6), ("--faults", "6"), ""),
    (by_time(("engine_killed", "dcs_killed")), (), "--at-once 2 allows them"),
    (by_time(("engine_killed", "dcs_killed")), ("--at-once", "2"), ""),
    (by_time(("chunks_torn",)), ("--only", "dcs"), "engines are not to be struck"),
    (by_time(("etcd_killed",)), (), "etcd are not to be struck"),
    (by_time(("run_killed",)), (), ""),
    (by_time(("racing_requests",)), (), "")])
def test_schedule_is_replayed_within_the_blast_radius_only(
        schedule: Schedule, args: tuple[str, ...], said: str, attached: list[runner.Limits], tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    file.write_text(schedule.to_json())
    code = run("replay", str(file), "--job=j", f"--run_dir={tmp_path}", "--yes", f"--out={tmp_path / 'r'}", *args)
    assert code == (Exit.USAGE if said else Exit.OK) and said in capsys.readouterr().err
    assert len(attached) == (not said) and all(limits.overlap == 1 for limits in attached)


@pytest.mark.parametrize("yes", [False, True])
def test_what_killed_runs_have_left_is_said_and_undone_only_once_the_run_was_confirmed(
        yes: bool, attached: list[runner.Limits], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, killed = tmp_path / "s.json", tmp_path / "results" / "killed"
    file.write_text(by_time(("engine_killed",)).to_json())
    with abort.running(killed):
        pass
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as left:
        try:
            UndoRegistry(killed).note(Undo.END, left.pid)
            assert run("replay", str(file), "--job=j", f"--run_dir={tmp_path}", f"--out={killed.parent / 'new'}",
                       *(["--yes"] if yes else [])) == (Exit.OK if yes else Exit.USAGE)
            printed = capsys.readouterr().err
            assert f"before, this is undone of the run in {killed}, which was killed: end {left.pid}" in printed
            assert (f"undone of the run in {killed}, which was killed: end {left.pid}" in printed.splitlines()) == yes
            assert bool(UndoRegistry(killed).pending()) == (not yes) and len(attached) == yes
        finally:
            left.kill()


def test_faults_that_are_not_possible_on_this_machine_are_refused_before_anything_is_started(
        runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ptrace, "allowed", lambda: False)
    file = tmp_path / "s.json"
    file.write_text(replace(SCHEDULE, strikes=(Strike(3, ("actor_exited",)),)).to_json())
    assert run("replay", str(file), f"--out={tmp_path / 'r'}") == Exit.USAGE and not runs
    assert "actor_exited: it needs ptrace" in capsys.readouterr().err
    assert run("run", "--scenario", "every", "--seed", "1", "--dry-run") == Exit.OK
    drawn = Schedule.from_json(capsys.readouterr().out, FAULTS)
    assert not [name for s in drawn.strikes for name in s.faults if Need.PTRACE in FAULTS[name].needs]


@pytest.mark.parametrize("setting", [
    "--run_dir=/etc", "--cluster=prod", "--seed=5", "--train.steps=5", "--alerts.urls=[]", "--etcd.endpoints=[]",
    "--alerts.config_file=/etc/apprise.yml", "--alerts.routes=[{url: json://pager}]", "--etcd={endpoints: [a:1]}"])
def test_setting_that_the_run_has_itself_is_refused(setting: str, runs: list[dict[str, Any]], tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    file.write_text(replace(SCHEDULE, settings=("--train.lr=0.5", setting)).to_json())
    assert run("replay", str(file)) == Exit.USAGE and not runs
    name = setting.partition("=")[0]
    assert f"a run on a cluster of its own takes no {name}" in capsys.readouterr().err
    assert run("shrink", str(file)) == Exit.USAGE and not runs


def test_whole_section_is_refused_which_would_replace_what_the_scenario_has_decided(
        capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "--scenario", "quick", "--dry-run", "--train={lr: 0.001}") == Exit.USAGE
    assert "give its keys one by one: --train.KEY=VALUE" in capsys.readouterr().err


def test_job_of_this_host_is_not_struck_in_the_place_of_another_clusters(
        attached: list[runner.Limits], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ELASTIC_RL_URL", "http://staging:8400")
    words = ["run", "--scenario", "quick", "--minutes", "9", "--job=j", "--yes"]
    assert run(*words) == Exit.USAGE and not attached
    assert "ELASTIC_RL_URL names another cluster" in capsys.readouterr().err
    assert run(*words, f"--run_dir={tmp_path}") == Exit.OK and attached


@pytest.mark.parametrize("strikes", [(), (Strike(3, ("engine_killed",)),)])
def test_schedule_of_one_fault_is_not_shrunk(strikes: tuple[Strike, ...], runs: list[dict[str, Any]], tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "s.json").write_text(replace(SCHEDULE, strikes=strikes).to_json())
    assert run("shrink", str(file)) == Exit.USAGE and not runs
    assert "there are no fewer to look for" in capsys.readouterr().err


def test_results_beside_a_schedule_count_where_it_is_named_itself(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "schedule.json").write_text("\ufeff" + SCHEDULE.to_json(), encoding="utf-8")
    log = tmp_path / report.EVENTS
    log.write_text(json.dumps(FIRST | {"schedule": json.loads(SCHEDULE.to_json())}) + "\n")
    monkeypatch.setattr(results, "outcome_of", lambda path: Outcome(path, []))
    assert run("shrink", str(file)) == Exit.USAGE
    assert f"the run in {tmp_path} broke no rule" in capsys.readouterr().err


def test_results_of_another_schedule_do_not_count(runs: list[dict[str, Any]], tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "mine.json").write_text(SCHEDULE.to_json())
    (tmp_path / report.EVENTS).write_text(json.dumps(FIRST) + "\n")
    run("shrink", str(file), "--tries", "1", "--out", str(tmp_path / "new"))
    assert "is of another schedule: any failure counts" in capsys.readouterr().err and runs


def test_run_that_ended_in_its_baseline_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / report.BASELINE).mkdir()
    (tmp_path / report.BASELINE / report.EVENTS).write_text(json.dumps(FIRST) + "\n")
    assert run("check", str(tmp_path)) == Exit.USAGE
    assert f"chaos check {tmp_path / report.BASELINE}" in capsys.readouterr().err


@pytest.mark.parametrize("option", [(), ("--dry-run",)])
def test_folder_of_results_is_refused_before_anything_is_done(
        option: tuple[str, ...], runs: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
        ) -> None:
    (tmp_path / report.EVENTS).touch()
    assert run("run", "--scenario", "quick", "--out", str(tmp_path), *option) == Exit.USAGE and not runs
    told = capsys.readouterr()
    assert "has the results of a run" in told.err and not told.out and "the results go to" not in told.err


FIRST = {"at": 1.0, "kind": "run", "form": FORM, "scenario": "quick", "seed": 1, "settings": {}, "schedule": {}}


@pytest.mark.parametrize("content", [
    b"", b"[]\n", b"5\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"1" * 10_000 + b"\n", b"{}\n", b"no end",
    json.dumps(FIRST | {"form": 99}).encode() + b"\n", json.dumps(FIRST | {"schedule": []}).encode() + b"\n",
    json.dumps(FIRST | {"schedule": {"strikes": 5}}).encode() + b"\n",
    json.dumps(FIRST | {"settings": {"train": 5}}).encode() + b"\n",
    *(json.dumps(FIRST).encode() + b"\n" + line + b"\n" for line in (
        b"[]", b"5", b"\xff", b"{torn", b"[" * 100_000, b'{"kind": "step"}', b'{"at": NaN, "kind": "step", "step": 1}',
        b'{"at": 1, "kind": "step", "step": NaN}', b'{"at": 1, "kind": "step"}', b'{"at": "1", "kind": "end"}',
        b'{"at": 1, "kind": "fault"}', b'{"at": 1, "kind": "fault", "name": "a", "injected_at": "x"}',
        b'{"at": 1, "kind": "change", "key": "/a"}', b'{"at": 1e400, "kind": "end"}', b'{"at": 1, "kind": []}',
        b'{"at": 1, "kind": "end", "report": 5}', b'{"at": 1, "kind": "end", "alerts": [5]}',
        b'{"at": 1, "kind": "operation", "key": "a"}', b'{"at": 1, "kind": "fault", "name": "a", "witness": "w"}'))])
def test_log_of_another_form_is_refused_or_judged_and_never_a_traceback(
        content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / report.EVENTS).write_bytes(content)
    assert run("check", str(tmp_path)) in (Exit.FAILED, Exit.USAGE)
    printed = capsys.readouterr()
    assert str(tmp_path) in printed.out + printed.err and "Traceback" not in printed.err


END = {"at": 2.0, "kind": "end", "phase": "finished", "report": {}, "alerts": [], "aborted": ""}
ALERT = {"id": "a", "kind": "engine.dead", "subject": "e", "message": "", "phase": "firing", "severity": "error"}


@pytest.mark.parametrize(("records", "line", "why"), [
    ([FIRST | {"must_see": [["I1"], 5]}], 1, "must_see of run is of another form"),
    ([FIRST | {"floor": {"steps": "many"}}], 1, "floor of run is of another form"),
    ([FIRST | {"schedule": {"strikes": [{"faults": 5}]}}], 1, "schedule of run is of another form"),
    ([FIRST, {"at": 1.0, "kind": "fault", "name": "a", "parts": [["dcs"]]}], 2, "parts of fault is of another form"),
    ([FIRST, END | {"alerts": [ALERT, {"kind": []}]}], 2, "alerts of end is of another form"),
    ([FIRST, END | {"records": {"step": "many"}}], 2, "records of end is of another form"),
    ([FIRST, {"at": 1.0, "kind": "quantum"}], 2, "its kind 'quantum' is unknown"),
    ([FIRST, {"at": 1.0, "kind": "fault", "name": "a", "injected_at": 10**400}], 2, "injected_at of fault is of"),
    ([FIRST, END, {"at": 3.0, "kind": "step", "step": 1}], 3, "the run has ended before it"),
    ([FIRST, END, END], 3, "the run has ended before it"),
    ([FIRST, FIRST, END], 2, "a second run begins here")])
def test_record_that_is_odd_or_out_of_place_is_named(
        records: list[dict[str, Any]], line: int, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / report.EVENTS).write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run("check", str(tmp_path)) == Exit.USAGE
    assert f"line {line}, is no record of a chaos run: {why}" in " ".join(capsys.readouterr().err.split())


def test_log_that_was_sent_says_no_word_of_a_line_that_is_not_known(tmp_path: Path,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """People paste the line. It asks before it strikes, and is no more than a job and what of it may be struck."""
    words = ["--job=prod", "--yes", "-y", "--allow-last", "--only", "etcd,hosts;rm -rf x", "--at-once", "2", "--only",
             "dcs,engines", "--out=/home/me/.ssh", "--seed=3", "--baseline", "--etcd.quota_bytes=1", "$(id)",
             "--recovery-minutes", "3", "--nonsense.x=1", "--at-once"]
    known = ["--job=prod", "--allow-last", "--at-once", "2", "--only", "dcs,engines", "--etcd.quota_bytes=1",
             "--recovery-minutes", "3"]
    first = FIRST | {"arguments": words, "schedule": {"minutes": 2.0, "settings": ["--yes", "--train.lr=1"]}}
    (tmp_path / report.EVENTS).write_text(json.dumps(first) + "\n" + json.dumps(END | {"report": {}}) + "\n")

    def again() -> list[str]:
        run("check", str(tmp_path))
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("again")]
        return shlex.split(line)[1:]

    assert again() == ["elastic-rl", "chaos", "run", "--scenario", "quick", "--seed", "1", "--minutes", "2", "--faults",
                       "0", "--train.lr=1", *known], "there is no schedule to replay"
    (tmp_path / "schedule.json").write_text(SCHEDULE.to_json())
    assert again() == ["elastic-rl", "chaos", "replay", str(tmp_path / "schedule.json"), *known]


def test_log_of_an_earlier_release_is_said_to_demand_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]
                                                             ) -> None:
    for first, said in ((FIRST, True), (FIRST | {"must_see": []}, False)):
        (tmp_path / report.EVENTS).write_text(json.dumps(first) + "\n")
        run("check", str(tmp_path))
        assert ("it does not say which rules the run had to show" in " ".join(
            capsys.readouterr().err.split())) is said


@pytest.mark.parametrize("step", [
    {"samples": 10**400}, {"seconds": {"total": 10**400}}, {"reward_mean": 1e308}, {"samples": 1e308},
    {"reward_mean": float("nan")}, {"seconds": {"total": float("inf")}}])
def test_step_with_absurd_numbers_is_no_traceback(step: dict[str, Any], tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"at": 1.0 + n, "kind": "step", "step": n, **step} for n in (1, 2)]
    steps[1] |= {name: -value for name, value in step.items() if isinstance(value, float)}
    (tmp_path / report.EVENTS).write_text("".join(json.dumps(each) + "\n" for each in (FIRST, *steps, END)))
    assert run("check", str(tmp_path)) in (Exit.FAILED, Exit.USAGE)
    assert "Traceback" not in capsys.readouterr().err
    try:
        judged = report.read(tmp_path)
    except (ValueError, ArithmeticError):
        return  # which ``check`` has said
    assert render(build(judged), judged.run, judged.baseline)


def test_check_is_not_ended_by_who_ended_the_run_and_prints_one_line_for_each_finding(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"at": 1.5, "kind": "leftover", "what": "a\n15 rules kept\nresults  /x"}
    (tmp_path / report.EVENTS).write_text("".join(json.dumps(each) + "\n" for each in (
        FIRST, found, END | {"aborted": "SIGINT"})))
    assert run("check", str(tmp_path)) == Exit.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "I8: " in line and "a 15 rules kept results  /x" in line]
    assert [line for line in lines if line.startswith("results")] == [f"results  {tmp_path}"]


def test_log_without_a_record_is_said_to_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / report.EVENTS).touch()
    assert run("check", str(tmp_path)) == Exit.USAGE
    assert "has no record: the run ended before it began" in " ".join(capsys.readouterr().err.split())


def test_process_whose_name_is_no_text_has_its_report(tmp_path: Path) -> None:
    found = {"at": 1.5, "kind": "leftover", "what": "process 5: a\udcff"}
    (tmp_path / report.EVENTS).write_text("".join(json.dumps(each) + "\n" for each in (FIRST, found, END)))
    report.write(tmp_path)
    assert "process 5: a?" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_file_of_settings_is_refused_on_a_cluster_of_its_own(runs: list[dict[str, Any]], tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("train:\n  lr: 0.5\n")
    (tmp_path / "s.json").write_text(SCHEDULE.to_json())
    for words in (["run", "--scenario", "quick"], ["replay", str(tmp_path / "s.json")]):
        assert run(*words, "-c", str(tmp_path / "x.yaml"), "--dry-run") == Exit.USAGE
        assert "a scenario has the settings of its job" in capsys.readouterr().err


def test_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="others may enter"), abort.running(folder):
        pass
    folder.chmod(0o700)
    with abort.running(folder):
        pass


def test_line_of_a_log_that_is_no_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / report.EVENTS).write_text(json.dumps(FIRST) + '\n{"at": 1, "kind": "step", "step": NaN}\n')
    assert run("check", str(tmp_path)) == Exit.USAGE
    assert "events.jsonl, line 2, is no record of a chaos run: step of step is of another form: 'nan'" in " ".join(
        capsys.readouterr().err.split())


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / report.EVENTS)
    assert run("check", str(tmp_path)) == Exit.USAGE
    os.mkfifo(tmp_path / "schedule.json")
    assert run("replay", str(tmp_path)) == Exit.USAGE
    assert run("shrink", str(tmp_path / "schedule.json")) == Exit.USAGE
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    assert run("replay", str(tmp_path / "deep.json")) == run("replay", str(tmp_path / "bytes.json")) == Exit.USAGE


def test_secrets_of_the_command_line_are_in_no_file_of_the_results_and_are_asked_for_again(
        tmp_path: Path, runs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    schedule = replace(SCHEDULE, settings=("--data.options.api_key=T0KEN", "--train.lr=0.5"))
    folder = tmp_path / "r"
    with abort.running(folder):
        results.prepare(schedule, folder)
        with runner._log_of(folder, schedule, config.parse({}), "one host", runner.Limits(), baseline=False):
            pass
    report.write(folder)
    capsys.readouterr()
    for file in (path for path in folder.iterdir() if path.is_file()):
        assert "T0KEN" not in file.read_text(), file.name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file.name
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert run("replay", str(folder), f"--out={tmp_path / 'again'}") == Exit.USAGE and not runs
    assert "does not have the values of --data.options.api_key" in capsys.readouterr().err
    assert run("shrink", str(folder), f"--out={tmp_path / 'small'}") == Exit.USAGE and not runs
    assert run("replay", str(folder), f"--out={tmp_path / 'again'}", "--data.options.api_key=T0KEN") == Exit.FAILED
    assert runs[0]["schedule"].settings == ("--train.lr=0.5", "--data.options.api_key=T0KEN")


def test_line_that_strikes_a_job_again_is_whole(attached: list[runner.Limits], tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    file.write_text(by_time(("engine_killed",)).to_json())
    out = tmp_path / "a b"
    assert run("replay", str(file), "--job=j", f"--run_dir={tmp_path}", "--yes", f"--out={out}", "--only",
               "engines,dcs", "--allow-last", "--recovery-minutes", "3") == Exit.OK
    [again] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("again")]
    assert shlex.split(again)[1:] == [
        "elastic-rl", "chaos", "replay", str(out / "schedule.json"), f"--run_dir={tmp_path}", "--job=j", "--only",
        "dcs,engines", "--at-once", "1", "--allow-last", "--recovery-minutes", "3"]
    assert attached[0].arguments == shlex.split(again)[5:]


def test_sealed_settings_of_a_job_are_kept_as_a_digest() -> None:
    def kept(sealed: str) -> Any:
        change = {"revision": 3, "put": True, "key": "/_clusters/c/jobs/j", "value": json.dumps({"settings": sealed})}
        return collectors.without_seal(change)

    assert "gAAAA" not in json.dumps(kept("gAAAA1")) and kept("gAAAA1") != kept("gAAAA2")
    assert kept("gAAAA1") == kept("gAAAA1") and json.loads(kept("")["value"]) == {"settings": ""}
    assert collectors.without_seal({"value": "\xff no record"}) == {"value": "\xff no record"}
