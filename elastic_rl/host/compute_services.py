"""The services of a job's compute plane on this host: the head and the worker of its Ray, the routers of its pools.

They outlive the driver that has started them, and the next driver of the epoch adopts them. The driver keeps them
running, but for workers of Ray on other hosts, which the host agents keep running. ``leftovers.sweep`` ends them with
the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from elastic_rl.errors import Conflict
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import stop, sweep
from elastic_rl.host.service_files import SERVICE_FILE_ENV, ServiceFiles, ServiceRecord
from elastic_rl.runtime.files import preflight_writes

RAY_HEAD, RAY_WORKER = "ray-head", "ray-worker"
"""Names of the services that are Ray: the head without CPUs, and the node on which everything runs."""


def router_service(pool: str) -> str:
    """Name of the service that is the router of a pool."""
    return f"router-{pool}"


def compute_services(job: JobPaths) -> ServiceFiles:
    """The services of the compute plane; the generation of each is the epoch that it was started in."""
    return ServiceFiles(job.compute_services)


def ray_epoch(job: JobPaths) -> int:
    """The epoch of the Ray that a driver has started on this host and none has ended, whether it runs or not; 0 for
    none."""
    head = compute_services(job).get(RAY_HEAD)
    return head.generation if head is not None else 0


class ComputeService(ABC):
    """A service of an epoch: it outlives the process that launched it, and the next object for it of this epoch adopts
    it as it is. ``url`` stays over restarts of the service, whoever restarts it: it is in the service's file, until
    ``stop``. A service of an earlier epoch is not adopted: ``launch`` ends it."""

    grace_s = 2.0
    """Time for the service to end in order."""

    def __init__(self, files: ServiceFiles, service: str, *, epoch: int, log: Path, new_url: Callable[[], str]) -> None:
        """``service``: its name in ``files``. ``new_url``: makes the address of one that is not adopted."""
        self._files, self._service, self._epoch, self._log = files, service, epoch, log
        self._url = ""
        self._pid = 0
        self._adopt()
        self.was_known = bool(self._url)
        """Whether another object of the epoch had launched it, also where it has ended since."""
        if not self._url:
            self._url = new_url()

    @property
    def name(self) -> str:
        return self._service

    @property
    def url(self) -> str:
        """Final once a service of this epoch was launched or adopted: until then another driver may launch one first.
        """
        return self._url

    @property
    def pid(self) -> int:
        """Process id of the service that this object has launched or adopted; 0 before that."""
        return self._pid

    def launch(self) -> bool:
        """Starts the process, after it has ended one that still runs and what an earlier one has left, and does not
        wait until it serves. Returns whether it did: a service of this epoch that another driver has launched meanwhile
        is adopted instead. Raises PreflightFailed and ConfigError, and Conflict while one runs that cannot be ended,
        runs elsewhere or is of a later epoch."""
        if self._adopt():
            return False
        self.end()
        try:
            with preflight_writes(self._files.folder):
                command, env = self._command()
                self._pid = self._files.start(self._service, command, log=self._log, env=env, url=self._url,
                                              generation=self._epoch)
        except Conflict:
            if not self._adopt():
                raise
            return False
        return True

    @abstractmethod
    def _command(self) -> tuple[Sequence[str], Mapping[str, str | None]]:
        """The command line of the next process, and what its environment has besides this process's own. Called right
        before each launch. Raises ConfigError, PreflightFailed and OSError."""

    def alive(self) -> bool:
        """Whether the process that this object has launched or adopted runs."""
        return self._files.is_run_by(self._service, self._pid)

    def end(self) -> None:
        """Ends the process, and what has the service's mark. ``url`` stays for the next one. A process of this epoch
        that this object does not know is left alone, since another driver has put it in the place of the one that was
        to end, and so is one of a later epoch."""
        record = self._files.get(self._service)
        if self._is_of_another(record):
            return
        if record is not None and record.named:  # else the pid may be that of a driver that is just starting it
            stop(record.pid, grace_s=self.grace_s)
        sweep(self._files.mark(self._service), SERVICE_FILE_ENV)

    def stop(self) -> None:
        """Ends the process for good. A driver that a newer one of its epoch has replaced must not call it: it would end
        what that one has adopted."""
        self.end()
        record = self._files.get(self._service)
        if record is not None and not record.running and not self._is_of_another(record):
            self._files.forget(self._service)

    def _is_of_another(self, record: ServiceRecord | None) -> bool:
        """Whether the service is one of a later epoch, of another driver of this one, or runs on another machine."""
        return record is not None and (record.elsewhere or record.generation > self._epoch or
                                       record.generation == self._epoch and record.pid not in (0, self._pid))

    def _adopt(self) -> bool:
        """Takes over the address of this epoch's service, and its process. Returns whether one runs that this object
        did not know."""
        record = self._files.get(self._service)
        if record is None or not record.url or record.generation != self._epoch:
            return False
        self._url = record.url
        if record.pid in (0, self._pid):  # one that has just been killed may seem to run elsewhere for a moment
            return False
        self._pid = record.pid
        return True
