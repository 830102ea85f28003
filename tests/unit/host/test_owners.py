"""Who owns a cluster: the command that has started it for one run, until it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError
from elastic_rl.host.local_cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(config.parse({"job": "j", "run_dir": str(tmp_path)}))


def test_cluster_without_an_owner_is_not_abandoned(cluster: Cluster) -> None:
    assert not cluster.abandoned
    with cluster.owned():
        assert not cluster.abandoned
        cluster._disown()
        assert cluster.paths.owner_lock.exists(), "a cluster that is owned is nobody's to take"
    assert not cluster.abandoned and not cluster.paths.owner_lock.exists()


def test_cluster_is_abandoned_when_its_owner_has_ended(cluster: Cluster) -> None:
    cluster.dir.mkdir(parents=True)
    cluster.paths.owner_lock.touch()  # as kill -9 leaves it
    assert cluster.abandoned
    cluster._disown()
    assert not cluster.abandoned and not cluster.paths.owner_lock.exists()


def test_job_has_one_owner(cluster: Cluster) -> None:
    with cluster.owned(), pytest.raises(ConfigError, match="job j is already being trained"), cluster.owned():
        pass
    assert not cluster.paths.owner_lock.exists(), "what was refused owns nothing"


def test_host_is_in_the_foreground_of_one_command(cluster: Cluster) -> None:
    with (cluster.in_foreground(), pytest.raises(ConfigError, match="keeps cluster j in its foreground"),
          cluster.in_foreground()):
        pass
    with cluster.in_foreground():  # the file that is left is nobody's
        pass


def test_owner_learns_whether_the_cluster_was_there_before(cluster: Cluster) -> None:
    with cluster.owned() as was_up:
        assert not was_up
    ClusterInfo("j", ["127.0.0.1:1"], [], "").save(cluster.paths.info)
    with cluster.owned() as was_up:
        assert was_up
    cluster.paths.owner_lock.touch()
    with cluster.owned() as was_up:
        assert not was_up, "it is abandoned, and about to be taken down"
