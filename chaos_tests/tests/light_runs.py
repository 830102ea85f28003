"""Runs of light jobs (``chaos_tests.traffic.light_job``) that wait for a file: what happens to them happens within
them, however slow the machine is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.waiting import wait_until

from chaos_tests.event_log import Kind, read
from chaos_tests.scenarios import Scenario
from chaos_tests.traffic import driver_writes, light_job
from chaos_tests.traffic.workloads import WORKLOADS

SETTINGS = ("--dcs.arena_bytes=33554432",)
OF_RUNS_WITHOUT_FAULTS = frozenset({Kind.PROCESS, Kind.STORE})
"""Kinds of records that runs with faults have none of."""


def in_place_of_the_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Has jobs of this process be light; returns the file that lets one go on."""
    go = folder / "go"
    command = [*light_job.COMMAND, "--go", str(go)]
    for name, value in driver_writes.environment(folder, command).items():
        monkeypatch.setenv(name, value)
    return go


def records(folder: Path, kind: Kind) -> list[dict[str, Any]]:
    return [dict(event) for event in read(folder / "events.jsonl") if event["kind"] == kind]


def goes_on(go: Path, folder: Path, said: Sequence[str], scenario: Scenario,
            seen: Callable[[], bool] = lambda: True) -> None:
    """Makes the file once the run in ``folder``, which has said this so far, has recovered from a fault, its clients
    have had enough answers, each kind of them some, and ``seen`` says so."""
    models = {WORKLOADS[name].model for name in scenario.traffic} - {""}

    def has_seen_enough() -> bool:
        if not any("healed after" in line for line in said):
            return False
        answers = Counter(event["model"] for event in records(folder, Kind.OPERATION) if event["ended_s"] is not None)
        return answers.keys() >= models and answers.total() > scenario.floor_answers and seen()

    def wait() -> None:
        wait_until(has_seen_enough, what="the moment of the test", timeout_s=600)
        go.touch()

    threading.Thread(target=wait, daemon=True).start()
