"""Files and processes of a killed compute plane: a sweep removes those of its job, and no others."""

from __future__ import annotations

import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl import config
from elastic_rl.dcs.storage.arena import PREFIX
from elastic_rl.errors import PreflightFailed
from elastic_rl.host import leftovers, local_cluster, processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths

names = st.text(st.sampled_from("ab.-_/ é"), min_size=1, max_size=4)


@given(names, names, names)
def test_tag_of_a_part_never_matches_files_of_another_part(part: str, other: str, start: str) -> None:
    job = JobPaths(Path("/runs/job"))
    tag, narrower = job.file_tag(part), job.file_tag(other, start)
    assert narrower.startswith(job.file_tag())
    same = job.file_tag(other) == tag
    assert (tag in narrower) == same


def test_tag_is_a_file_name_and_differs_between_jobs() -> None:
    tag = JobPaths(Path("/runs/job")).file_tag("engines/a b", "1")
    assert "/" not in tag and " " not in tag
    assert JobPaths(Path("/other/job")).file_tag("engines/a b", "1") != tag


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[tuple[JobPaths, JobPaths]]:
    """Two jobs, each with a process and files in both folders."""
    both = JobPaths(tmp_path / "one"), JobPaths(tmp_path / "two")
    yield both
    for job in both:
        leftovers.sweep(job)


def test_sweep_removes_processes_and_files_of_its_job_only(jobs: tuple[JobPaths, JobPaths]) -> None:
    running, files = {}, {}
    for job in jobs:
        running[job] = processes.spawn([sys.executable, "-c", "import time; time.sleep(600)"],
                                           log=job.log("engine"), env={processes.RUN_MARK: str(job.private)})
        tag = job.file_tag("engine", secrets.token_hex(4))
        files[job] = [leftovers.SHM / f"sgl_{tag}_x", Path(tempfile.gettempdir()) / f"{tag}tmpx"]
        for file in files[job]:
            file.touch()
    swept, kept = jobs
    assert leftovers.sweep(swept) == [running[swept].pid]
    assert running[swept].poll() is not None and not any(f.exists() for f in files[swept])
    assert running[kept].poll() is None and all(f.exists() for f in files[kept])


def test_temp_folder_is_private_and_shared_and_a_sweep_deletes_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    job = JobPaths(tmp_path / "job")
    leftovers.make_temp_folder(job)
    folder, compiled = map(Path, leftovers.temp_environment(job).values())
    assert {stat.S_IMODE(f.stat().st_mode) for f in (folder, compiled)} == {0o700}
    assert folder == job.temp != JobPaths(tmp_path / "other").temp
    (folder / "r").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert job.temp == folder, "a process of the job finds it elsewhere"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftovers.sweep(job)
    assert not folder.exists() and compiled.exists()


def test_cache_of_the_compiler_that_the_user_names_is_left_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    leftovers.make_temp_folder(JobPaths(tmp_path / "job"))
    assert [*tmp_path.iterdir()] == [JobPaths(tmp_path / "job").temp]


def test_temp_folder_that_cannot_be_made_is_a_fault_of_the_machine(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(PreflightFailed, match="none.*No such file"):
        leftovers.make_temp_folder(JobPaths(tmp_path / "job"))


def test_entries_that_others_made_do_not_stop_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tag = JobPaths(tmp_path / "job").file_tag()
    pipe, ours, link = (tmp_path / f"{name}{tag}" for name in ("b", "y", "z"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "kept").touch()
    os.mkfifo(pipe)
    link.symlink_to(foreign)
    ours.touch()
    assert sorted(leftovers.remove_files(tag)) == [ours, link]
    assert sorted(tmp_path.rglob("*")) == [pipe, foreign, foreign / "kept"]


def test_folder_is_removed_whole_without_following_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tag, other = (JobPaths(tmp_path / "job").file_tag(name) for name in ("engine", "other"))
    folder, kept, of_other = (tmp_path / name for name in (f"{tag}tmpx-media", "kept", f"{other}tmpx"))
    for made in (folder, folder / "logs", kept, of_other):
        made.mkdir()
    (folder / "logs" / "0").touch()
    (kept / "file").touch()
    (folder / "link").symlink_to(kept)
    assert leftovers.remove_files(tag) == [folder]
    assert sorted(tmp_path.rglob("*")) == sorted([kept, kept / "file", of_other])


def test_file_that_cannot_be_unlinked_does_not_stop_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                ) -> None:
    """As a file of this user in a folder that it may not write to."""
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tag = JobPaths(tmp_path / "job").file_tag()
    kept, removed = tmp_path / f"{tag}a", tmp_path / f"{tag}b"
    kept.touch()
    removed.touch()
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == kept:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert leftovers.remove_files(tag) == [removed]


def test_files_of_another_user_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tag = JobPaths(tmp_path / "job").file_tag()
    theirs, folder = tmp_path / f"{tag}a", tmp_path / f"{tag}b"
    theirs.touch()
    folder.mkdir()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert leftovers.remove_files(tag) == [] and theirs.exists() and folder.exists()


def test_shared_memory_of_a_job_is_what_this_user_has_and_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                    ) -> None:
    monkeypatch.setattr(local_cluster, "SHM", tmp_path)
    cluster = Cluster(config.parse({"job": "j", "run_dir": str(tmp_path / "runs")}))
    ours, folder, link, foreign = (tmp_path / f"{PREFIX}j-{cluster.host.node}-{n}" for n in range(4))
    ours.touch()
    folder.mkdir()
    link.symlink_to(tmp_path / "x")
    foreign.touch()
    mine = leftovers.own_mode
    monkeypatch.setattr(leftovers, "own_mode", lambda path: 0 if path == foreign else mine(path))
    assert cluster.segments() == [ours]
    cluster._unlink_segments()
    assert sorted(tmp_path.iterdir()) == [folder, link, foreign]
