"""The run of a job: the cluster's singleton ``driver/JOB``, which outlives the command that has submitted it.

What is to run is in etcd: the job's record says how often it was submitted and whether it was stopped, and its
*submission* what that is. The leader gives the run its turn and a host (``coordinator.jobs``), the agent of that host
keeps its process running (``elastic_rl.run_service``), and the process writes the *status*, under the generation that
it was started for.

The transitions that must NOT exist:

- from an end (finished, failed, stopped) to a start: the run would do its work again, or be refused for ever.
  So the end is in the status before the process ends;
- from a stop to a start: a process that is started for a run which was stopped ends it, and does nothing else;
- from wanted to ended because a process was killed, whichever: only the run itself and its operator end it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from pydantic import ValidationError

from elastic_rl import errors
from elastic_rl.config import Config
from elastic_rl.errors import ConfigError, Conflict, ElasticRLError, EtcdUnavailable, Fenced
from elastic_rl.etcd import fencing, job_settings, run_stop
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import JobPhase, JobRecord, JobState, RunStatus, driver_of
from elastic_rl.etcd.decoding import decode_bytes, readable, readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.record import Record
from elastic_rl.etcd.transaction import Compare, Op
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.service_files import ServiceFiles
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.files import UMASK_ENV, os_error_text, replace_file, user_umask

_MAX_SUBMISSION_BYTES = 1 << 20
"""Longest sealed submission: etcd refuses requests of more than 1.5 MiB."""
_MAX_TEXT = 4000
"""Longest text of an error, in characters."""


class Submission(Record):
    """What a job is to do, with all that another process needs to do it as the first one did."""

    number: int = 0
    """Number of the submission in the job's record: an older one, which a writer to etcd may put back, is refused."""
    settings: dict[str, Any]
    faults: bool = False
    """Whether faults are injected."""
    from_job: str = ""
    """The job whose policy this one begins with; empty for one that begins with a model of its own."""
    checked: bool = False
    """Whether the command that has submitted it has made all checks of a new job, with these settings on this host, and
    has said what they warn of."""
    python: str
    """Interpreter of that command: another one may have another release, or not the job's plug-ins. In this and the
    next two each character stands for a byte, since paths and values need not be valid UTF-8."""
    folder: str
    """Working folder of the command that has submitted it: settings may name files relative to it."""
    environment: dict[str, str]
    """Environment of that command, such as the user's tokens and CUDA_VISIBLE_DEVICES, which the host agent's need not
    have."""

    @classmethod
    def of_this_process(cls, cfg: Config, *, faults: bool = False, from_job: str = "", checked: bool = False) -> Self:
        environment = {**os.environb, UMASK_ENV.encode(): f"{user_umask():03o}".encode()}
        return cls(settings=cfg.model_dump(mode="json"), faults=faults, from_job=from_job, checked=checked,
                   python=_as_text(os.fsencode(sys.executable)), folder=_as_text(os.getcwdb()),
                   environment={_as_text(k): _as_text(v) for k, v in environment.items()})

    @property
    def interpreter(self) -> str:
        """Path of ``python``."""
        return os.fsdecode(_as_bytes(self.python))

    @property
    def working_folder(self) -> Path:
        """Path of ``folder``."""
        return Path(os.fsdecode(_as_bytes(self.folder)))

    def process_environment(self) -> dict[bytes, bytes]:
        """The environment, as ``os.execve`` takes it."""
        return {_as_bytes(k): _as_bytes(v) for k, v in self.environment.items()}


def _as_text(raw: bytes) -> str:
    return raw.decode("latin-1")


def _as_bytes(text: str) -> bytes:
    return text.encode("latin-1")


def failed(status: RunStatus, error: Exception, *, see: Path) -> RunStatus:
    """The end of a run by an error; ``see``: the log that has more about one that nobody expected."""
    match error:
        case ElasticRLError():
            found = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        case OSError():
            found = {"error": ElasticRLError.__name__, "message": os_error_text(error)}
        case _:
            found = {"error": ElasticRLError.__name__, "message": f"{type(error).__name__}: {error}",
                     "hint": f"this is a defect of elastic-rl; its traceback is in {see}"}
    return now(status, JobPhase.FAILED).replace(**{name: _shortened(text) for name, text in found.items()})


def _shortened(text: str) -> str:
    """A text that etcd takes: an error may quote a whole batch, and the name of a file need not be valid UTF-8."""
    return text[:_MAX_TEXT].encode(errors="backslashreplace").decode()


def stopped(status: RunStatus, message: str = "") -> RunStatus:
    """The end of a run that its operator has stopped. ``message``: what the run says of it."""
    return now(status, JobPhase.STOPPED).replace(message=_shortened(message or "stopped by its operator"))


def now(status: RunStatus, phase: JobPhase) -> RunStatus:
    return status.replace(phase=phase, at=time.time())


def as_error(status: RunStatus) -> ElasticRLError | None:
    """The error that ended a run, for the command that shows it."""
    if not status.error:
        return None
    found = getattr(errors, status.error, None)  # None: of a later release
    kind = found if isinstance(found, type) and issubclass(found, ElasticRLError) else ElasticRLError
    return kind(status.message, hint=status.hint)


@dataclass(frozen=True)
class RunReading:
    """A job's newest run: as etcd has it, or, while its cluster is down, as this host saw it last."""

    status: RunStatus | None
    """What its process wrote last, of any submission."""
    record: JobRecord | None = None
    """Record of the job; None while the cluster is down, and for a job that is not on it."""
    state: JobState | None = None
    down: bool = False
    """Whether the cluster was taken down, and its runs with it."""
    pid: int = 0
    """Its process on this host; 0 where there is none."""

    @property
    def alive(self) -> bool:
        return bool(self.pid)

    @property
    def phase(self) -> JobPhase | None:
        """None for a job that nobody has submitted."""
        if self.record is None:
            unfinished = self.status is not None and not self.status.phase.ended
            return JobPhase.STOPPED if unfinished and self.down else self.status.phase if self.status else None
        status, state = self._status, self.state
        if not self.record.submission:
            return None
        if status is not None and status.phase.ended:
            return status.phase
        if state is not None and state.submission != self.record.submission:
            state = None
        if state is not None and state.phase.ended:
            return state.phase
        if self.record.stopped and status is None and (state is None or state.phase is JobPhase.QUEUED):
            return JobPhase.STOPPED  # no process was to be started for it yet
        if status is not None:
            return status.phase
        return JobPhase.STARTING if state is not None and state.phase.live else JobPhase.QUEUED

    @property
    def _status(self) -> RunStatus | None:
        """The status of the newest submission."""
        submission = self.record.submission if self.record is not None else None
        return self.status if self.status is not None and submission in (None, self.status.submission) else None

    @property
    def ended(self) -> bool:
        """Whether it has ended; its process may be about to exit."""
        return self.phase is None or self.phase.ended

    @property
    def wanted(self) -> bool:
        """Whether its process is to run, or it waits for its turn."""
        return not self.ended and not (self.record is not None and self.record.stopped)

    @property
    def queued(self) -> bool:
        return self.phase is JobPhase.QUEUED

    @property
    def stopping(self) -> bool:
        return not self.ended and not self.wanted

    @property
    def over(self) -> bool:
        """Whether it has ended, with its process, or there is none."""
        return self.ended and not self.alive

    @property
    def stop_s(self) -> float:
        """Seconds that its process may take to commit what it has trained when it is stopped: also that of the
        submission before, which may still be at it. 0 where there is none."""
        if self.status is not None and not self.status.phase.ended and self.status.stop_s is not None:
            return self.status.stop_s
        return self.record.stop_s if self.record is not None else 0.0

    @property
    def submitted_at(self) -> float:
        """Unix seconds; 0 where there is no run."""
        return self.record.submitted_at if self.record is not None else self.status.submitted_at if self.status else 0.0

    @property
    def since(self) -> float:
        """When its phase began, as far as its process has said, unix seconds; else when it was submitted."""
        return self._status.at if self._status is not None else self.submitted_at

    @property
    def error(self) -> ElasticRLError | None:
        """The error that has ended it."""
        return as_error(self._status) if self._status is not None else None

    @property
    def step(self) -> int:
        """Last step of a run that has finished; 0 where that is not known."""
        return self._status.step if self._status is not None else 0

    @property
    def outcome(self) -> str:
        """What its process says of its end, for people; empty where that is nothing, or it goes on."""
        status = self._status
        return status.message if status is not None and status.phase.ended else ""

    @property
    def waits_for(self) -> str:
        """What it waits for by the leader's word; empty once it has ended, and where it waits for nothing."""
        if self.record is None or self.ended:
            return ""
        if self.state is None or self.state.submission != self.record.submission:
            return "waits for a coordinator to take it up"
        return self.state.reason


class JobRun:
    """The run of a job, for commands on a host of its cluster."""

    def __init__(self, cfg: Config, singletons: ServiceFiles, connect: Callable[[], EtcdClient | None],
                 is_down: Callable[[], bool]) -> None:
        """``connect``: connects to the cluster's etcd; None while the cluster is not up. ``is_down``: whether it was
        taken down by a command."""
        self.name = driver_of(cfg.job)
        """Name of the singleton."""
        self.log = JobPaths.of(cfg).log("train")
        self._job, self._keys, self._paths = cfg.job, ClusterKeys(cfg.cluster_name), JobPaths.of(cfg)
        self._singletons, self._connect, self._is_down = singletons, connect, is_down

    @property
    def pid(self) -> int:
        """Its process on this host; 0 while there is none."""
        record = self._singletons.get(quote(self.name, safe=""))
        return record.pid if record is not None and record.running else 0

    def read(self) -> RunReading:
        """The run as etcd has it; as this host saw it last while the cluster is not up. Raises EtcdUnavailable where
        the cluster is up and its etcd does not answer, and ConfigError."""
        etcd = self._connect()
        if etcd is None:
            return self.last_seen()
        with etcd:
            return self.read_from(etcd)

    def look(self) -> RunReading:
        """The run as etcd has it; as this host saw it last while etcd does not answer. Raises ConfigError."""
        try:
            return self.read()
        except EtcdUnavailable:
            return self.last_seen()

    def last_seen(self) -> RunReading:
        """The run as this host saw it last, without asking etcd."""
        return RunReading(self._copy(), down=self._is_down(), pid=self.pid)

    def read_from(self, etcd: EtcdClient) -> RunReading:
        """The run as etcd has it, by a client of the cluster's etcd. Raises EtcdUnavailable, and ConfigError for a
        record that this release cannot read."""
        record, state, status = (self._keys.job(self._job), self._keys.job_state(self._job),
                                 self._keys.run_status(self._job))
        found = etcd.txn([], [Op.get(record), Op.get(state), Op.get(status)])
        kv = found.get(record)
        job = job_settings.read_record(kv.value, self._job) if kv is not None else None
        return RunReading(readable_one(found.get(status), RunStatus) if job is not None else None, job,
                          readable_one(found.get(state), JobState), pid=self.pid)

    def submit(self, etcd: EtcdClient, submission: Submission, secret: ClusterSecret, *, host: str = "") -> None:
        """Has the run wanted: once more, if it has ended. ``host``: the one that has its files. Raises ConfigError for
        a submission that is too large for etcd, or a job that is not on the cluster, Conflict where another command
        changes the job, and EtcdUnavailable.
        """
        key = self._keys.job(self._job)
        found = etcd.get(key)
        record = self._submittable(found.value if found is not None else None)
        again = record.replace(submission=record.submission + 1, stopped=False, submitted_at=time.time(),
                               host=host)
        sealed = job_settings.seal(submission.replace(number=again.submission).encode(), self._job, secret)
        if len(sealed) > _MAX_SUBMISSION_BYTES:
            raise ConfigError(f"settings and environment of this command take {len(sealed) >> 10} KiB of etcd, and may "
                              f"take {_MAX_SUBMISSION_BYTES >> 10}", hint="unset large environment variables")
        if not etcd.txn([Compare.mod(key, "==", found.mod_revision if found is not None else 0)],
                        [Op.put(key, again.encode()), Op.put(self._keys.submission(self._job), sealed)]).succeeded:
            raise Conflict(f"another command changes job {self._job} at the same time", hint="try again")
        self.save_copy(RunStatus(submission=again.submission, phase=JobPhase.QUEUED, at=again.submitted_at,
                                  submitted_at=again.submitted_at))

    def submission(self, etcd: EtcdClient, secret: ClusterSecret, number: int) -> Submission:
        """What was submitted under a number. Raises ConfigError where there is nothing that can be read, OtherSecret
        for what was not sealed with this secret, Conflict where there is another submission, and EtcdUnavailable."""
        found = etcd.get(self._keys.submission(self._job))
        raw = job_settings.unseal(found.value, self._job, secret) if found is not None else b""
        if (submission := decode_bytes(raw, Submission)) is None:
            raise ConfigError(f"what was submitted of job {self._job} cannot be read",
                              hint="`elastic-rl stop`, then `elastic-rl train` resumes the job")
        if submission.number != number:
            raise Conflict(f"etcd has submission {submission.number} of job {self._job}, and not {number}")
        return submission

    def withdraw(self, etcd: EtcdClient) -> bool:
        """Has the run stopped: nobody starts it any more, and its process ends. Returns whether it was wanted. Raises
        EtcdUnavailable and Conflict."""
        before = self.read_from(etcd)
        if not before.wanted or before.record is None:
            return False
        number = before.record.submission

        def stopped(raw: bytes | None) -> bytes:
            record = self._submittable(raw)
            return record.replace(stopped=record.stopped or record.submission == number).encode()

        etcd.update(self._keys.job(self._job), stopped)
        if self.read_from(etcd).over and (copy := self._copy()) is not None:  # it was queued: no process will say so
            self.save_copy(now(copy, JobPhase.STOPPED))
        return True

    def _submittable(self, raw: bytes | None) -> JobRecord:
        """The record of a job that is on the cluster. Raises ConfigError."""
        if raw is None:
            raise ConfigError(f"job {self._job} is not on cluster {self._keys.cluster}",
                              hint="another command has taken it off; try again")
        return job_settings.read_record(raw, self._job)

    # -- for its process -----------------------------------------------------------------------------------------------
    def save(self, etcd: EtcdClient, status: RunStatus, generation: int) -> None:
        """Writes the status, unless it has ended: a write of before the end may arrive after it. A copy on this host is
        for ``jobs`` while the cluster is down. Raises Fenced where the driver's assignment has a later generation,
        Conflict and EtcdUnavailable."""
        def change(raw: bytes | None) -> bytes:
            before = decode_bytes(raw, RunStatus) if raw is not None else None
            if before is not None and before.submission == status.submission and before.phase.ended:
                return raw or b""
            return status.encode()

        status = status.replace(generation=generation)
        etcd.update(self._keys.run_status(self._job), change,
                    guards=fencing.assigned(self._keys, self._job, generation))
        self.save_copy(status)

    def save_copy(self, status: RunStatus) -> None:
        """Keeps what ``last_seen`` says. A disk without room changes nothing that counts."""
        with contextlib.suppress(OSError):
            replace_file(self._paths.run_status, status.encode(), private=True, durable=True)

    def end_with_cluster(self, etcd: EtcdClient) -> None:
        """Writes the end of a run whose process was on this host when the cluster was taken down, and that nobody has
        been assigned since: the end that the process has left here because etcd did not answer, else that the run was
        stopped. What it had not committed has ended with the cluster, so that nothing is to be started for that. Raises
        EtcdUnavailable and Conflict."""
        seen = self._copy()
        if seen is None or not seen.generation or self.pid:
            return
        newest = readable_one(etcd.get(self._keys.run_status(self._job)), RunStatus)
        if newest is None or newest.submission != seen.submission or newest.phase.ended:
            return
        writer = fencing.FencedWriter.of_assignment(etcd, self._keys, self._job, seen.generation)
        with contextlib.suppress(Fenced):  # another host carries it out, or nobody is to
            if newest.phase is JobPhase.RUNNING:  # first, as its process does it: a run that has ended is left alone
                run_stop.put_stop(writer, Keys(self._job))
            self.save(etcd, seen if seen.phase.ended else stopped(seen, "stopped with its cluster"), seen.generation)

    def _copy(self) -> RunStatus | None:
        """None where there is none, or a damaged one."""
        try:
            return RunStatus.decode(self._paths.run_status.read_bytes())
        except (OSError, ValidationError):
            return None


def all_stopped(etcd: EtcdClient, keys: ClusterKeys) -> list[str]:
    """Stops every run of a cluster that was taken down, before its coordinators are started: only ``train`` resumes
    them. Returns the jobs that were submitted. Raises EtcdUnavailable."""
    jobs = []
    for record, kv in readable(etcd.range(keys.jobs_prefix())[0], JobRecord):
        if not record.submission:
            continue
        jobs.append(kv.key.removeprefix(keys.jobs_prefix()))
        if not record.stopped:
            etcd.update(kv.key, lambda raw: JobRecord.decode(raw).replace(stopped=True).encode() if raw else None)
    return jobs
