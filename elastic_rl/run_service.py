"""``python -m elastic_rl.run_service --run_dir=DIR --job=JOB --submission=N --generation=G``: the process of a run.

It carries out a submission of the job (``host.job_run``), under a generation of its driver's assignment, and writes
what becomes of it. Once the run has begun, it ends by its last step, by its failure and by its operator only. For
anything else the process ends with code 1, and the host agent starts it again: such as a signal, or a disk that is
full. Before that every error is the end: what was submitted is refused. The code is 0 when the run has ended, or
nothing was to do.

A stop commits what is trained first, for a limited time (``DriverSupervisor``). Signals do not shorten it, and a
process that is started again meanwhile goes on with it. Where the whole cluster is taken down, this process writes the
stop into the job's record too, which the run's actor reads: the command may have found that etcd did not answer.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from elastic_rl import config, train
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.driver.etcd_patience import Stopped, patiently
from elastic_rl.driver.supervisor import STOPPED
from elastic_rl.errors import Conflict, ElasticRLError, EtcdUnavailable, Fenced
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import JobPhase, RunStatus, is_stopped
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import JobStatus, Severity, stopped_message
from elastic_rl.host import job_run
from elastic_rl.host.here import settings_here
from elastic_rl.host.job_run import Submission
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.host.service_files import report_completed
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.run_launcher import arguments
from elastic_rl.telemetry import logs

log = logging.getLogger(__name__)

_AGAIN = 1
"""Exit code of a run that is to be started again."""
_READ_EVERY_S = 1.0
"""Whether the run was stopped is read so often."""
_READ_BUDGET_S = 1.0
_JOIN_S = 5.0


def main(argv: Sequence[str]) -> int:
    args, location = arguments(argv)
    logs.setup("train")
    # What this process starts is the run's (``processes.RUN_MARK``), and no service of the cluster.
    os.environ.pop(OWNER_ENV, None)
    return RunService(Cluster(config.load(None, location)), args.submission, args.generation).run()


class RunService:
    """One process of a run."""

    def __init__(self, where: Cluster, submission: int, generation: int) -> None:
        """``where``: the cluster by its location alone."""
        self._cluster, self._run = where, where.run
        self._submission, self._generation = submission, generation
        self._withdrawn = threading.Event()
        self._interrupted = False
        self._signalled = False
        """Whether a signal has come while the run was not stopped: another process then goes on with it."""
        self._at_home = True
        """Whether this is the host that it was submitted on."""

    def run(self) -> int:
        """Carries the submission out; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._interrupt())
        try:
            info = self._cluster.connect()
            with self._cluster.etcd(info) as etcd, self._following(info):
                reading = self._run.read_from(etcd)
                if reading.record is not None and reading.record.submission == self._submission:
                    before = reading.status
                    if before is None or before.submission != self._submission:
                        before = RunStatus(submission=self._submission, phase=JobPhase.QUEUED,
                                           submitted_at=reading.record.submitted_at)
                    if reading.record.stopped:
                        self._withdrawn.set()
                    self._at_home = reading.record.host in ("", self._cluster.host.name)
                    if not before.phase.ended:
                        submission = self._run.submission(
                            etcd, ClusterSecret.read(self._cluster.paths.secret), self._submission)
                        self._end(etcd, self._carry_out(etcd, info, submission, before))
            report_completed()
            return 0
        except KeyboardInterrupt:
            log.warning("ended by a signal; the host agent starts the run again")
        except Exception:
            log.exception("the run has to be started again")
        return _AGAIN

    def _carry_out(self, etcd: EtcdClient, info: ClusterInfo, submission: Submission, status: RunStatus) -> RunStatus:
        """Returns how the run has ended. Raises KeyboardInterrupt for a signal that is no stop, and what has ended a
        run that had begun."""
        if self._stopped and status.phase is not JobPhase.RUNNING:  # there is nothing to commit
            return job_run.stopped(status)
        again = status.phase is not JobPhase.QUEUED
        if not again:
            self._run.save(etcd, status := job_run.now(status, JobPhase.STARTING), self._generation)
        begun_at = status.at if status.phase is JobPhase.RUNNING else 0.0

        def begin() -> None:
            nonlocal status
            if again:
                events.emit(etcd, Keys(self._cluster.cfg.job), event_kinds.RUN_RESTARTED, self._cluster.cfg.job,
                            "the process of the run ended and was started again", severity=Severity.WARNING)
            running = status if status.phase is JobPhase.RUNNING else job_run.now(status, JobPhase.RUNNING)
            running = running.replace(stop_s=config.parse(submission.settings).trainer.stop_timeout_s)
            # Also where it was running: its status is then of this generation, and this host has a copy.
            self._run.save(etcd, running, self._generation)
            status = running

        try:
            code = self._train(submission, info, begun_at, begin,
                               lambda: (self._signalled or not self._stopped) and status.phase is JobPhase.RUNNING)
            self._interrupted = True  # it is over: nothing interrupts the record of that
            if code == STOPPED:
                return job_run.stopped(status, self._said_of_stop(etcd))
            if code:
                return job_run.now(status, JobPhase.FAILED)
            return job_run.now(status, JobPhase.FINISHED).replace(step=self._steps_done(etcd))
        except Exception as e:
            self._interrupted = True
            if status.phase is JobPhase.RUNNING or isinstance(e, EtcdUnavailable | Fenced | Conflict):
                raise  # an outage refuses nothing
            if not self._at_home:
                raise  # this host may lack files that the one has which it was submitted on
            log.exception("what was submitted is refused")
            refused = job_run.failed(status, e, see=self._run.log)
            self._report_refusal(etcd, refused)
            return refused

    def _report_refusal(self, etcd: EtcdClient, refused: RunStatus) -> None:
        """Writes the event of it: nothing else says it to those who do not follow the run. Raises Fenced where another
        process carries the job out, and EtcdUnavailable."""
        job = self._cluster.cfg.job
        token = fencing.assigned(ClusterKeys(self._cluster.cfg.cluster_name), job, self._generation)
        FencedWriter(etcd, Keys(job), lambda: token, f"the assignment of driver/{job}").emit(
            event_kinds.RUN_REFUSED, job, refused.message + (f" ({refused.hint})" if refused.hint else ""),
            severity=Severity.ERROR, submission=self._submission)

    def _steps_done(self, etcd: EtcdClient) -> int:
        """The last step of a job that has finished; 0 where etcd does not say it."""
        with suppress(EtcdUnavailable):
            status = readable_one(etcd.get(Keys(self._cluster.cfg.job).job_status()), JobStatus)
            return status.step if status is not None else 0
        return 0

    def _said_of_stop(self, etcd: EtcdClient) -> str:
        """What the run's status says of its stop. Where it says nothing of it, the supervisor could not write that
        (its log says why), and nobody has seen a commit."""
        try:
            status = readable_one(etcd.get(Keys(self._cluster.cfg.job).job_status()), JobStatus)
        except EtcdUnavailable:
            return ("stopped by its operator while etcd did not answer: what it trained after its last commit may have "
                    "to be done again")
        if status is not None and status.phase == "stopped":
            return status.message
        return stopped_message(status or JobStatus(phase=""), committed=False)

    def _train(self, submission: Submission, info: ClusterInfo, begun_at: float, begin: train.OnBegun,
               goes_on: Callable[[], bool]) -> int:
        # The folder of the cluster may be another one on each host, and the address another one than at its submission.
        cfg = settings_here(config.parse(submission.settings), self._cluster.cfg.run_dir)
        logs.setup("train", cfg.telemetry.log_level)
        return train.run(cfg, info, faults=submission.faults, from_job=submission.from_job, checked=submission.checked,
                         on_begun=begin, begun_at=begun_at, goes_on=goes_on, stopped=lambda: self._stopped,
                         assignment=self._generation, submission=self._submission)

    def _end(self, etcd: EtcdClient, status: RunStatus) -> None:
        """Writes how the run has ended, as soon as etcd answers; without it where the cluster is taken down. Raises
        Fenced where another process carries the job out."""
        def pause(seconds: float) -> bool:
            time.sleep(seconds)
            return self._cluster.taken_down

        try:
            patiently(lambda: self._run.save(etcd, status, self._generation), pause=pause)
        except Stopped:
            self._run.save_copy(status.replace(generation=self._generation))

    # -- whether it is to go on ----------------------------------------------------------------------------------------
    @property
    def _stopped(self) -> bool:
        """Whether its operator has stopped the run, or the cluster."""
        return self._withdrawn.is_set() or self._cluster.stops_runs

    @contextmanager
    def _following(self, info: ClusterInfo) -> Iterator[None]:
        """Takes notice of a stop within the block, and writes that of the cluster down, while etcd answers."""
        closing = threading.Event()

        def follow() -> None:
            with self._cluster.etcd(info, retry_budget_s=_READ_BUDGET_S) as etcd:
                while not closing.wait(_READ_EVERY_S):
                    try:
                        record = self._run.read_from(etcd).record
                        if not is_stopped(record, self._submission) and self._cluster.stops_runs:
                            self._run.withdraw(etcd)
                            continue
                    except ElasticRLError:  # an outage of etcd is no stop
                        continue
                    if is_stopped(record, self._submission):
                        self._withdrawn.set()

        thread = threading.Thread(target=follow, name="follow-job", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join(_JOIN_S)

    def _interrupt(self) -> None:
        """Raises KeyboardInterrupt the first time; nothing interrupts what then cleans up. Nor does anything interrupt
        a stop, which has a limit of its own: who cannot wait for it kills this process."""
        if self._stopped:
            log.warning("a signal does not shorten the stop that is in progress")
        elif not self._interrupted:
            self._interrupted = self._signalled = True
            raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
