"""The injector while etcd does not answer: it waits, loses no fault, and ends with the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.faults import injector as injectors
from elastic_rl.faults.injector import FaultInjector
from elastic_rl.pipeline.records.run_log import LineFile, RunLog


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
        self.etcd = etcd

    def step(self) -> int:
        return self.etcd.read(5)

    def finished(self) -> bool:
        return self.etcd.read(False)

    def ready(self) -> set[str]:
        return self.etcd.read({"e1", "e2"})


class Fault:
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
    monkeypatch.setattr(injectors, "_AWAY_PAUSE_S", 0.01)


def play(etcd: Etcd, fault: Fault, path: Path) -> FaultInjector:
    injector = FaultInjector(Context(etcd), RunLog(LineFile(path)), [(5, [fault])],  # type: ignore[arg-type]
                             path.with_name("steps.jsonl"))
    injector.start()
    return injector


def test_fault_is_injected_once_and_recorded_despite_a_flaky_etcd(tmp_path: Path) -> None:
    etcd, path = Etcd(), tmp_path / "faults.jsonl"
    fault = Fault(etcd)
    play(etcd, fault, path).join(60)
    record = json.loads(path.read_text())
    assert fault.injected == 1 and record["healed_at"] >= record["detected_at"] >= record["injected_at"]
    assert record["meanwhile"].endswith("2 engines ready")


def test_time_without_etcd_does_not_count_against_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injectors, "_DETECT_TIMEOUT_S", 1e-9)  # any answer that is no would be the last one
    etcd, path = Etcd(), tmp_path / "faults.jsonl"
    play(etcd, Fault(etcd), path).join(60)
    assert json.loads(path.read_text())["healed_at"] is not None


def test_injector_ends_with_the_run_and_records_faults_without_etcd(tmp_path: Path) -> None:
    etcd, path = Etcd(), tmp_path / "faults.jsonl"
    fault = Fault(etcd, lambda: setattr(etcd, "gone", True))
    injector = play(etcd, fault, path)
    wait_until(lambda: fault.injected, what="the fault")
    injector.stopping.set()
    injector.join(60)
    assert not injector.is_alive()
    record = json.loads(path.read_text())
    assert "the run ended while etcd did not answer" in record["problem"] and record["healed_at"] is None
    assert "unknown engines ready" in record["meanwhile"]
