"""One process at a time trains a job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_rl import config
from elastic_rl.errors import ConfigError
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths

TRAIN = """
import sys, time
from elastic_rl import config
from elastic_rl.host.local_cluster import Cluster
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


def test_job_is_trained_by_one_process(cluster: Cluster) -> None:
    with started(TRAIN, cluster.cfg.run_dir) as trains, started(OPEN, JobPaths.of(cluster.cfg).train_lock):
        with pytest.raises(ConfigError, match="job j is already being trained"), cluster.training():
            pass
        trains.kill()
        trains.wait()
        with cluster.training():
            pass  # the other process has the file open, and not its lock
