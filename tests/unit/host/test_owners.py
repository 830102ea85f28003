"""Who owns a cluster: the processes that train jobs on it, until the last of them ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from elastic_rl import config
from elastic_rl.cli import main, run
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError
from elastic_rl.host.file_lock import taken
from elastic_rl.host.local_cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(config.parse({"job": "j", "run_dir": str(tmp_path)}))


@contextlib.contextmanager
def other_owner(cluster: Cluster) -> Iterator[IO[str]]:
    """The file of an owner that trains another job. Its process is this one; a lock does not know that."""
    cluster.paths.owners.mkdir(parents=True, exist_ok=True)
    with cluster.paths.owner_lock("other").open("w") as file:
        assert taken(file)
        yield file


def test_cluster_without_owners_is_not_abandoned(cluster: Cluster) -> None:
    assert not cluster.abandoned and not cluster.owned_by_others
    with cluster.owned():
        assert not cluster.abandoned and not cluster.owned_by_others
    assert not cluster.abandoned and not cluster.paths.owner_locks()


def test_cluster_is_abandoned_when_its_last_owner_has_ended(cluster: Cluster) -> None:
    with other_owner(cluster):
        with cluster.owned():
            assert cluster.owned_by_others and not cluster.abandoned
        assert not cluster.abandoned, "the other one goes on"
    assert cluster.abandoned
    cluster._disown()
    assert not cluster.abandoned and not cluster.paths.owner_locks()


def test_owner_that_outlives_the_other_one_finds_itself_the_last(cluster: Cluster) -> None:
    with contextlib.ExitStack() as others:
        others.enter_context(other_owner(cluster))
        with cluster.owned():
            others.close()
            assert not cluster.owned_by_others and not cluster.abandoned
            cluster._disown()
            assert len(cluster.paths.owner_locks()) == 2, "a cluster that is owned is nobody's to take"


def test_job_has_one_owner(cluster: Cluster) -> None:
    with cluster.owned(), pytest.raises(ConfigError, match="job j is already being trained"), cluster.owned():
        pass
    assert not cluster.paths.owner_locks(), "what was refused owns nothing"


def test_owner_learns_whether_the_cluster_was_there_before(cluster: Cluster) -> None:
    with cluster.owned() as was_up:
        assert not was_up
    ClusterInfo("j", ["127.0.0.1:1"], [], "").save(cluster.paths.info)
    with cluster.owned() as was_up:
        assert was_up
    with other_owner(cluster), cluster.owned() as was_up:
        assert was_up
    with cluster.owned() as was_up:
        assert not was_up, "it is abandoned, and about to be taken down"


@pytest.mark.parametrize("has_other", [False, True])
def test_train_takes_the_cluster_down_as_its_last_owner_only(
        cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_other: bool) -> None:
    taken_down: list[str] = []
    info = ClusterInfo("j", ["127.0.0.1:1"], [], "")
    monkeypatch.setattr(Cluster, "up", lambda self, **_: info)
    monkeypatch.setattr(Cluster, "down", lambda self: taken_down.append(self.cfg.job))
    monkeypatch.setattr("elastic_rl.job.check.require", lambda cfg: None)
    monkeypatch.setattr(run, "_train", lambda cfg, info, **options: 0)
    monkeypatch.setattr(run, "_export_policy", lambda cfg, info: None)
    with contextlib.ExitStack() as others:
        if has_other:
            others.enter_context(other_owner(cluster))
        with pytest.raises(SystemExit) as ended:
            main.main(["train", "--with-cluster", "--job=j", f"--run_dir={cluster.cfg.run_dir}"])
        assert not ended.value.code
    assert taken_down == ([] if has_other else ["j"])
    assert ("keeps running for the other jobs" in capsys.readouterr().out) is has_other
