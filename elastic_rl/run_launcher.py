"""``python -m elastic_rl.run_launcher --run_dir=DIR --job=JOB --submission=N --generation=G``: becomes the process of a
job's run, with the Python, the environment and the working folder that the job was submitted with.

The host agent starts it, which may have another Python and environment, and must not wait for etcd. Code 1: it could
not, and is to be started again; 0: what was submitted cannot be read, which is how the run has ended.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from elastic_rl import config
from elastic_rl.errors import ConfigError, ElasticRLError, PreflightFailed
from elastic_rl.etcd.cluster_records import JobPhase, RunStatus
from elastic_rl.etcd.job_settings import OtherSecret
from elastic_rl.host import job_run, processes
from elastic_rl.host.job_run import Submission
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.host.service_files import SERVICE_FILE_ENV, report_completed
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
    args, location = arguments(argv)
    try:
        cluster = Cluster(config.load(None, location))
        submission = _submission(cluster, args.submission, args.generation)
        if submission is None:
            report_completed()
            return 0
        _become(submission, cluster.cfg.job, argv)
    except (ElasticRLError, OSError) as e:
        log.error("%s", e)
    return 1


def _submission(cluster: Cluster, number: int, generation: int) -> Submission | None:
    """What is to run; None where that cannot be read and never will, which is then how a run has ended that has not
    begun. Raises ElasticRLError."""
    secret = ClusterSecret.read(cluster.paths.secret)
    with cluster.etcd(cluster.connect()) as etcd:
        try:
            return cluster.run.submission(etcd, secret, number)
        except OtherSecret:  # the right one may be put back
            raise
        except ConfigError as e:
            reading = cluster.run.read_from(etcd)
            if reading.phase is JobPhase.RUNNING:
                raise
            log.error("what was submitted is refused: %s", e)
            status = RunStatus(submission=number, phase=JobPhase.STARTING, submitted_at=reading.submitted_at)
            cluster.run.save(etcd, job_run.failed(status, e, see=cluster.run.log), generation)
            return None


def _become(submission: Submission, job: str, argv: Sequence[str]) -> None:
    """Does not return. Raises PreflightFailed and OSError."""
    if not submission.working_folder.is_dir():
        raise PreflightFailed(f"the folder that job {job} was submitted in, {submission.working_folder}, is gone",
                              hint="make it again: its run then goes on")
    if not os.access(submission.interpreter, os.X_OK):
        raise PreflightFailed(f"the Python that job {job} was submitted with is gone: {submission.interpreter}",
                              hint="make its environment again: the run then goes on; or `elastic-rl stop` it")
    os.chdir(submission.working_folder)
    command = processes.python("elastic_rl.run_service", *argv, interpreter=submission.interpreter)
    marks = {name.encode(): os.environb[name.encode()] for name in (SERVICE_FILE_ENV, OWNER_ENV)}
    os.execve(command[0], command, {**submission.process_environment(), **marks})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
