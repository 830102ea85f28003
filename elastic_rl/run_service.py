"""``python -m elastic_rl.run_service --run_dir=DIR --job=JOB``: the process of a job's run, a service of its cluster.

It carries out the job's submission (``host.job_run``) and writes what becomes of it. Once the run has begun, it ends by
its last step, by its failure and by its operator only. For anything else the process ends with code 1, and the host
agent starts it again: such as a signal, or a disk that is full. Before that every error is the end: what was submitted
is refused. The code is 0 when the run has ended, or nothing was to do.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from elastic_rl import config, train
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.host import kept_state
from elastic_rl.host.job_run import RunStatus, Submission
from elastic_rl.host.local_cluster import OWNER_ENV, Cluster
from elastic_rl.runtime.files import preflight_writes
from elastic_rl.telemetry import logs

log = logging.getLogger(__name__)

_AGAIN = 1
"""Exit code of a run that is to be started again."""


def main(argv: Sequence[str] | None = None) -> int:
    location = config.load(None, list(sys.argv[1:] if argv is None else argv))
    logs.setup("train")
    # What this process starts is the run's (``processes.RUN_MARK``), and no service of the cluster.
    os.environ.pop(OWNER_ENV, None)
    return RunService(Cluster(location)).run()


class RunService:
    """One process of a run."""

    def __init__(self, where: Cluster) -> None:
        """``where``: the cluster by its location alone."""
        self._cluster, self._run = where, where.run
        self._interrupted = False

    def run(self) -> int:
        """Carries the submission out; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._interrupt())
        try:
            before = self._run.read()
            if (submission := self._run.submission()) is None:
                return 0
            if before.wanted:
                self._run.save(self._carry_out(submission, before.status))
            self._run.withdraw()
            return 0
        except KeyboardInterrupt:
            log.warning("ended by a signal; the host agent starts the run again")
        except Exception:
            log.exception("the run has to be started again")
        return _AGAIN

    def _carry_out(self, submission: Submission, before: RunStatus | None) -> RunStatus:
        """Returns how the run has ended. Raises KeyboardInterrupt for a signal that is no stop, and what has ended a
        run that had begun."""
        status = before or RunStatus(phase=JobPhase.QUEUED, submitted_at=submission.at, at=submission.at)
        if status.phase is JobPhase.QUEUED:
            self._run.save(status := status.now(JobPhase.STARTING))
        begun_at = status.at if status.phase is JobPhase.RUNNING else 0.0

        def begin() -> None:
            nonlocal status
            if status.phase is not JobPhase.RUNNING:
                with preflight_writes(self._cluster.dir):
                    self._run.save(running := status.now(JobPhase.RUNNING))
                status = running

        try:
            code = self._train(submission, begun_at, begin,
                               lambda: self._run.submitted and status.phase is JobPhase.RUNNING)
            self._interrupted = True  # it is over: nothing interrupts the record of that
            return status.now(JobPhase.FAILED if code else JobPhase.FINISHED)
        except KeyboardInterrupt:
            if self._run.submitted:
                raise
            return status.now(JobPhase.STOPPED)
        except Exception as e:
            self._interrupted = True
            if status.phase is JobPhase.RUNNING:
                raise
            log.exception("what was submitted is refused")
            return status.failed(e, see=self._run.log)

    def _train(self, submission: Submission, begun_at: float, begin: train.OnBegun, goes_on: Callable[[], bool]) -> int:
        cfg = config.parse(submission.settings)
        logs.setup("train", cfg.telemetry.log_level)
        info = ClusterInfo.load(self._cluster.paths.info)
        if info is None:
            raise EtcdUnavailable(f"the cluster of job {cfg.job} is not up",
                                  hint=f"`elastic-rl up {kept_state.cluster_options(cfg)}` starts it")
        return train.run(cfg, info, faults=submission.faults, from_job=submission.from_job, on_tick=self._tick,
                         on_begun=begin, begun_at=begun_at, goes_on=goes_on)

    def _tick(self, waiting: Mapping[str, str]) -> None:
        if not self._run.submitted:
            self._interrupt()

    def _interrupt(self) -> None:
        """Raises KeyboardInterrupt the first time; nothing interrupts what then cleans up."""
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
