"""The run of a job: a service of the cluster, which outlives the command that has submitted it.

A *submission* is the file that says what is to run. While it is there, the run is wanted, and the host agent starts its
process again whenever that has ended. The process (``elastic_rl.run_service``) writes the *status*, a second file, and
deletes the submission once the status says how the run has ended.

The transitions that must NOT exist:

- from an end (finished, failed, refused, stopped) to a start: the run would do its work again, or be refused for ever.
  So the end is in the status before the process ends;
- from a stop to a start. So a stop deletes the submission before anything else, also where the stop is then killed;
- from wanted to ended because a process was killed, whichever: only the run itself and its operator end it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from elastic_rl import errors
from elastic_rl.config import Config
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.etcd.record import Record
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.service_files import ServiceFiles, run_service
from elastic_rl.runtime.files import UMASK_ENV, os_error_text, replace_file, user_umask


class Submission(Record):
    """What a job is to do, with all that another process needs to do it as the first one did."""

    settings: dict[str, Any]
    faults: bool = False
    """Whether faults are injected."""
    from_job: str = ""
    """The job whose policy this one begins with; empty for one that begins with a model of its own."""
    python: str
    """Interpreter of that command: another one may have another release, or not the job's plug-ins."""
    folder: str
    """Working folder of the command that has submitted it: settings may name files relative to it."""
    environment: dict[str, str]
    """Environment of that command, such as the user's tokens and CUDA_VISIBLE_DEVICES, which the host agent's need not
    have. Each character stands for a byte, which need not be valid UTF-8."""
    at: float
    """When it was submitted, unix seconds."""

    @classmethod
    def of_this_process(cls, cfg: Config, *, faults: bool, from_job: str) -> Self:
        environment = {**os.environb, UMASK_ENV.encode(): f"{user_umask():03o}".encode()}
        return cls(settings=cfg.model_dump(mode="json"), faults=faults, from_job=from_job, python=sys.executable,
                   folder=os.getcwd(),
                   environment={k.decode("latin-1"): v.decode("latin-1") for k, v in environment.items()},
                   at=time.time())

    def process_environment(self) -> dict[str, str | None]:
        """The environment as changes of this process's own; None: a variable that it has and the run does not."""
        own: Mapping[str, None] = dict.fromkeys(os.environ)
        return {**own, **{os.fsdecode(k.encode("latin-1")): os.fsdecode(v.encode("latin-1"))
                          for k, v in self.environment.items()}}


class RunStatus(Record):
    """What has become of a submission."""

    phase: JobPhase
    """QUEUED until its process has started, STARTING until all is checked, then RUNNING."""
    submitted_at: float
    at: float
    """When the phase began, unix seconds."""
    error: str = ""
    """Kind of the error that ended the run; empty where it has ended otherwise, as in a crash loop."""
    message: str = ""
    hint: str = ""

    def now(self, phase: JobPhase) -> Self:
        return self.replace(phase=phase, at=time.time())

    def failed(self, error: Exception, *, see: Path) -> Self:
        """The end by an error; ``see``: the log that has more about one that nobody expected."""
        match error:
            case ElasticRLError():
                found = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
            case OSError():
                found = {"error": ElasticRLError.__name__, "message": os_error_text(error)}
            case _:
                found = {"error": ElasticRLError.__name__, "message": f"{type(error).__name__}: {error}",
                         "hint": f"this is a defect of elastic-rl; its traceback is in {see}"}
        return self.now(JobPhase.FAILED).replace(**found)

    def as_error(self) -> ElasticRLError | None:
        """The error that ended the run, for the command that shows it."""
        kind = getattr(errors, self.error, ElasticRLError) if self.error else None
        return kind(self.message, hint=self.hint) if kind is not None else None


@dataclass(frozen=True)
class RunReading:
    """A job's newest run by its files."""

    alive: bool
    """Whether its process runs."""
    submitted: bool
    """Whether its submission is there."""
    status: RunStatus | None
    pid: int = 0

    @property
    def phase(self) -> JobPhase | None:
        """None for a job that nobody has submitted."""
        if self.status is not None and self.status.phase.ended:
            return self.status.phase
        if self.submitted or self.alive:
            return self.status.phase if self.status is not None else JobPhase.STARTING
        return JobPhase.STOPPED if self.status is not None else None  # its process was killed while it stopped

    @property
    def wanted(self) -> bool:
        """Whether its process is started again when it has ended."""
        return self.submitted and not self.ended

    @property
    def ended(self) -> bool:
        """Whether it has ended; its process may be about to exit."""
        return self.phase is None or self.phase.ended

    @property
    def queued(self) -> bool:
        """Whether it waits for its turn."""
        return self.wanted and not self.alive and self.phase is JobPhase.QUEUED

    @property
    def active(self) -> bool:
        """Whether it has begun, also while its process is down, and not come to its end: another one would share the
        machine with it."""
        return self.alive or (self.wanted and not self.queued)

    @property
    def stopping(self) -> bool:
        return self.alive and not self.submitted and not self.ended

    @property
    def over(self) -> bool:
        """Whether it has ended, with its process, or there is none."""
        return not self.alive and not self.wanted


def in_turn(runs: Mapping[str, RunReading], limit: int) -> list[str]:
    """The queued runs that may start where ``limit`` may be active at once: those that were submitted first. ``runs``:
    of all jobs on the cluster, by job."""
    free = max(0, limit - sum(reading.active for reading in runs.values()))
    queued = sorted((reading.status.submitted_at, job) for job, reading in runs.items()
                    if reading.queued and reading.status is not None)
    return [job for _, job in queued[:free]]


class JobRun:
    """The files of a job's run, and whether its process is among the services of a cluster."""

    def __init__(self, cfg: Config, services: ServiceFiles) -> None:
        self.name = run_service(cfg.job)
        """Name of the service."""
        self.log = JobPaths.of(cfg).log("train")
        self._paths, self._services = JobPaths.of(cfg), services

    def read(self) -> RunReading:
        """Raises OSError where a file cannot be read."""
        # In this order: a process that had ended has written its status before, and one that was started since has a
        # submission.
        record = self._services.get(self.name)
        submitted = self.submitted
        return RunReading(record is not None and record.running, submitted, self._status(), record.pid if record else 0)

    @property
    def submitted(self) -> bool:
        """Whether there is a submission. A file system that does not answer is no reason to end a run."""
        try:
            self._paths.submission.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True

    def submission(self) -> Submission | None:
        """None where there is none. Raises ConfigError for a damaged one, and OSError."""
        try:
            return Submission.decode(self._paths.submission.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as e:
            raise ConfigError(f"{self._paths.submission} is damaged",
                              hint="`elastic-rl stop`, then `elastic-rl train` resumes the job") from e

    def submit(self, submission: Submission) -> None:
        """Has the run wanted. The status goes before the submission: that of the run before would end this one. A
        submission that has been carried out may be left of a process that was killed; it must not meet the new status,
        which would have it carried out again. Raises OSError."""
        self.withdraw()
        self.save(RunStatus(phase=JobPhase.QUEUED, submitted_at=submission.at, at=submission.at))
        # Private: the environment has secrets.
        replace_file(self._paths.submission, submission.encode(), private=True, durable=True)

    def save(self, status: RunStatus) -> None:
        """Raises OSError."""
        replace_file(self._paths.run_status, status.encode(), private=True, durable=True)

    def withdraw(self) -> bool:
        """Has nobody start the run again, and its process end. Returns whether it was submitted."""
        submitted = False
        for path in self._paths.submission_files():  # also the unfinished one of a process that was killed
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                submitted |= path == self._paths.submission
        return submitted

    def _status(self) -> RunStatus | None:
        """None where there is none, or a damaged one."""
        try:
            return RunStatus.decode(self._paths.run_status.read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None
