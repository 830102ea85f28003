"""The injector while etcd does not answer: it waits, loses no fault, and ends with the run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.errors import ConfigError, ElasticRLError, EtcdUnavailable
from elastic_rl.faults import injector as injectors
from elastic_rl.faults.context import Fault, FaultContext, InjectionEnded, VictimTaken, stopped
from elastic_rl.faults.injector import Elapsed, FaultInjector
from elastic_rl.faults.undo import Undo, UndoRegistry
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import RUN_MARK
from elastic_rl.pipeline.records.run_log import LineFile, RunLog

NOTHING = UndoRegistry(Path("/nonexistent"))
"""The context of a run in which nothing is left to be undone."""


class Etcd:
    """Answers every third reading, or none."""

    def __init__(self) -> None:
        self.readings, self.gone = 0, False

    def read(self, value: Any) -> Any:
        self.readings += 1
        if self.gone or self.readings % 3:
            raise EtcdUnavailable("no member answers")
        return value


class Context:
    def __init__(self, etcd: Etcd) -> None:
        self.etcd, self.struck, self.undo = etcd, list[tuple[float, str]](), NOTHING

    def step(self) -> int:
        return self.etcd.read(5)

    def finished(self) -> bool:
        return self.etcd.read(False)

    def ready(self) -> set[str]:
        return self.etcd.read({"e1", "e2"})


class Something(Fault):
    name = "something"

    def __init__(self, etcd: Etcd, on_inject: Callable[[], None] = lambda: None) -> None:
        self.etcd, self.injected, self._on_inject = etcd, 0, on_inject

    def inject(self) -> tuple[str, str]:
        self.injected += 1
        self._on_inject()
        return "target", "witness"

    def detected(self) -> bool:
        return self.etcd.read(True)

    def healed(self) -> bool:
        return self.etcd.read(True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injectors, "AWAY_PAUSES_S", (0.01, 0.01))


def play(etcd: Etcd, fault: Fault, path: Path) -> FaultInjector:
    injector = FaultInjector(Context(etcd), RunLog(LineFile(path)), [(5, [fault])],  # type: ignore[arg-type]
                             path.with_name("steps.jsonl"))
    injector.start()
    return injector


def test_fault_is_injected_once_and_recorded_despite_a_flaky_etcd(tmp_path: Path) -> None:
    etcd, path = Etcd(), tmp_path / "faults.jsonl"
    fault = Something(etcd)
    play(etcd, fault, path).join(60)
    record = json.loads(path.read_text())
    assert fault.injected == 1 and record["healed_at"] >= record["detected_at"] >= record["injected_at"]
    assert record["meanwhile"].endswith("2 engines ready")


def test_time_without_etcd_does_not_count_against_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injectors, "_DETECT_TIMEOUT_S", 1e-9)  # any answer that is no would be the last one
    etcd, path = Etcd(), tmp_path / "faults.jsonl"
    play(etcd, Something(etcd), path).join(60)
    assert json.loads(path.read_text())["healed_at"] is not None


def test_injector_ends_with_the_run_and_records_faults_without_etcd(tmp_path: Path) -> None:
    etcd, path = Etcd(), tmp_path / "faults.jsonl"
    fault = Something(etcd, lambda: setattr(etcd, "gone", True))
    injector = play(etcd, fault, path)
    wait_until(lambda: fault.injected, what="the fault")
    injector.stopping.set()
    injector.join(60)
    assert not injector.is_alive()
    record = json.loads(path.read_text())
    assert "the run ended while etcd did not answer" in record["problem"] and record["healed_at"] is None
    assert "unknown engines ready" in record["meanwhile"]


class Running:
    """A run whose etcd answers, at a step that a test says."""

    def __init__(self, step: int = 0) -> None:
        self.at, self.ended, self.struck = step, threading.Event(), list[tuple[float, str]]()
        self.undo, self.readings = NOTHING, 0

    def end(self) -> None:
        self.ended.set()

    def step(self) -> int:
        if self.ended.is_set():
            raise InjectionEnded("the injection of faults was ended")
        self.readings += 1
        return self.at

    def finished(self) -> bool:
        return False

    def ready(self) -> set[str]:
        self.step()
        return set()


class Wound(Fault):
    """A fault that heals when a test says so."""

    said, state = "it waits", "ready"

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.is_injected, self.is_healed, self.error = name, False, False, error
        self.asked = 0
        """How often the injector has asked whether it is healed."""

    def inject(self) -> tuple[str, str]:
        if self.error is not None:
            raise self.error
        self.is_injected = True
        return "target", "witness"

    def detected(self) -> bool:
        return True

    def healed(self) -> bool:
        self.asked += 1
        return self.is_healed


def injector_of(run: Running, plan: list[Any], path: Path, **options: Any) -> FaultInjector:
    made = FaultInjector(run, RunLog(LineFile(path)), plan, path.with_name("steps.jsonl"),  # type: ignore[arg-type]
                         **options)
    made.start()
    return made


def test_turn_by_time_counts_from_the_first_step_that_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, run, first, second = [0.0], Running(), Wound("a"), Wound("b")
    monkeypatch.setattr(injectors, "time", SimpleNamespace(time=time.time, monotonic=lambda: now[0]))
    injector = injector_of(run, [(Elapsed(5.0), [first]), (Elapsed(900.0), [second])], tmp_path / "f")
    now[0] = 100.0
    run.at = 3
    wait_until(lambda: injector._began_s is not None, what="the first step")
    readings = run.readings
    wait_until(lambda: first.is_injected or run.readings > readings + 3, what="turns that have not come")
    assert not first.is_injected
    now[0] = 105.0
    wait_until(lambda: first.is_injected, what="the fault")
    first.is_healed = True
    injector.end()
    injector.join(60)
    assert not injector.is_alive() and not second.is_injected


def test_next_fault_waits_for_recovery_unless_they_may_overlap(tmp_path: Path) -> None:
    for overlap in (1, 2):
        wounds = [Wound("a"), Wound("b"), Wound("c")]
        injector = injector_of(Running(9), [(1, [wound]) for wound in wounds], tmp_path / f"f{overlap}",
                               overlap=overlap)
        wait_until(lambda ws=wounds, n=overlap: all(w.is_injected for w in ws[:n]), what="the first faults")
        asked = wounds[0].asked
        wait_until(lambda w=wounds[0], n=asked: w.asked > n + 6, what="a first fault that is not over")
        assert len(injector.under_way) <= overlap and not wounds[overlap].is_injected
        for wound in wounds:
            wound.is_healed = True
        injector.join(60)
        assert not injector.is_alive() and len(injector.over) == 3 and not injector.under_way


def test_next_fault_waits_for_the_steps_of_rest_after_the_recovery(tmp_path: Path) -> None:
    run, first, second = Running(9), Wound("a"), Wound("b")
    injector = injector_of(run, [(1, [first]), (2, [second])], tmp_path / "f", rest_steps=4)
    wait_until(lambda: first.is_injected, what="a first fault, which rests after nothing")
    run.at = 20
    first.is_healed = True
    wait_until(lambda: injector._recovered_at == 20, what="the recovery")
    run.at = 23
    readings = run.readings
    wait_until(lambda: second.is_injected or run.readings > readings + 3, what="a rest that is not over")
    assert not second.is_injected
    run.at = 24
    wait_until(lambda: second.is_injected, what="the second fault")
    second.is_healed = True
    injector.join(60)
    assert not injector.is_alive() and len(injector.over) == 2


@pytest.mark.parametrize("error", [ConfigError("there is none"), KeyError("unexpected")])
def test_fault_that_cannot_be_injected_has_a_problem_and_no_witness(error: Exception, tmp_path: Path) -> None:
    injector_of(Running(9), [(1, [Wound("a", error)])], tmp_path / "f").join(60)
    record = json.loads((tmp_path / "f").read_text())
    assert record["witness"] == "" and record["problem"] and record["healed_at"] is None


def test_recovery_that_is_not_seen_is_given_up_and_keeps_its_witness(tmp_path: Path) -> None:
    injector_of(Running(9), [(1, [Wound("a")])], tmp_path / "f", heal_timeout_s=1e-9).join(60)
    record = json.loads((tmp_path / "f").read_text())
    assert (record["witness"], record["state"], record["said"]) == ("witness", "ready", "it waits")
    assert "recovery from a was not seen" in record["problem"] and record["healed_at"] is None


class Striking(Fault):
    """A fault that reads etcd, strikes, and reads it once more, as some do."""

    why: ElasticRLError = EtcdUnavailable("no member answers")

    def __init__(self, context: FaultContext, before: list[bool], after: list[bool], *, witness: str = "it was struck",
                 detects: bool = True, **attributes: Any) -> None:
        """``before``, ``after``: whether etcd answers, at each reading."""
        self.name, self.context, self.before, self.after, self.witness = "a", context, before, after, witness
        self.strikes, self.detects = 0, detects
        for name, value in attributes.items():
            setattr(self, name, value)

    def inject(self) -> tuple[str, str]:
        if not self.before.pop(0):
            raise self.why
        with self.context.striking("pid 5 was sent SIGKILL"):
            self.strikes += 1
        if not self.after.pop(0):
            raise EtcdUnavailable("no member answers")
        return "target", self.witness

    def detected(self) -> bool:
        return self.detects

    def healed(self) -> bool:
        return True


class Playing(FaultContext):
    """A run of which no etcd is read, and which answers also once the injection has ended."""

    def __init__(self, step: int = 9) -> None:
        super().__init__(*[None] * 4, undo=NOTHING)  # type: ignore[arg-type]
        self.at, self.readings = step, 0

    def step(self) -> int:
        self.readings += 1
        return self.at

    def finished(self) -> bool:
        return False

    def ready(self, pool: str = "") -> set[str]:
        return set()


def recorded(fault: Striking, path: Path) -> dict[str, Any]:
    FaultInjector(fault.context, RunLog(LineFile(path)), [(1, [fault])], path.with_name("steps.jsonl")).run()
    return dict(json.loads(path.read_text()))


def test_turn_that_has_not_come_is_not_waited_for_once_it_has_ended(tmp_path: Path) -> None:
    run, wound = Playing(0), Wound("a")
    injector = FaultInjector(run, RunLog(LineFile(tmp_path / "f")), [(1, [wound])], tmp_path / "steps.jsonl")
    injector.start()
    wait_until(lambda: run.readings, what="the wait for the turn")
    injector.end()
    injector.join(60)
    assert not injector.is_alive() and not wound.is_injected


def test_nothing_strikes_any_more_once_it_has_ended(tmp_path: Path) -> None:
    context = Playing()
    with pytest.raises(InjectionEnded):
        context.end()
        _ = context.etcd
    fault = Striking(context, [True], [True])
    record = recorded(fault, tmp_path / "f")
    assert fault.strikes == 0 and record["witness"] == "" and "ended" in record["problem"]


@pytest.mark.parametrize("why", [EtcdUnavailable("no member answers"), VictimTaken("pid 5 has ended")])
def test_fault_is_begun_again_until_it_has_struck_and_never_afterwards(
        why: ElasticRLError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injectors, "AWAY_PAUSES_S", (0.01, 0.01))
    fault = Striking(Playing(), [False, False, True, True], [False, True], why=why)
    record = recorded(fault, tmp_path / "f")
    assert fault.strikes == 1 and record["witness"] == "pid 5 was sent SIGKILL", "what was done is in the record"
    assert "no member answers" in record["problem"] and record["healed_at"] is None


def test_fault_was_injected_when_it_struck_and_not_when_it_began_to_wait(tmp_path: Path) -> None:
    context, began = Playing(), time.time()
    fault = Striking(context, [True], [True])
    inject = fault.inject

    def waits() -> tuple[str, str]:
        wait_until(lambda: time.time() > began + 0.2, what="the victim")
        return inject()

    fault.inject = waits  # type: ignore[method-assign]
    record = recorded(fault, tmp_path / "f")
    assert record["injected_at"] >= began + 0.2 and 0 < record["waited_s"] <= record["injected_at"] - began
    assert record["injected_at"] <= record["detected_at"] <= record["healed_at"]


def test_what_nobody_has_detected_is_not_said_to_be(tmp_path: Path) -> None:
    record = recorded(Striking(Playing(), [True], [True], detects=False, may_go_unnoticed=True), tmp_path / "f")
    assert record["detected_at"] is None and record["may_go_unnoticed"]
    assert record["healed_at"] and not record["problem"]


def test_fault_without_a_witness_did_not_happen_whatever_came_after_it(tmp_path: Path) -> None:
    record = recorded(Striking(Playing(), [True], [True], witness=""), tmp_path / "f")
    assert (record["witness"], record["detected_at"], record["healed_at"]) == ("", None, None)
    assert record["problem"] == "a was not seen to happen"


def test_no_process_is_struck_once_the_injection_has_ended(tmp_path: Path) -> None:
    cfg, nothing = config.parse({"job": "j", "run_dir": str(tmp_path)}), cast("Any", None)
    context = FaultContext(cfg, nothing, nothing, nothing)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"],
                          env={RUN_MARK: str(JobPaths.of(cfg).private)}) as child:
        try:
            wait_until(lambda: context.owns(psutil.Process(child.pid)), what="its environment")
            context.end()
            process = psutil.Process(child.pid)
            for strike in (lambda: context.kill(child.pid), lambda: context.stop(process),
                           lambda: stopped(context, process).__enter__(), lambda: context.service("etcd-0"),
                           lambda: context.router_pid(), lambda: context.answered(lambda: context.etcd)):
                with pytest.raises(InjectionEnded):
                    strike()
            assert child.poll() is None and process.status() != psutil.STATUS_STOPPED and context.struck == []
        finally:
            child.kill()


def test_injector_undoes_what_a_killed_one_has_left_and_what_is_left_of_its_own(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as child:
        try:
            process, run = psutil.Process(child.pid), Running(9)
            run.undo = UndoRegistry(tmp_path / "undo")
            run.undo.note(Undo.CONTINUE, child.pid)
            process.suspend()
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED, what="the stop")
            wound = Wound("a")
            injector = injector_of(run, [(1, [wound])], tmp_path / "f")
            wait_until(lambda: wound.is_injected, what="the fault")
            wait_until(lambda: process.status() != psutil.STATUS_STOPPED, what="the process to go on")
            run.undo.note(Undo.CONTINUE, child.pid)
            process.suspend()
            wound.is_healed = True
            injector.join(60)
            assert run.undo.pending() == []
            wait_until(lambda: process.status() != psutil.STATUS_STOPPED, what="the process to go on")
        finally:
            child.kill()
