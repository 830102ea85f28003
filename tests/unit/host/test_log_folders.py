"""Which files of a host others may read: the logs of its cluster and of the cluster's jobs, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.host.log_folders import LogFolders, choose, is_part
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.telemetry.log_files import LogPosition

SECRET = "what nobody may read"


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    """A cluster with two jobs, and one of another cluster; each has logs."""
    cfg = config.parse({"run_dir": str(tmp_path / "runs"), "cluster": "lab", "job": "j"})
    for job, cluster in (("j", "lab"), ("k", "lab"), ("other", "elsewhere")):
        paths = JobPaths.of(cfg.model_copy(update={"job": job}))
        paths.logs.mkdir(parents=True)
        paths.cluster_name.write_text(cluster)
        paths.log(f"train-{job}").write_text(f"of {job}\n")
        (paths.private / "secret.log").write_text(SECRET)
    logs = ClusterPaths.of(cfg).logs
    logs.mkdir(parents=True)
    (logs / "agent-0.log").write_text("of the agent\n")
    return cfg


def names(cfg: Config, job: str) -> list[str]:
    return [part.part for part in LogFolders(cfg, job).parts()]


def read(cfg: Config, part: str, job: str = "j") -> bytes:
    folders = LogFolders(cfg, job)
    return folders.read_from(part, folders.before_last_lines(part, 100), 1000)[0]


def test_logs_of_the_cluster_and_of_the_job_that_is_named_are_listed_and_read(cfg: Config) -> None:
    assert names(cfg, "j") == ["agent-0", "train-j"] and names(cfg, "k") == ["agent-0", "train-k"]
    assert names(cfg, "") == ["agent-0"]
    found = next(part for part in LogFolders(cfg, "j").parts() if part.part == "train-j")
    path = JobPaths.of(cfg).log("train-j")
    assert (found.nbytes, found.path, found.written_at) == (5, str(path), path.stat().st_mtime)
    assert read(cfg, "train-j") == b"of j\n" and read(cfg, "agent-0") == b"of the agent\n"


@pytest.mark.parametrize("job", ["other", "..", ".", "../runs/j", "_clusters/lab", "j/cluster", "no-such", "J", "j\n",
                                 "j\0", "*"])
def test_what_is_no_job_of_the_cluster_has_no_logs(cfg: Config, job: str) -> None:
    assert names(cfg, job) == ["agent-0"]


@pytest.mark.parametrize("part", ["", ".", "..", "../secret", "/etc/passwd", "train-j/../../secret", "train-j.log",
                                  "train-j\0", "train-j\n", "a" * 300, "\udcff", "\x1b[31m", "train-*"])
def test_name_that_is_no_part_finds_nothing(cfg: Config, part: str) -> None:
    for job in ("j", ""):
        with pytest.raises(FileNotFoundError):
            LogFolders(cfg, job).before_last_lines(part, 1)
        with pytest.raises(FileNotFoundError):
            LogFolders(cfg, job).read_from(part, LogPosition.START, 10)


@given(st.text(max_size=30))
def test_part_is_one_name_of_a_file_that_can_be_shown(name: str) -> None:
    if is_part(name):
        assert os.path.basename(name) == name and name.isprintable() and name.encode()


def test_links_and_what_is_no_regular_file_are_neither_listed_nor_read(cfg: Config) -> None:
    paths = JobPaths.of(cfg)
    paths.log("link").symlink_to(paths.private / "secret.log")
    paths.log("absolute").symlink_to("/etc/passwd")
    paths.log("folder").mkdir()
    os.mkfifo(paths.log("fifo"))
    os.symlink(paths.private / "secret.log", f"{paths.log('train-j')}.1")
    (paths.logs / b"odd-\xff.log".decode(errors="surrogateescape")).write_text(SECRET)
    assert names(cfg, "j") == ["agent-0", "train-j"]
    for part in ("link", "absolute", "folder", "fifo", b"odd-\xff".decode(errors="surrogateescape")):
        with pytest.raises(FileNotFoundError):
            read(cfg, part)
    assert read(cfg, "train-j") == b"of j\n", "also where more lines are asked for than it has"


@pytest.mark.parametrize("level", ["logs", "cluster"])
def test_folder_that_is_a_link_is_not_entered(cfg: Config, tmp_path: Path, level: str) -> None:
    paths = JobPaths.of(cfg)
    folder = paths.logs if level == "logs" else paths.private
    folder.rename(moved := tmp_path / "moved")
    folder.symlink_to(moved)
    assert names(cfg, "j") == ["agent-0"]
    with pytest.raises(FileNotFoundError):
        read(cfg, "train-j")


def test_folder_and_log_that_are_not_there_yet_are_no_error(cfg: Config, tmp_path: Path) -> None:
    elsewhere = cfg.model_copy(update={"run_dir": tmp_path / "nothing"})
    assert names(elsewhere, "j") == []
    with pytest.raises(FileNotFoundError):
        read(elsewhere, "train-j")


def test_start_of_a_name_stands_for_it_unless_it_is_a_name_itself() -> None:
    parts = ["driver", "engine-1", "engine-12"]
    assert choose(parts, "engine-1") == ["engine-1"] and choose(parts, "d") == ["driver"]
    assert choose(parts, "eng") == ["engine-1", "engine-12"] and choose(parts, "x") == []
