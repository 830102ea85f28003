"""Profiles of chosen steps, with torch's profiler on the CPU."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_rl.config import parse
from elastic_rl.errors import ConfigError, StepRefused
from elastic_rl.trainer import profiling
from elastic_rl.trainer.profiling import StepProfiler


def profiler(folder: Path, rank: int = 0, written: list[Path] | None = None, **settings: Any) -> StepProfiler:
    cfg = parse({"trainer": {"profile_steps": [2, 5], **settings}}).trainer
    found = [] if written is None else written
    return StepProfiler(cfg, folder, "trainer", rank, cuda=False, written=found.append)


def work() -> None:
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()


def test_chosen_steps_of_chosen_ranks_are_written_and_reported(tmp_path: Path) -> None:
    written: list[Path] = []
    for rank in (0, 1, 2):
        of_rank = profiler(tmp_path / "profiles", rank, written, profile_ranks=[0, 2], data_parallel=3)
        for step in range(1, 5):
            with of_rank.step("rl", step):
                work()
        of_rank.close()
    names = [f"rl-step-000002-trainer-rank-{rank}.trace.json.gz" for rank in (0, 2)]
    assert [path.name for path in written] == names == sorted(p.name for p in (tmp_path / "profiles").iterdir())
    events = json.loads(gzip.decompress(written[0].read_bytes()))["traceEvents"]
    assert {"aten::mm", "aten::sum"} <= {event.get("name") for event in events}


def test_snapshot_of_memory_is_reported_by_another_thread_than_the_ranks(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report goes to etcd, which may be away. There is no GPU here, so torch's functions are stand-ins."""
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    reported = list[tuple[Path, threading.Thread]]()
    cfg = parse({"trainer": {"profile_steps": [2], "profile": ["memory"]}}).trainer
    found = StepProfiler(cfg, tmp_path, "trainer", 0, cuda=True,
                         written=lambda path: reported.append((path, threading.current_thread())))
    with pytest.raises(StepRefused), found.step("rl", 2):
        raise StepRefused("it does not fit")
    found.close()
    [(path, thread)] = reported
    assert path.read_text() == "snapshot" and thread is not threading.current_thread()


def test_parts_of_a_step_have_files_of_their_own_and_one_made_again_replaces_them(tmp_path: Path) -> None:
    found = profiler(tmp_path)
    for piece in ("part-0", "apply", "apply"):
        with found.step("rl", 5, piece):
            work()
        found.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f"rl-step-000005-{piece}-trainer-rank-0.trace.json.gz" for piece in ("apply", "part-0")]


def test_oldest_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MAX_FILES", 2)
    for n in range(3):
        (tmp_path / f"old-{n}.trace.json.gz").touch()
        os.utime(tmp_path / f"old-{n}.trace.json.gz", (n, n))
    found = profiler(tmp_path)
    with found.step("sft", 2):
        work()
    found.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "old-2.trace.json.gz", "sft-step-000002-trainer-rank-0.trace.json.gz"]


@pytest.mark.filterwarnings("error")
def test_step_is_made_where_the_profiler_fails_and_its_own_error_is_raised(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = profiler(tmp_path / "failing")
    with pytest.raises(StepRefused), failing.step("rl", 2):
        raise StepRefused("it does not fit")
    failing.close()
    assert len(list((tmp_path / "failing").iterdir())) == 1, "what one wants to see of a step that fails"
    (tmp_path / "file").touch()
    found, done = profiler(tmp_path / "file"), []
    with found.step("rl", 2):
        done.append("the folder cannot be made")
    found.close()

    def no_driver(*_: object, **__: object) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch.profiler.profile, "start", no_driver)
    with profiler(tmp_path).step("rl", 2):
        done.append("the profiler does not start")
    assert len(done) == 2 and {p.name for p in tmp_path.iterdir()} == {"file", "failing"}


def test_cpu_has_no_snapshot_of_memory(tmp_path: Path) -> None:
    found = profiler(tmp_path, profile=["memory"])
    with found.step("rl", 2):
        work()
    found.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="memory is for GPUs"):
        parse({"device": {"type": "cpu"}, "trainer": {"profile_steps": [1], "profile": ["memory"]}})


def test_ranks_that_the_group_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="profile_ranks"):
        parse({"trainer": {"profile_steps": [1], "profile_ranks": [2], "data_parallel": 2}})
    assert parse({"trainer": {"profile_ranks": [2]}}).trainer.profile_steps == []
