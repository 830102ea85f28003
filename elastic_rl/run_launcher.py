"""``python -m elastic_rl.run_launcher --run_dir=DIR --job=JOB --submission=N --generation=G``: becomes the process of a
job's run, with the Python, the environment and the working folder that the job was submitted with.

The host agent starts it, which may have another Python and environment, and must not wait for etcd. Code 1: it could
not, and is to be started again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_rl import config
from elastic_rl.errors import ElasticRLError, PreflightFailed
from elastic_rl.host import processes
from elastic_rl.host.local_cluster import OWNER_ENV, Cluster
from elastic_rl.host.service_files import SERVICE_FILE_ENV
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.telemetry import logs

log = logging.getLogger(__name__)


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """``submission`` and ``generation``, and the options that say where cluster and job are."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--submission", type=int, required=True, help="number of the submission that it carries out")
    parser.add_argument("--generation", type=int, required=True, help="generation of the driver's assignment")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str]) -> int:
    logs.setup("train")
    _, location = arguments(argv)
    try:
        _become(Cluster(config.load(None, location)), argv)
    except (ElasticRLError, OSError) as e:
        log.error("%s", e)
    return 1


def _become(cluster: Cluster, argv: Sequence[str]) -> None:
    """Does not return. Raises ElasticRLError and OSError."""
    job = cluster.cfg.job
    with cluster.etcd(cluster.connect()) as etcd:
        submission = cluster.run.submission(etcd, ClusterSecret.read(cluster.paths.secret))
    if not Path(submission.folder).is_dir():
        raise PreflightFailed(f"the folder that job {job} was submitted in, {submission.folder}, is gone",
                              hint="make it again: its run then goes on")
    if not os.access(submission.python, os.X_OK):
        raise PreflightFailed(f"the Python that job {job} was submitted with is gone: {submission.python}",
                              hint="make its environment again: the run then goes on; or `elastic-rl stop` it")
    os.chdir(submission.folder)
    command = processes.python("elastic_rl.run_service", *argv, interpreter=submission.python)
    marks = {name.encode(): os.environb[name.encode()] for name in (SERVICE_FILE_ENV, OWNER_ENV)}
    os.execve(command[0], command, {**submission.process_environment(), **marks})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
