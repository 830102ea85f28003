"""Clusters with a name by their files alone: which one a job is on, and what belongs to which job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.commands import run_in_one_line as _run

from elastic_rl import config
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.config import Config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, EtcdUnavailable
from elastic_rl.host import cluster_settings, kept_state
from elastic_rl.host.job_run import JobRun, RunReading
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import ClusterPaths, JobPaths, jobs_of_user, jobs_with_cluster, named_clusters_up
from elastic_rl.host.service_files import job_of_node


def _config(run_dir: Path, job: str, cluster: str = "lab", **settings: Any) -> Config:
    return config.parse({"job": job, "run_dir": str(run_dir), "cluster": cluster, **settings})


def _on(run_dir: Path, job: str, cluster: str = "lab") -> Cluster:
    """A job that is on a cluster, by its files: its DCS node has ended."""
    out = Cluster(_config(run_dir, job, cluster))
    out.paths.services.mkdir(parents=True, exist_ok=True)
    (out.paths.services / f"dcs-{job}.json").write_text('{"url": "", "pid": 0}')
    private = JobPaths.of(out.cfg).private
    private.mkdir(parents=True, exist_ok=True)
    private.chmod(0o700)
    JobPaths.of(out.cfg).cluster_name.write_text(cluster)
    ClusterInfo("", ["127.0.0.1:1"], [], "", own_etcd=False).save(out.paths.info)
    return out


def test_cluster_without_a_name_is_in_the_folder_of_its_job(tmp_path: Path) -> None:
    assert ClusterPaths.of(_config(tmp_path, "a", "")).folder == JobPaths(tmp_path / "a").private
    assert ClusterPaths.of(_config(tmp_path, "a")) == ClusterPaths.of(_config(tmp_path, "b"))
    assert ClusterPaths.of(_config(tmp_path, "a")).folder == tmp_path / "_clusters" / "lab"


@pytest.mark.parametrize("name", ["Lab", "a/b", "..", "_clusters", "-a", "a" * 41])
def test_name_of_a_cluster_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        config.parse({"cluster": name})


@pytest.mark.parametrize(("service", "job"), [("dcs-a", "a"), ("dcs-dcs-a", "dcs-a"), ("etcd-0", ""),
                                              ("coordinator-0", ""), ("agent-0", "")])
def test_service_says_whose_it_is(service: str, job: str) -> None:
    assert job_of_node(service) == job


def test_job_is_found_where_it_was_started(tmp_path: Path) -> None:
    _on(tmp_path, "a")
    location = {"job": "a", "run_dir": str(tmp_path)}
    assert cluster_settings.location(location).cluster == "lab"
    assert cluster_settings.location({**location, "cluster": "other"}).cluster == "other", "an error names both"
    assert cluster_settings.location({**location, "job": "b"}).cluster == ""


def test_name_of_a_cluster_in_a_folder_of_somebody_else_is_not_followed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _on(tmp_path, "a")
    monkeypatch.setattr("elastic_rl.host.paths.os.getuid", lambda: 1 << 20)
    assert cluster_settings.location({"job": "a", "run_dir": str(tmp_path)}).cluster == ""


@pytest.mark.parametrize("content", [b"", b"..", b"\xff\xfe"])
def test_damaged_name_of_a_cluster_is_reported_with_its_file(tmp_path: Path, content: bytes) -> None:
    path = JobPaths.of(_on(tmp_path, "a").cfg).cluster_name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} is damaged"):
        cluster_settings.location({"job": "a", "run_dir": str(tmp_path)})


def test_clusters_and_jobs_are_told_apart(tmp_path: Path) -> None:
    _on(tmp_path, "a", "cluster")  # its folder looks like that of a job's own cluster
    _on(tmp_path, "b", "")
    assert jobs_of_user(tmp_path) == ["a", "b"] and jobs_with_cluster(tmp_path) == ["b"]
    assert named_clusters_up(tmp_path) == ["cluster"]


def test_each_service_and_run_has_its_log(tmp_path: Path) -> None:
    a, b = _on(tmp_path, "a"), _on(tmp_path, "b")
    lab = Cluster(_config(tmp_path, "quickstart"))
    assert lab.jobs == ["a", "b"]
    assert lab.log_of("driver%2Fb") == JobPaths.of(b.cfg).log("train") and lab.log_of("dcs-a") == a.paths.log("dcs-a")


def test_service_of_a_job_is_started_with_the_settings_of_that_job(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = _on(tmp_path, "a")
    cluster_settings.save(a.cfg.model_copy(update={"seed": 5}), JobPaths.of(a.cfg).submitted_settings)
    cluster_settings.save(_config(tmp_path, "quickstart", coordinator={"replicas": 3}), a.paths.settings)
    started: list[Config] = []
    monkeypatch.setattr(Cluster, "_start_dcs_node", lambda self, *_: started.append(self.cfg))
    lab = Cluster(_config(tmp_path, "quickstart"))
    assert lab.revive("dcs-a")
    assert [(cfg.job, cfg.seed, cfg.cluster, cfg.coordinator.replicas) for cfg in started] == [("a", 5, "lab", 3)]
    assert cluster_settings.stored(JobPaths.of(a.cfg).submitted_settings)["coordinator"]["replicas"] == 3
    assert not lab.revive("dcs-nobody") and len(started) == 1


def test_state_of_a_job_on_a_cluster_with_a_name_leaves_the_clusters(tmp_path: Path) -> None:
    a = _on(tmp_path, "a")
    (a.paths.etcd / "member").mkdir(parents=True)
    a.paths.secret.write_text("secret")
    chunks = kept_state.chunks(a.cfg)
    (chunks / "ab").mkdir(parents=True)
    assert [f.path for f in kept_state.folders(a.cfg)] == [chunks]
    kept_state.delete(a.cfg)
    assert not chunks.exists() and not JobPaths.of(a.cfg).cluster_name.exists()
    assert (a.paths.etcd / "member").is_dir() and a.paths.secret.exists() and a.paths.info.exists()


def test_sections_of_the_cluster_hold_for_its_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _on(tmp_path, "a")
    cluster_settings.save(_config(tmp_path, "quickstart", coordinator={"replicas": 3}), a.paths.settings)
    cfg = cluster_settings.with_sections_of_cluster(a.paths.settings, _config(tmp_path, "a", seed=5), {"seed": 5})
    assert (cfg.coordinator.replicas, cfg.seed, cfg.job) == (3, 5, "a")
    code, said = _run(capsys, "train", "--job=a", f"--run_dir={tmp_path}", "--coordinator.replicas=1")
    assert code == Exit.USAGE and "those of cluster lab" in said and "up --cluster=lab" in said


def test_commands_that_name_no_job_take_the_only_one(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobRun, "read", lambda self: RunReading(None))
    at = f"--run_dir={tmp_path}"
    _on(tmp_path, "a")
    monkeypatch.setattr(Cluster, "stop_run", lambda self: self._say(f"stop of {self.cfg.job}"))
    assert "stop of a" in _run(capsys, "stop", at)[1]
    _on(tmp_path, "b")
    code, said = _run(capsys, "stop", at)
    assert code == Exit.USAGE and "several jobs are on clusters that are up: a, b" in said
    assert "stop of b" in _run(capsys, "stop", "b", at)[1]
    cluster_settings.save(_config(tmp_path, "quickstart"), Cluster(_config(tmp_path, "b")).paths.settings)
    code, said = _run(capsys, "train", "--with-cluster", "--job=b", at)
    assert code == Exit.USAGE and "without --with-cluster" in said


def test_down_stops_a_cluster_with_a_name_by_its_name_alone(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = f"--run_dir={tmp_path}"
    lab = _on(tmp_path, "quickstart")  # the default job
    file = tmp_path / "a.yaml"
    file.write_text(f"cluster: lab\njob: quickstart\nrun_dir: {tmp_path}\n")
    for words in (["--cluster=lab", "--job=quickstart", at], ["--job=quickstart", at], ["-c", str(file)]):
        code, said = _run(capsys, "down", *words)
        assert code == Exit.USAGE and f"down --cluster=lab {at}" in said, words
    code, said = _run(capsys, "down", at)
    assert code == Exit.USAGE and "stopped by its name: lab up" in said
    assert lab.paths.info.exists()
    own = _on(tmp_path, "own", "")
    code, said = _run(capsys, "down", at)
    assert code == 0 and not own.paths.info.exists() and lab.paths.info.exists()
    assert _run(capsys, "down", "--cluster=lab", at)[0] == 0 and not lab.paths.info.exists()


_COMMANDS: dict[str, Any] = {"purge": lambda c: c.down(purge=True), "remove": lambda c: c.remove_job(),
                             "stop": lambda c: c.stop_run(), "own": lambda c: c.owned().__enter__(),
                             "up": lambda c: c.up(), "admit": lambda c: c.admit()}


@pytest.mark.parametrize(("command", "other"), [
    *((name, "") for name in ("purge", "stop", "own", "up")),
    *((name, "other") for name in ("remove", "stop", "admit"))])
def test_command_with_another_cluster_changes_nothing_of_a_job(tmp_path: Path, command: str, other: str) -> None:
    a, _ = _on(tmp_path, "a"), _on(tmp_path, "b", "other")
    (chunks := kept_state.chunks(a.cfg) / "ab").mkdir(parents=True)
    elsewhere = Cluster(_config(tmp_path, "a", other))
    with pytest.raises(ConfigError, match="job a is (not )?on cluster"):
        _COMMANDS[command](elsewhere)
    assert chunks.is_dir() and JobPaths.of(a.cfg).cluster_name.exists()


def test_job_whose_own_cluster_is_up_is_not_admitted_elsewhere(tmp_path: Path) -> None:
    _on(tmp_path, "b")
    own = Cluster(_config(tmp_path, "a", ""))
    own.dir.mkdir(parents=True)
    own.dir.chmod(0o700)
    ClusterInfo("a", ["127.0.0.1:1"], [], "", own_etcd=False).save(own.paths.info)
    cluster_settings.save(_config(tmp_path, "quickstart"), Cluster(_config(tmp_path, "b")).paths.settings)
    with pytest.raises(ConfigError, match="job a has a cluster of its own"):
        Cluster(_config(tmp_path, "a")).admit()


def test_run_is_not_submitted_after_its_job_was_taken_off_the_cluster(tmp_path: Path) -> None:
    a = _on(tmp_path, "a")
    a.services.forget(a.node)
    with pytest.raises(EtcdUnavailable, match="job a is not on cluster lab any more"):
        a.submit()


def test_down_needs_no_folder_of_a_job(tmp_path: Path) -> None:
    a, b = _on(tmp_path, "a"), _on(tmp_path, "b")
    shutil.rmtree(JobPaths.of(b.cfg).folder)
    lab = Cluster(_config(tmp_path, "quickstart"))
    assert lab.jobs == ["a", "b"] and lab.down() == [] and lab.jobs == []
    assert not a.paths.info.exists()


def test_cluster_with_a_name_keeps_its_etcd(tmp_path: Path) -> None:
    lab = _on(tmp_path, "a")
    cluster_settings.save(_config(tmp_path, "quickstart"), lab.paths.settings)
    lab.paths.info.rename(lab.paths.stopped)
    with pytest.raises(ConfigError, match="etcd.endpoints is"):
        Cluster(_config(tmp_path, "quickstart", etcd={"endpoints": ["127.0.0.1:1"]})).up()


def test_section_of_the_cluster_that_is_given_as_it_is_contradicts_nothing(tmp_path: Path) -> None:
    lab = _on(tmp_path, "a")
    cluster_settings.save(_config(tmp_path, "q", etcd={"endpoints": ["h:1"], "retry_budget_s": 7.0}),
                          lab.paths.settings)
    given = {"etcd": {"endpoints": ["h:1"]}}
    cfg = cluster_settings.with_sections_of_cluster(lab.paths.settings, _config(tmp_path, "a"), given)
    assert (cfg.etcd.endpoints, cfg.etcd.retry_budget_s) == (["h:1"], 7.0)
    lab.paths.settings.unlink()
    with pytest.raises(ConfigError, match="is gone, the settings of cluster lab"):
        cluster_settings.with_sections_of_cluster(lab.paths.settings, cfg, given)
