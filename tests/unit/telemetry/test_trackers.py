"""Real TensorBoard, W&B, MLflow, ClearML and Trackio, whose files are read back, with repeated steps; and trackers that
fail."""

from __future__ import annotations

import inspect
import json
import posixpath
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_until

from elastic_rl.pipeline.records.run_log import LineFile, RunLog
from elastic_rl.report.build import read_records
from elastic_rl.telemetry.trackers import RewindDetector, Row, Trackers, WandB, mlflow_name, scalars


def never(name: str, why: str) -> None:
    raise AssertionError(f"{name} failed: {why}")


def run_with_a_recovery(folder: Path, names: Sequence[str]) -> dict[int, float]:
    """SFT phase, five steps with an evaluation, a recovery that goes back to step 3, and another process of the actor
    that continues from step 4. Returns the valid loss of each step."""
    failures: list[str] = []

    def start() -> tuple[RunLog, Trackers]:
        trackers = Trackers.from_names(
            names, folder, "job", lambda name, why: failures.append(f"{name}: {why}"))
        return RunLog(LineFile(folder / "steps.jsonl"), trackers), trackers

    def step(log: RunLog, number: int, loss: float) -> None:
        log.write("step", step=number, loss=loss, reward_mean=0.5, groups=[1, 2], seconds={"total": 1.0, "train": 0.5},
                  engines=[{"id": "e", "state": "ready"}], grad_norm=None, throughput={"mfu": 0.5},
                  algorithm={"entropy": 1.25})

    log, trackers = start()
    for number in (10, 20):
        log.write("sft", step=number, loss=2.0 / number, eval_accuracy=0.25, at=0.0)
    log.write("eval", step=0, eval_accuracy=0.25, policy_version=1)
    for number in range(1, 6):
        step(log, number, loss=1.0 / number)
    log.write("eval", step=5, eval_accuracy=0.5, policy_version=6)
    log.write("rewind", from_step=5, to_step=3, reason="a rank died")
    for number in (4, 5):
        step(log, number, loss=2.0 / number)
    trackers.close(timeout_s=300.0)
    log, trackers = start()
    for number in (5, 6):
        step(log, number, loss=4.0 / number)
    log.write("eval", step=6, eval_accuracy=0.75, policy_version=9)
    trackers.close(timeout_s=300.0)
    assert failures == []
    return {1: 1.0, 2: 1 / 2, 3: 1 / 3, 4: 2 / 4, 5: 4 / 5, 6: 4 / 6}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    folder = tmp_path_factory.mktemp("tracked")
    return folder, run_with_a_recovery(folder, ["tensorboard", "wandb"])


def test_tensorboard_shows_the_valid_row_of_each_step(tracked: tuple[Path, dict[int, float]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, loss = tracked
    assert len(list((folder / "tensorboard" / "rl").iterdir())) == 3, "one file for each rewind"
    shown = EventAccumulator(str(folder / "tensorboard" / "rl"), size_guidance={"scalars": 0}).Reload()
    assert {e.step: e.value for e in shown.Scalars("loss")} == pytest.approx(loss)
    assert [e.step for e in shown.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [(e.step, e.value) for e in shown.Scalars("eval_accuracy")] == [(0, 0.25), (6, 0.75)]
    assert {"seconds/total", "reward_mean", "engines_ready", "throughput/mfu",
            "algorithm/entropy"} <= set(shown.Tags()["scalars"])
    sft = EventAccumulator(str(folder / "tensorboard" / "sft")).Reload()
    assert [e.step for e in sft.Scalars("loss")] == [10, 20], "the steps of RL purged those of the SFT phase"


def wandb_history(path: Path) -> Iterator[dict[str, float]]:
    """The rows in a file of an offline run: records of a LevelDB log, each a protobuf message."""
    from wandb.proto import wandb_internal_pb2

    raw, at, parts = path.read_bytes(), 7, b""
    assert raw[:4] == b":W&B"
    while at + 7 <= len(raw):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", raw[at:at + 7])
        parts += raw[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record.FromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                yield {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}


def test_wandb_has_every_row_with_the_last_attempt_valid(tracked: tuple[Path, dict[int, float]]) -> None:
    folder, loss = tracked
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime)
    assert len(files) == 2, "one part for each process"
    assert {file.stem.removeprefix("run-") for file in files} == {
        json.loads((folder / "wandb" / "run.json").read_text())["id"]}, "all of them of one run"
    rows = [row for file in files for row in wandb_history(file)]
    steps = [row for row in rows if "rl/loss" in row]
    assert [row["rl/step"] for row in steps] == [1, 2, 3, 4, 5, 4, 5, 5, 6]
    assert [row["rl/attempt"] for row in steps] == [1, 1, 1, 1, 1, 2, 2, 3, 3]
    assert steps[0]["rl/throughput/mfu"] == 0.5 and steps[0]["rl/algorithm/entropy"] == 1.25
    assert {row["rl/step"]: row["rl/loss"] for row in steps} == pytest.approx(loss)
    assert [row["sft/step"] for row in rows if "sft/loss" in row] == [10, 20]


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"id": 1}', '{"id": "x", "attempts": {"rl": "many"}}'])
def test_damaged_file_of_the_wandb_run_begins_another_run(tmp_path: Path, damaged: str,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    asked: list[dict[str, Any]] = []
    signature = inspect.signature(wandb.init)

    def init(**given: Any) -> Any:
        signature.bind(**given)
        asked.append(given)
        raise ConnectionError("no server")

    monkeypatch.setattr(wandb, "init", init)
    file = tmp_path / "wandb" / "run.json"
    file.parent.mkdir()
    file.write_text(damaged)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            WandB(tmp_path, "job", "online")
    assert asked[0]["id"] == asked[1]["id"] == json.loads(file.read_text())["id"] and len(asked[0]["id"]) == 16
    assert asked[0]["mode"] == "online" and asked[0]["resume"] == "allow"


def _valid(rows: Sequence[dict[str, float]], name: str) -> dict[int, float]:
    """The number at each step: that of the row with the highest attempt, of those that have it."""
    found: dict[int, tuple[float, float]] = {}
    for row in rows:
        if name in row:
            step = int(row["rl/step"])
            found[step] = max(found.get(step, (0.0, 0.0)), (row["rl/attempt"], row[name]))
    return {step: value for step, (_, value) in found.items()}


@given(st.text(st.sampled_from("ab/._ 正(%-:"), min_size=1, max_size=8))
def test_mlflow_takes_every_name(name: str) -> None:
    """By its rules (``mlflow/utils/validation.py``): these signs only, and a path in its shortest form."""
    found = mlflow_name(name)
    assert re.fullmatch(r"[/\w.\- :]*", found)
    assert posixpath.normpath(found) == found != "." and not found.startswith(("..", "/"))
    if re.fullmatch(r"\w+(/\w+)*", name):
        assert found == name


def test_mlflow_keeps_names_apart() -> None:
    names = ["eval/正确/accuracy", "eval/格式/accuracy", "parts/a(b", "parts/a)b", "..", ".", "/math", "math/", "a//b"]
    assert len({mlflow_name(name) for name in names}) == len(names)


def test_mlflow_has_one_run_of_the_job_with_the_last_attempt_valid(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow.tracking", reason="needs the extra mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    loss = run_with_a_recovery(tmp_path, ["mlflow"])
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    [experiment] = [e for e in client.search_experiments() if e.name == "elastic-rl"]
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("job", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "rl/loss")
    assert len(history) == 9, "the rows of steps that were repeated stay"
    assert run.data.metrics["rl/attempt"] == 3, "a rewind, and another process"
    assert {m.step: m.value for m in sorted(history, key=lambda m: m.timestamp)} == pytest.approx(loss)
    assert [m.step for m in client.get_metric_history(run.info.run_id, "sft/loss")] == [10, 20]
    client.delete_run(run.info.run_id)
    run_with_a_recovery(tmp_path, ["mlflow"])
    [another] = client.search_runs([experiment.experiment_id])
    assert another.data.metrics["rl/attempt"] == 3, "what was deleted there is followed by a new run"


def test_trackio_has_one_run_of_the_job_with_the_last_attempt_valid(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="needs the extra trackio")
    from trackio.sqlite_storage import SQLiteStorage

    folder = tmp_path / "trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(folder))
    for module in ("utils", "sqlite_storage"):  # it read the variable as it was imported
        monkeypatch.setattr(f"trackio.{module}.TRACKIO_DIR", folder)
    loss = run_with_a_recovery(tmp_path, ["trackio"])
    [name] = SQLiteStorage.get_runs("elastic-rl")
    assert name == json.loads((folder / "run.json").read_text())["id"] and name.startswith("job-")
    rows = SQLiteStorage.get_logs("elastic-rl", name)
    assert _valid(rows, "rl/loss") == pytest.approx(loss)
    assert sum("rl/loss" in row for row in rows) == 9, "the rows of steps that were repeated stay"


def test_clearml_has_the_numbers_of_each_process_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues no task offline; the attempts count on."""
    pytest.importorskip("clearml", reason="needs the extra clearml")
    monkeypatch.delenv("CLEARML_API_ACCESS_KEY", raising=False)
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "clearml"))
    run_with_a_recovery(tmp_path, ["clearml"])
    files = sorted((tmp_path / "clearml" / "offline").glob("*/metrics.jsonl"), key=lambda p: p.stat().st_mtime)
    assert len(files) == 2, "one task for each process"
    reported = [event for file in files for line in file.read_text().splitlines() for event in json.loads(line)]
    found = [(e["iter"], e["value"]) for e in reported if e["metric"] == "rl/attempt"]
    assert sorted(found) == [(0, 1), *((n, 1) for n in range(1, 4)), (4, 1), (4, 2), (5, 1), (5, 1), (5, 2), (5, 3),
                             (6, 3), (6, 3)]


def test_tracker_error_is_reported_without_the_secrets_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARML_SECRET_KEY", "0123456789")
    reported: list[str] = []

    def away() -> Any:
        raise SystemExit("https://me:pa55@host/x?write_token=abc&a=1 said 401 for 0123456789")

    trackers = Trackers({"away": away}, lambda name, why: reported.append(why))
    wait_until(lambda: bool(reported), what="the report")
    trackers.close()
    assert reported == ["SystemExit: https://…@host/x?write_token=…&a=1 said 401 for …"]


def test_error_with_a_whole_page_is_reported_short(tmp_path: Path) -> None:
    reported: list[str] = []

    def away() -> NoReturn:
        raise ValueError("<html>" * 1_000_000)

    trackers = Trackers({"away": away}, lambda name, why: reported.append(why))
    wait_until(lambda: reported, what="the report")
    trackers.close()
    assert reported[0].startswith("ValueError: <html>") and len(reported[0]) <= 2000


def test_tracker_that_fails_or_hangs_is_reported_once_and_delays_nothing(tmp_path: Path) -> None:
    class Failing:
        def write(self, row: Row) -> None:
            raise OSError("no space left on device")

        def close(self) -> None:
            raise AssertionError("it had failed")

    class Hanging:
        def write(self, row: Row) -> None:
            threading.Event().wait()

        def close(self) -> None:
            raise AssertionError("it hangs before that")

    def absent() -> Any:
        raise ModuleNotFoundError("No module named 'wandb'")

    reported: list[tuple[str, str]] = []
    trackers = Trackers({"failing": Failing, "hanging": Hanging, "absent": absent},
                        lambda name, why: reported.append((name, why)))
    log = RunLog(LineFile(path := tmp_path / "steps.jsonl"), trackers)
    for step in range(1, 3001):
        log.write("step", step=step, loss=0.5)
    trackers.close(timeout_s=0.1)
    assert len(read_records(path)) == 3000
    wait_until(lambda: len(reported) == 3, what="three reports")
    assert {name: why.split(":")[0] for name, why in reported} == {
        "failing": "OSError", "absent": "ModuleNotFoundError", "hanging": "too slow"}


def test_only_numbers_of_training_steps_are_tracked() -> None:
    assert scalars("fault", {"step": 3, "at": 1.0}) is None and scalars("rewind", {"to_step": 1}) is None
    assert scalars("step", {"step": 3, "at": 9.0, "loss": 0.5, "grad_norm": None, "groups": [1], "ok": True,
                            "seconds": {"total": 2}, "engines": [{"state": "ready"}, {"state": "syncing"}]}) == (
        "rl", 3, {"loss": 0.5, "seconds/total": 2.0, "engines_ready": 1.0})
    assert scalars("eval", {"step": 3, "eval_accuracy": 0.5, "eval_sets": {"math": 0.25},
                            "eval_reward_parts": {"right": 1.0}}) == (
        "rl", 3, {"eval_accuracy": 0.5, "eval/math/accuracy": 0.25, "eval/reward_parts/right": 1.0})
    assert scalars("sampled", {"step": 1, "samples": 8}) == ("sampled", 1, {"samples": 8.0})


@given(st.lists(st.tuples(st.sampled_from(["step", "eval", "sft", "restart"]), st.integers(0, 6)), max_size=60))
def test_purging_leaves_every_step_once(history: list[tuple[str, int]]) -> None:
    detector = RewindDetector()
    kept: dict[str, list[tuple[int, str]]] = {"rl": [], "sft": []}
    for kind, step in history:
        if kind == "restart":
            detector = RewindDetector()
            continue
        row = detector.row(kind, {"step": step, "x": 1.0})
        assert row is not None and row.run == ("sft" if kind == "sft" else "rl")
        rows = kept[row.run]
        before = [(s, k) for s, k in rows if s < step or (s == step and kind == "eval")]
        if row.void_from is not None:
            rows[:] = [(s, k) for s, k in rows if s < row.void_from]
        assert rows == before, "a valid row is gone, or a void one is not"
        rows.append((row.step, kind))
    for rows in kept.values():
        steps = [s for s, kind in rows if kind != "eval"]
        assert steps == sorted(set(steps))


def test_evaluation_that_another_process_repeats_keeps_the_training_row_of_its_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rows in ([("step", 39), ("step", 40), ("step", 41)], [("eval", 40), ("step", 41)]):
        trackers = Trackers.from_names(["tensorboard"], tmp_path, "job", never)
        for kind, step in rows:
            trackers.offer(kind, {"step": step, "reward_mean" if kind == "step" else "eval_accuracy": step / 100})
        trackers.close(timeout_s=300.0)
    shown = EventAccumulator(str(tmp_path / "tensorboard" / "rl"), size_guidance={"scalars": 0}).Reload()
    assert [e.step for e in shown.Scalars("reward_mean")] == [39, 40, 41]
    assert [e.step for e in shown.Scalars("eval_accuracy")] == [40]


def test_no_thread_is_started_without_trackers() -> None:
    before = threading.active_count()
    trackers = Trackers.from_names([], Path("/nonexistent"), "job", never)
    trackers.offer("step", {"step": 1})
    trackers.close()
    assert threading.active_count() == before
