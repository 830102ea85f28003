"""One process at a time trains a job, and what stops the job ends it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.errors import ConfigError
from elastic_rl.host import file_lock
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths

TRAIN = """
import signal, sys, time
from elastic_rl import config
from elastic_rl.host.local_cluster import Cluster
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with Cluster(config.parse({"job": "j", "run_dir": sys.argv[1]})).training():
    print("up", flush=True)
    time.sleep(600)
"""
OPEN = "import sys, time; f = open(sys.argv[1]); print('up', flush=True); time.sleep(600)"


@contextmanager
def started(program: str, argument: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", program, str(argument)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(config.parse({"job": "j", "run_dir": str(tmp_path)}))


def test_job_is_trained_by_one_process_which_down_ends(cluster: Cluster) -> None:
    said: list[str] = []
    cluster._say = said.append
    with started(TRAIN, cluster.cfg.run_dir) as trains, \
            started(OPEN, JobPaths.of(cluster.cfg).train_lock) as reads:
        with pytest.raises(ConfigError, match="job j is already being trained"), cluster.training():
            pass
        cluster.down()
        assert trains.wait(60) == 7 and f"trains the job, {trains.pid}, was asked to end" in said[0]
        assert reads.poll() is None, "it has the file open, and not its lock"
    with cluster.training():
        said.clear()
        cluster.down()
        assert not said, "this process does not end itself"


def test_process_that_trains_elsewhere_is_not_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that machines share, or containers, a pid may be that of another process here."""
    with started(TRAIN, cluster.cfg.run_dir) as trains:
        monkeypatch.setattr(file_lock, "_holds", lambda pid, target: False)
        cluster._end_training()
        assert trains.poll() is None
