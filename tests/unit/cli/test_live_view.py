"""The live view: what it says of each record, on a terminal and off it."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.synthetic_run import records
from support.waiting import wait_until

from elastic_rl.cli import live_view
from elastic_rl.cli.cluster_reader import ClusterReader, ClusterState
from elastic_rl.cli.live_view import LiveView, RunConsole, RunState, Tail, plain_line, render, sparkline
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import KeyValue, Page
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, Event, JobStatus, Severity
from elastic_rl.report.build import Record


class _DeadStore:
    """A store whose members are all gone."""

    def get(self, key: str) -> None:
        raise EtcdUnavailable("no member answers")


def test_each_kind_of_record_has_a_plain_line() -> None:
    lines = {r["kind"]: plain_line(r, 200) for r in records()}
    assert lines["step"].startswith("step 200/200: reward 0.")
    assert "eval reward 0.9" in lines["eval"]
    assert lines["rewind"] == "back from step 94 to 90: rank 1 ended"
    assert lines["fault"].endswith("healed after 31.0 s")
    assert "loss" in lines["sft"]


def test_incomplete_record_is_shown() -> None:
    assert plain_line({"kind": "step", "step": 1}, 5).startswith("step 1/5: reward –")
    assert plain_line({"kind": "sampled", "step": 1}, 0).startswith("step 1: – samples of 0 prompts, reward –")


def test_sampled_step_says_how_long_its_responses_are_and_how_fast_they_came() -> None:
    record = {"kind": "sampled", "step": 1, "samples": 32, "groups": [0, 1], "reward_mean": 0.25, "lines": 2,
              "policy_version": 1, "response_tokens": {"mean": 12.5, "max": 20.0},
              "seconds": {"generate": 0.5, "total": 2}}
    assert plain_line(record, 3) == (
        "step 1/3: 32 samples of 2 prompts, reward 0.250, 2 written, version 1, responses of 12.5 tokens, at most 20, "
        "800 tokens/s, 2.00 s")
    assert "tokens/s" not in plain_line({**record, "seconds": {}}, 3)


def test_job_that_trains_nothing_is_shown_without_what_training_has() -> None:
    state = RunState(7)
    state.add({"kind": "sampled", "step": 2, "samples": 16, "groups": [0, 1], "reward_mean": 0.5, "lines": 3})
    shown = io.StringIO()
    status = JobStatus(phase="rejection_sampling", step=2, steps=7)
    Console(file=shown, width=100).print(render("j", state, ClusterState(status=status), elapsed_s=1.0))
    text = shown.getvalue()
    assert "step 2/7" in text and "16 of 2 prompts, 3 written" in text
    assert "eval reward" not in text and "log-prob" not in text


def test_groups_of_an_asynchronous_run_are_shown() -> None:
    state = RunState(7)
    found = []
    for algorithm in ({}, {"groups_queued": 12.0, "groups_leased": 20, "staleness_mean": 1.25, "groups_stale": 0}):
        state.add({"kind": "step", "step": 2, "reward_mean": 0.5, "algorithm": algorithm})
        shown = io.StringIO()
        Console(file=shown, width=120).print(render("j", state, ClusterState(), elapsed_s=1.0))
        found.append(shown.getvalue())
    assert "queued" not in found[0]
    assert "12 queued, 20 being generated, 0 too stale, – lost, staleness 1.25 in the mean" in found[1]


def test_further_evaluation_sets_are_shown_by_name() -> None:
    record = {"kind": "eval", "step": 3, "eval_accuracy": 0.5, "eval_sets": {"math": 0.25}}
    assert plain_line(record, 5) == "step 3/5: eval reward 0.500, math 0.250"
    assert plain_line(record | {"eval_reward_parts": {"right": 0.75}}, 5).endswith(", math 0.250, right 0.750")
    state = RunState(5)
    state.add(record)
    shown = io.StringIO()
    Console(file=shown, width=100).print(render("j", state, ClusterState(), elapsed_s=1.0))
    assert "math" in shown.getvalue()


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


def test_newer_lines_of_a_file_that_was_made_again_are_read(tmp_path: Path) -> None:
    def write(name: str, *steps: int) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"kind": "eval", "step": n, "at": float(n)}) + "\n" for n in steps))
        return path

    path = write("steps.jsonl", 1, 2, 3)
    tail = Tail(path)
    assert [r["step"] for r in tail.records()] == [1, 2, 3]
    write("again", 1, 2, 3, 4).rename(path)  # with what was there before
    assert [r["step"] for r in tail.records()] == [4] and tail.records() == []
    write("new", 5).rename(path)  # the file before was set aside
    assert [r["step"] for r in tail.records()] == [5]
    path.write_text("")  # cut off by somebody
    assert tail.records() == []
    path.write_text('{"kind": "eval", "step": 6, "at": 6.0}\n')
    assert [r["step"] for r in tail.records()] == [6]


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
        if step % 1000 == 0:
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
    lines = [line.split(":")[0] for line in text.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("step")][-3:] == ["step 1/200", "step 2/200", "step 3/200"]
    assert lines.count("waiting for etcd") == 1, "once, not at each refresh"
    assert "\x1b" not in text.getvalue()


def test_view_of_a_run_that_is_under_way_begins_with_its_last_record(tmp_path: Path) -> None:
    path, text = tmp_path / "steps.jsonl", io.StringIO()
    past, new = records(3, faults=False), records(4, faults=False)[-1:]
    path.write_text("".join(json.dumps(r) + "\n" for r in past))
    view = LiveView(job="j", steps=200, steps_path=path, etcd=_DeadStore(),  # type: ignore[arg-type]
                    console=Console(file=text, width=60), interval_s=0, skip_past=True)
    view.tick()
    with path.open("a") as file:
        file.write(json.dumps(new[0]) + "\n")
    view.tick()
    view.close()
    lines = [line for line in text.getvalue().splitlines() if "waiting for etcd" not in line]
    assert lines == [plain_line(past[-1], 200), plain_line(new[0], 200)]
    assert len(view.state.rewards) == 3 + (new[0]["kind"] == "step"), "the whole run is shown"


def test_run_that_resumes_has_lines_of_what_is_new_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "steps.jsonl", io.StringIO()
    old, resumed = (Event(id=kind, at=at, kind=kind, subject="j", message=message) for kind, at, message in (
        ("run.stopped", 90.0, "stopped"), ("run.resumed", 120.0, "resumes at step 2 of 9")))
    monkeypatch.setattr(ClusterReader, "latest", lambda self: ClusterState(events=(old, resumed)))
    lines = [{"kind": "step", "step": n, "reward_mean": 0.5, "at": at} for n, at in ((1, 70.0), (2, 80.0), (3, 130.0))]
    path.write_text("".join(json.dumps(r) + "\n" for r in lines[:2]))
    view = LiveView(job="j", steps=9, steps_path=path, etcd=_DeadStore(),  # type: ignore[arg-type]
                    console=Console(file=text, width=60), interval_s=0, lines_from=100.0)
    view.tick()
    with path.open("a") as file:
        file.write(json.dumps(lines[2]) + "\n")
    view.tick()
    view.close()
    assert text.getvalue().splitlines() == ["event run.resumed j: resumes at step 2 of 9", plain_line(lines[2], 9)]
    assert len(view.state.rewards) == 3, "the curve has the whole job"


def test_what_a_run_begins_with_stays_above_the_view_of_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    text = io.StringIO()
    found = tuple(Event(id=f"{n}", at=120.0, kind=kind, subject="j", message=f"text {n}") for n, kind in enumerate(
        ["run.resumed", "run.warned", *["engine.ready"] * 30]))
    monkeypatch.setattr(ClusterReader, "latest", lambda self: ClusterState(events=found))
    view = LiveView(job="j", steps=9, steps_path=tmp_path / "none", etcd=_DeadStore(),  # type: ignore[arg-type]
                    console=Console(file=text, width=80, force_terminal=True), interval_s=0, lines_from=100.0)
    view.tick()
    view.close()
    shown = text.getvalue()
    assert shown.count("event run.resumed j: text 0") == shown.count("event run.warned j: text 1") == 1
    assert "text 31" in shown and "text 5" not in shown


def test_view_whose_file_is_not_there_yet_begins_with_the_records_that_it_is_given(tmp_path: Path) -> None:
    path, text = tmp_path / "steps.jsonl", io.StringIO()
    past, new = records(3, faults=False), {"kind": "step", "step": 4, "reward_mean": 0.5}
    view = LiveView(job="j", steps=200, steps_path=path, etcd=_DeadStore(),  # type: ignore[arg-type]
                    console=Console(file=text, width=60), interval_s=0, past=past)
    view.tick()
    path.write_text("".join(json.dumps(r) + "\n" for r in [{"kind": "history", "id": "x"}, *past]))
    view.tick()
    with path.open("a") as file:
        file.write(json.dumps(new) + "\n")
    view.tick()
    view.close()
    lines = [line for line in text.getvalue().splitlines() if "waiting for etcd" not in line]
    last = plain_line(past[-1], 200)
    assert lines == [last, last, plain_line(new, 200)], "the whole file is no news"
    assert len(view.state.rewards) == 4


class _LateRecords:
    """Records from an etcd that answers late."""

    found = False

    def __init__(self) -> None:
        self.now: list[Record] = []

    def records(self) -> list[Record]:
        now, self.now = self.now, []
        return now

    def close(self) -> None:
        pass


def test_view_of_a_run_elsewhere_waits_for_the_record_that_it_begins_with(tmp_path: Path) -> None:
    source, text = _LateRecords(), io.StringIO()
    past, new = records(3, faults=False), records(4, faults=False)[-1:]
    view = LiveView(job="j", steps=200, steps_path=tmp_path / "none", etcd=_DeadStore(),  # type: ignore[arg-type]
                    console=Console(file=text, width=60), interval_s=0, skip_past=True, records=source)
    view.tick()
    source.now, source.found = past, True
    view.tick()
    source.now = new
    view.tick()
    view.close()
    lines = [line for line in text.getvalue().splitlines() if "waiting for etcd" not in line]
    assert lines == [plain_line(past[-1], 200), plain_line(new[0], 200)]


def test_view_reads_the_end_of_a_long_file_and_the_faults_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                    ) -> None:
    monkeypatch.setattr(live_view, "_PAST_BYTES", 200)
    path, faults = tmp_path / "steps.jsonl", tmp_path / "faults.jsonl"
    path.write_text("".join(json.dumps({"kind": "step", "step": n, "reward_mean": 0.5}) + "\n" for n in range(1000)))
    faults.write_text(json.dumps({"kind": "fault", "name": "engine_killed", "target": "e", "step": 9}) + "\n")
    text = io.StringIO()
    view = LiveView(job="j", steps=2000, steps_path=path, etcd=_DeadStore(),  # type: ignore[arg-type]
                    console=Console(file=text, width=60), interval_s=0, faults_path=faults)
    view.tick()
    view.close()
    assert sorted(view.state.rewards) == [996, 997, 998, 999] and len(view.state.notes) == 1


class _SlowStore:
    """A store that answers nothing until it is released, and is then gone."""

    def __init__(self) -> None:
        self.asked, self.released = threading.Event(), threading.Event()

    def get(self, key: str) -> None:
        self.asked.set()
        self.released.wait(60)
        raise EtcdUnavailable("no member answers")


def test_view_never_waits_for_etcd(tmp_path: Path) -> None:
    store, text = _SlowStore(), io.StringIO()
    view = LiveView(job="j", steps=5, steps_path=tmp_path / "steps.jsonl", etcd=store,  # type: ignore[arg-type]
                    console=Console(file=text, width=60), interval_s=0)
    try:
        assert store.asked.wait(60)
        view.tick({"dcs-j": "has ended and is started again in 3 s"})
        view.tick({"dcs-j": "has ended and is started again in 2 s"})
        view.tick({})
        assert not store.released.is_set(), "the reading of etcd is still under way"
    finally:
        store.released.set()
        view.close()
    assert text.getvalue().splitlines()[:2] == ["dcs-j has ended and is started again in 3 s",
                                                "dcs-j is back"]


def test_outage_is_counted_from_the_last_answer_and_keeps_what_was_read() -> None:
    now, away = [100.0], [False]

    class Store:
        endpoints = ("e",)

        def get(self, key: str) -> KeyValue:
            if away[0]:
                raise EtcdUnavailable("no member answers")
            return KeyValue(key, JobStatus(phase="rl").encode(), 1, 1, 1, 0)

        def page(self, prefix: str, *, limit: int) -> Page:
            return Page([KeyValue(prefix + "x", b"garbage", 1, 1, 1, 0)], 1, False)

        def range(self, prefix: str, **more: object) -> tuple[list[KeyValue], int]:
            return [], 1

    reader = ClusterReader(Store(), Keys("j"), interval_s=0.01, clock=lambda: now[0])  # type: ignore[arg-type]
    try:
        wait_until(lambda: reader.latest().status, what="the first reading")
        away[0] = True
        wait_until(lambda: reader.latest().error, what="the outage")
        now[0] += 3600.0
        state = reader.latest()
        assert state.away_s == pytest.approx(3600.0) and state.status == JobStatus(phase="rl")
        away[0] = False
        wait_until(lambda: not reader.latest().error, what="the end of the outage")
    finally:
        reader.close()


def test_console_that_is_gone_ends_the_view_and_not_the_run(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    view = LiveView(job="j", steps=5, steps_path=tmp_path / "steps.jsonl", etcd=_DeadStore(),  # type: ignore[arg-type]
                    console=RunConsole(file=Gone(), width=60), interval_s=0)
    for _ in range(3):
        view.tick({"etcd-0": "has ended"})
    view.close()


def test_view_shows_engines_events_and_an_etcd_outage() -> None:
    state = RunState(200)
    for record in records():
        state.add(record)
    engine = Engine(id="engine-7", pool="rollout", state=EngineState.READY, epoch=1, version=205, applying=206)
    event = Event(id="1", at=1.76e9, kind="engine.dead", subject="engine-1", message="gone", severity=Severity.ERROR)
    status = JobStatus(phase="rl", stage="generate", waiting_for="an engine that serves version 206\x1b[2J",
                       waiting_kind="engines", waiting_since=time.time() - 205)
    cluster = ClusterState(status, (engine,), 1000, (event,), error="no member answers")
    text = io.StringIO()
    Console(file=text, width=100, force_terminal=True).print(render("my-run", state, cluster, elapsed_s=75, width=100))
    for word in ("my-run", "1:15", "engine-7", "205 → 206", "engine.dead", "no member answers", "step 200/200",
                 "… of 1000", "rl: generate", "waiting in generate for 3:", "entropy 0.3", "gradient norm 0.4",
                 "tokens/s generated", "0.42 GiB a rank at most",
                 "an engine that serves version 206\ufffd[2J"):
        assert word in text.getvalue()


def test_view_of_steps_without_metrics_has_no_line_of_them() -> None:
    state = RunState(200)
    state.add({"kind": "step", "step": 1, "grad_norm": None})
    text = io.StringIO()
    Console(file=text, width=100).print(render("j", state, ClusterState(None, (), 0, ()), elapsed_s=1, width=100))
    assert "update" not in text.getvalue() and "throughput" not in text.getvalue()


class _Store:
    """A store that holds the job's status alone."""

    def __init__(self) -> None:
        self.status = JobStatus(phase="rl")

    def get(self, key: str) -> KeyValue:
        return KeyValue(key, self.status.encode(), 1, 1, 1, 0)

    def page(self, prefix: str, **more: object) -> Page:
        return Page([], 1, False)

    def range(self, prefix: str, **more: object) -> tuple[list[KeyValue], int]:
        return [], 1


def test_without_a_terminal_a_wait_is_one_line_and_its_end_another(tmp_path: Path) -> None:
    text, store = io.StringIO(), _Store()
    view = LiveView(job="j", steps=200, steps_path=tmp_path / "steps.jsonl", etcd=store,  # type: ignore[arg-type]
                    console=Console(file=text, width=60), interval_s=0)
    for kind, what in (("", ""), ("engines", "an engine at v2"), ("engines", "an engine at v2: e0 at v1"),
                       ("trainer", "the trainer"), ("", "")):
        store.status = JobStatus(phase="rl", stage="generate", waiting_kind=kind, waiting_for=what)
        wait_until(lambda: view._reader.latest().status == store.status, what="the next reading")
        view.tick()
    view.close()
    lines = [line.partition(": ")[2] or line for line in text.getvalue().splitlines()]
    assert lines == ["an engine at v2", "the trainer", "the run goes on"]
