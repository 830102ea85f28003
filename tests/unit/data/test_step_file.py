"""The file of a step's batch: what is written is read again, and what is not of the job and step is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.config import parse
from elastic_rl.data import step_file
from elastic_rl.data.batch import Batch
from elastic_rl.data.step_file import StepFile, StepKeeper, first_of, path_of, read
from elastic_rl.errors import ConfigError

JOB = "j 01"


def batch(lengths: list[int]) -> Batch:
    total = sum(lengths)
    mask = torch.ones(total, dtype=torch.bool)
    mask[[sum(lengths[:i]) for i in range(len(lengths))]] = False
    return Batch({"tokens": torch.arange(total, dtype=torch.int32), "lengths": torch.tensor(lengths), "loss_mask": mask,
                  "advantages": torch.arange(len(lengths), dtype=torch.float32),
                  "old_logprobs": -torch.ones(int(mask.sum()))})


@settings(max_examples=seeds(40))
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 10 ** 6), st.lists(st.integers(0, 10 ** 9)))
def test_file_has_the_batch_as_it_was(lengths: list[int], step: int, versions: list[int]) -> None:
    written = StepFile(JOB, step, tuple(versions), batch(lengths))
    found = StepFile.decode(written.encode())
    assert (found.job, found.step, found.versions) == (JOB, step, tuple(versions))
    assert found.batch.tensors.keys() == written.batch.tensors.keys()
    assert all(torch.equal(found.batch[name], written.batch[name]) for name in written.batch.tensors)


@settings(max_examples=seeds(40))
@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_bytes_are_refused_with_the_error_of_settings(raw: bytes, at: int) -> None:
    whole = StepFile(JOB, 1, (1,), batch([3, 2])).encode()
    for damaged in (raw, whole[:at], whole[:at] + raw):
        try:
            StepFile.decode(damaged)
        except ConfigError:
            continue
        assert damaged[:8] == whole[:8]


def test_chosen_steps_alone_are_kept_and_the_newest_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_file, "MAX_FILES", 2)
    keeper = StepKeeper([2, 3, 5], tmp_path / "steps", JOB)
    for step in range(1, 7):
        keeper.keep(step, batch([step, 2]), [step])
        if (path := path_of(tmp_path / "steps", step)).exists():
            os.utime(path, (step, step))
    assert {p.name for p in (tmp_path / "steps").iterdir()} == {"step-000003.safetensors", "step-000005.safetensors"}
    found = read(tmp_path / "steps", 5, JOB)
    assert found.step == 5 and found.versions == (5,) and found.batch["lengths"].tolist() == [5, 2]
    assert path_of(tmp_path / "steps", 5).stat().st_mode & 0o077 == 0


def test_first_batch_of_a_step_that_is_made_again_stays_beside_the_newest(tmp_path: Path) -> None:
    keeper = StepKeeper([2], tmp_path, JOB)
    for lengths in ([9, 9, 9], [9, 9], [9]):
        keeper.keep(2, batch(lengths), [1])
    assert {p.name for p in tmp_path.iterdir()} == {"step-000002.safetensors", "step-000002-first.safetensors"}
    assert read(tmp_path, 2, JOB).batch["lengths"].tolist() == [9]
    os.replace(first_of(tmp_path, 2), path_of(tmp_path, 2))
    assert read(tmp_path, 2, JOB).batch["lengths"].tolist() == [9, 9, 9]


def test_batch_that_is_too_large_or_cannot_be_encoded_stops_no_step(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = StepKeeper([1], tmp_path, JOB)
    shared = batch([2, 2])

    def lacks_memory(file: StepFile) -> bytes:
        raise MemoryError

    monkeypatch.setattr(StepFile, "encode", lacks_memory)
    keeper.keep(1, shared, [1])
    monkeypatch.setattr(step_file, "MAX_BYTES", 10)
    monkeypatch.setattr(StepFile, "encode", lambda file: pytest.fail("it is loaded"))
    keeper.keep(1, shared, [1])
    assert list(tmp_path.iterdir()) == []


def test_pipe_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(path_of(tmp_path, 1))
    with pytest.raises(ConfigError, match="no regular file"):
        read(tmp_path, 1, JOB)


def test_folder_that_cannot_be_written_stops_no_step(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    StepKeeper([1], tmp_path / "file", JOB).keep(1, batch([2]), [1])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_file_of_another_job_or_step_or_none_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="was not kept") as error:
        read(tmp_path, 3, JOB)
    assert "--train.keep_steps=[3]" in error.value.hint
    StepKeeper([2], tmp_path, "other 01").keep(2, batch([2]), [1])
    with pytest.raises(ConfigError, match="of job 'other'"):
        read(tmp_path, 2, JOB)
    with pytest.raises(ConfigError, match="earlier one of this name"):
        read(tmp_path, 2, "other 02")
    path_of(tmp_path, 2).rename(path_of(tmp_path, 4))
    with pytest.raises(ConfigError, match="is of step 2"):
        read(tmp_path, 4, "other 01")
    with pytest.raises(ConfigError, match="was not kept") as error:
        read(tmp_path, 3, JOB)
    assert "steps 4" in error.value.hint
    path_of(tmp_path, 3).write_bytes(batch([2]).to_bytes())
    with pytest.raises(ConfigError, match="no file of a step's batch"):
        read(tmp_path, 3, JOB)


def test_identity_is_of_the_name_and_the_id(tmp_path: Path) -> None:
    assert step_file.identity("j", tmp_path / "job_id") == "j "
    (tmp_path / "job_id").write_text("abc\n")
    assert step_file.identity("j", tmp_path / "job_id") == "j abc"


def test_steps_made_of_parts_are_not_kept() -> None:
    with pytest.raises(ConfigError, match="keep_steps"):
        parse({"train": {"schedule": "fully_async", "prompts_per_part": 8, "keep_steps": [1]}})
