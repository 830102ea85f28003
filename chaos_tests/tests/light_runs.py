"""Runs of light jobs (``chaos_tests.traffic.light_job``) that wait for a file: what happens to them happens within
them, however slow the machine is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.waiting import wait_until

from chaos_tests.event_log import Kind, read
from chaos_tests.scenarios import Scenario
from chaos_tests.traffic.workloads import WORKLOADS

OF_RUNS_WITHOUT_FAULTS = frozenset({Kind.PROCESS, Kind.STORE})
"""Kinds of records that runs with faults have none of."""


def records(folder: Path, kind: Kind) -> list[dict[str, Any]]:
    return [dict(event) for event in read(folder / "events.jsonl") if event["kind"] == kind]


def goes_on(go: Path, folder: Path, said: Sequence[str], scenario: Scenario) -> None:
    """Makes the file once the run in ``folder``, which has said this so far, has recovered from a fault, and its
    clients have had enough answers, each kind of them some."""
    models = {WORKLOADS[name].model for name in scenario.traffic} - {""}

    def has_seen_enough() -> bool:
        if not any("healed after" in line for line in said):
            return False
        answers = Counter(event["model"] for event in records(folder, Kind.OPERATION) if event["ended_s"] is not None)
        return answers.keys() >= models and answers.total() > scenario.floor_answers

    def wait() -> None:
        wait_until(has_seen_enough, what="the moment of the test", timeout_s=600)
        go.touch()

    threading.Thread(target=wait, daemon=True).start()
