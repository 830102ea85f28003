"""The runner of chaos runs on a cluster of its own whose job computes nothing: its fault, clients and watch, what it
writes down, and its verdict. Services, clients and the fault are real."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from light_runs import OF_RUNS_WITHOUT_FAULTS, SETTINGS, goes_on, in_place_of_the_driver, records

from chaos_tests import results, runner
from chaos_tests.event_log import Kind, read
from chaos_tests.model.models import STREAM
from chaos_tests.model.number import WRITE
from chaos_tests.nemesis.schedule import Schedule, Strike
from chaos_tests.scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(600)
STEPS = 10
LOG = "events.jsonl"


def test_run_on_an_own_cluster_is_struck_watched_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, folder = in_place_of_the_driver(tmp_path, monkeypatch), tmp_path / "results"
    said = list[str]()
    goes_on(go, folder, said, SCENARIOS["quick"], lambda: any(  # else their stream has nothing to keep
        event["model"] == STREAM and event["call"] == WRITE and event["ended_s"] for event in records(
            folder, Kind.OPERATION)))
    schedule = Schedule(1, STEPS, (Strike(3, ("coordinator_killed",)),), scenario="quick", settings=SETTINGS)
    outcome = runner.run(schedule, folder, say=said.append)
    assert [*outcome.wrong] == [] and not outcome.failed
    [fault] = records(folder, Kind.FAULT)
    assert fault["name"] == "coordinator_killed" and fault["witness"] and fault["healed_at"] >= fault["detected_at"]
    assert fault["parts"] == fault["seen_in"] == ["coordinators"]
    assert [step["step"] for step in records(folder, Kind.STEP)] == [*range(1, STEPS + 1)]
    [end] = records(folder, Kind.END)
    assert end["phase"] == "finished" and end["committed_steps"] == [*range(1, STEPS + 1)] and not end["problems"]
    assert end["report"]["steps"] == STEPS and end["alerts"], "what etcd and the run's folder have at the end"
    assert end["refused"].startswith("seed was 1 and is now 2: "), "whoever would resume the job with another seed"
    heads = {head["stream"]: head for head in end["kept"]["versions"]}
    assert (end["kept"]["lacks"], end["kept"]["steps"], [*heads]) == ([], STEPS, ["policy", "chaos"])
    assert all(head["chunks"] > 1 and not head["lost"] for head in heads.values()), "with its manifest"
    written = Counter(event["kind"] for event in read(folder / LOG))
    assert end["records"] == {kind: count for kind, count in written.items() if kind not in (Kind.RUN, Kind.END)}
    assert written.keys() >= {*Kind} - {
        Kind.GAP, Kind.PRESENT, Kind.LEFTOVER, Kind.STOP, Kind.UNANSWERED, *OF_RUNS_WITHOUT_FAULTS
        }, "a kind that nobody has written"
    assert {event["name"] for event in records(folder, Kind.EVENT)} >= {"leader.elected", "alerts.silenced"}
    last = {kind: records(folder, kind)[-1] for kind in (Kind.CHANGE, Kind.WATCH)}
    assert all(event["revision"] >= end["revision"] for event in last.values()), "the last change, by both"
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    verdicts = {v["rule"]: v["state"] for v in report["verdicts"]}
    answers = sum(event["ended_s"] is not None for event in records(folder, Kind.OPERATION))
    assert f"clients had {answers} answers" in report["verdicts"][0]["evidence"]
    assert {verdicts[rule] for rule in ("run", "I1", "I3", "I5", "I8", "I9", "I10", "I11", "I13", "I15")} == {
        "kept"}
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert results.outcome_of(folder) == outcome and results.schedule_at(folder) == schedule
