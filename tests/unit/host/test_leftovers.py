"""Files and processes of a killed compute plane: a sweep removes those of its cluster, and no others."""

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

from elastic_rl.errors import PreflightFailed
from elastic_rl.host import leftovers, processes

names = st.text(st.sampled_from("ab.-_/ é"), min_size=1, max_size=4)


@given(names, names, names)
def test_tag_of_a_part_never_matches_files_of_another_part(part: str, other: str, start: str) -> None:
    cluster = Path("/runs/job/cluster")
    tag, narrower = leftovers.file_tag(cluster, part), leftovers.file_tag(cluster, other, start)
    assert narrower.startswith(leftovers.file_tag(cluster))
    same = leftovers.file_tag(cluster, other) == tag
    assert (tag in narrower) == same


def test_tag_is_a_file_name_and_differs_between_clusters() -> None:
    tag = leftovers.file_tag(Path("/runs/job/cluster"), "engines/a b", "1")
    assert "/" not in tag and " " not in tag
    assert leftovers.file_tag(Path("/other/job/cluster"), "engines/a b", "1") != tag


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two clusters, each with a process and files in both folders."""
    clusters = tmp_path / "one", tmp_path / "two"
    yield clusters
    for cluster in clusters:
        leftovers.sweep(cluster)


def test_sweep_removes_processes_and_files_of_its_cluster_only(folders: tuple[Path, Path]) -> None:
    running, files = {}, {}
    for cluster in folders:
        running[cluster] = processes.spawn([sys.executable, "-c", "import time; time.sleep(600)"],
                                           log=cluster / "log", env={processes.RUN_MARK: str(cluster)})
        tag = leftovers.file_tag(cluster, "engine", secrets.token_hex(4))
        files[cluster] = [leftovers.SHM / f"sgl_{tag}_x", Path(tempfile.gettempdir()) / f"{tag}tmpx"]
        for file in files[cluster]:
            file.touch()
    swept, kept = folders
    assert leftovers.sweep(swept) == [running[swept].pid]
    assert running[swept].poll() is not None and not any(f.exists() for f in files[swept])
    assert running[kept].poll() is None and all(f.exists() for f in files[kept])


def test_temp_folder_is_private_and_shared_and_a_sweep_deletes_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    cluster = tmp_path / "cluster"
    leftovers.make_temp_folder(cluster)
    folder, compiled = map(Path, leftovers.temp_environment(cluster).values())
    assert {stat.S_IMODE(f.stat().st_mode) for f in (folder, compiled)} == {0o700}
    assert folder == leftovers.temp_folder(cluster) != leftovers.temp_folder(tmp_path / "other")
    (folder / "r").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert leftovers.temp_folder(cluster) == folder, "a process of the cluster finds it elsewhere"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftovers.sweep(cluster)
    assert not folder.exists() and compiled.exists()


def test_cache_of_the_compiler_that_the_user_names_is_left_alone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    leftovers.make_temp_folder(tmp_path / "cluster")
    assert [*tmp_path.iterdir()] == [leftovers.temp_folder(tmp_path / "cluster")]


def test_temp_folder_that_cannot_be_made_is_a_fault_of_the_machine(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(PreflightFailed, match="none.*No such file"):
        leftovers.make_temp_folder(tmp_path / "cluster")


def test_entries_that_others_made_do_not_stop_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tag = leftovers.file_tag(tmp_path / "cluster")
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
    tag, other = (leftovers.file_tag(tmp_path / "cluster", name) for name in ("engine", "other"))
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
    tag = leftovers.file_tag(tmp_path / "cluster")
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
    tag = leftovers.file_tag(tmp_path / "cluster")
    theirs, folder = tmp_path / f"{tag}a", tmp_path / f"{tag}b"
    theirs.touch()
    folder.mkdir()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert leftovers.remove_files(tag) == [] and theirs.exists() and folder.exists()
