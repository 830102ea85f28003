"""The whole run of the default tier, by ``elastic-rl chaos``: one job on real parts, in which each part that the run
needs is lost, several at once where they recover independently of each other. Its log of events is judged by every
rule."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from chaos_tests.event_log import Kind, read
from chaos_tests.nemesis.schedule import Schedule, Strike

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

# With one engine the run waits for each of these parts, so that the number of steps does not depend on the machine.
SCHEDULE = Schedule(
    0, 18, (Strike(2, ("engine_killed", "coordinator_killed")), Strike(4, ("trainer_rank_killed", "router_killed")),
            Strike(6, ("actor_killed",)), Strike(8, ("dcs_killed",)), Strike(10, ("etcd_stopped",))),
    scenario="quick", settings=("--trainer.data_parallel=2", "--sft.max_steps=4"))


def test_every_step_is_done_exactly_once_although_each_part_is_lost(tmp_path: Path) -> None:
    schedule, results = tmp_path / "schedule.json", tmp_path / "results"
    schedule.write_text(SCHEDULE.to_json())
    done = subprocess.run([sys.executable, "-m", "elastic_rl.cli.main", "chaos", "replay", str(schedule), "--out",
                           str(results)], capture_output=True, encoding="utf-8", check=False)
    print(done.stderr)
    assert done.returncode == 0 and "every rule was kept" in done.stdout, done.stdout
    events = [*read(results / "events.jsonl")]
    of = {kind: [e for e in events if e["kind"] == kind] for kind in Kind}
    assert sorted(fault["name"] for fault in of[Kind.FAULT]) == sorted(
        name for strike in SCHEDULE.strikes for name in strike.faults)
    assert all(fault["witness"] and fault["healed_at"] and not fault["problem"] for fault in of[Kind.FAULT])
    assert {e["step"] for e in of[Kind.STEP]} == set(range(1, 19)) and events[-1]["phase"] == "finished"
    # What each part of the log is for: none of them may be silent.
    assert all(of[kind] for kind in Kind if kind not in (Kind.OPERATION, Kind.LEFTOVER))
    assert of[Kind.CHANGE] == sorted(of[Kind.CHANGE], key=lambda change: change["revision"])
    epochs = [json.loads(e["value"]) for e in of[Kind.CHANGE] if e["key"].endswith("/epoch")]
    assert {epoch["number"] for epoch in epochs} == {1}, "a part was answered by a global restart"
    assert "run.crash_loop" not in [e["name"] for e in of[Kind.EVENT]]
    [page] = (results / "cluster").glob("*/report.html")
    assert page.read_text().startswith("<!doctype html>")
