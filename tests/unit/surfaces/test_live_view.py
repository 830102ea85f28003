"""The live view: what it says of each record, on a terminal and off it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from support.synthetic_run import records

from elastic_rl.cli import live_view
from elastic_rl.cli.live_view import ClusterState, LiveView, RunState, Tail, plain_line, render, sparkline
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.records import Engine, EngineState, Event, JobStatus, Severity


class _DeadStore:
    """A store whose members are all gone."""

    def get(self, key: str) -> None:
        raise EtcdUnavailable("no member answers")


def test_each_kind_of_record_has_a_plain_line() -> None:
    lines = {r["kind"]: plain_line(r, 200) for r in records()}
    assert lines["step"].startswith("step 200/200: reward 0.")
    assert "eval accuracy 0.9" in lines["eval"]
    assert lines["rewind"] == "back from step 94 to 90: rank 1 ended"
    assert lines["fault"].endswith("healed after 31.0 s")
    assert "loss" in lines["sft"]


def test_incomplete_record_is_shown() -> None:
    assert plain_line({"kind": "step", "step": 1}, 5).startswith("step 1/5: reward –")


def test_sparkline_spans_its_range() -> None:
    assert sparkline([0.0, 0.5, 1.0, 9.0], 10) == "▁▅██"
    assert len(sparkline([0.1] * 500, 40)) == 40
    assert sparkline([], 40) == ""


def test_incomplete_last_line_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = Tail(path)
    assert tail.records() == []
    path.write_text('{"kind": "eval", "st')
    assert tail.records() == []
    with path.open("a") as f:
        f.write('ep": 4}\n')
    assert tail.records() == [{"kind": "eval", "step": 4}]
    assert tail.records() == []


def test_rewind_removes_the_undone_steps() -> None:
    state = RunState(200)
    for record in records():
        state.add(record)
    assert sorted(state.rewards) == list(range(1, 201))
    state.add({"kind": "rewind", "from_step": 200, "to_step": 190, "reason": "x"})
    assert max(state.rewards) == 190


def test_memory_of_a_long_run_is_bounded() -> None:
    state = RunState(10**6)
    for step in range(1, 20_000):
        state.add({"kind": "step", "step": step, "reward_mean": 0.5})
        state.add({"kind": "rewind", "from_step": step, "to_step": step, "reason": "x"})
    assert len(state.rewards) <= 4000 and max(state.rewards) == 19_999 and len(state.notes) == 3


def test_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "_READ_BYTES", 64)
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps({"kind": "eval", "step": n}) + "\n" for n in range(20)))
    tail, parts = Tail(path), []
    while part := tail.records():
        parts.append([r["step"] for r in part])
    assert sum(parts, []) == list(range(20)) and len(parts) > 5


def test_without_a_terminal_records_are_lines_also_without_etcd(tmp_path: Path) -> None:
    path, text = tmp_path / "steps.jsonl", io.StringIO()
    view = LiveView(job="j", steps=200, steps_path=path, etcd=_DeadStore(),  # type: ignore[arg-type]
                    console=Console(file=text, width=60), interval_s=0)
    path.write_text("".join(json.dumps(r) + "\n" for r in records(3, faults=False)))
    view.tick()
    view.close()
    lines = text.getvalue().splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["step 1/200", "step 2/200", "step 3/200"]
    assert "\x1b" not in text.getvalue()


def test_view_shows_engines_events_and_an_etcd_outage() -> None:
    state = RunState(200)
    for record in records():
        state.add(record)
    engine = Engine(id="engine-7", pool="rollout", state=EngineState.READY, epoch=1, version=205, applying=206)
    event = Event(id="1", at=1.76e9, kind="engine.dead", subject="engine-1", message="gone", severity=Severity.ERROR)
    cluster = ClusterState(JobStatus(phase="rl"), (engine,), 1000, (event,), error="no member answers")
    text = io.StringIO()
    Console(file=text, width=100, force_terminal=True).print(render("my-run", state, cluster, elapsed_s=75, width=100))
    for word in ("my-run", "1:15", "engine-7", "205 → 206", "engine.dead", "no member answers", "step 200/200",
                 "… of 1000"):
        assert word in text.getvalue()
