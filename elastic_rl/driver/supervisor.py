"""Keeps the driver of a job running: restarts it when it ends before the job does, and when a restart is requested."""

from __future__ import annotations

import contextlib
import logging
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from elastic_rl.coordinator.failure.policy import progress_of
from elastic_rl.coordinator.targets import JOB
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.records import Epoch, JobStatus, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes

log = logging.getLogger(__name__)
T = TypeVar("T")

_MAX_RESTARTS = 3
"""Restarts of a driver that ends by itself, without progress of the job in between."""
_TICK_S = 0.25
_REQUESTS_INTERVAL_S = 1.0
_STOP_GRACE_S = 30.0
"""Time for a driver to shut the compute plane down in order."""


class DriverSupervisor:
    """Runs one driver at a time. A restart of the driver is a global restart, since each driver raises the epoch.

    ``command`` starts the driver's process; it gets ``--id NAME``, under which it raises the epoch. ``on_tick`` is
    called four times a second.
    """

    def __init__(self, ctx: RunContext, etcd: EtcdClient, command: Sequence[str], *, env: Mapping[str, str],
                 on_tick: Callable[[], None] = lambda: None) -> None:
        self._ctx, self._etcd, self._keys = ctx, etcd, ctx.keys
        self._command, self._env, self._on_tick = command, env, on_tick
        self._log_file = ctx.config.log_dir / "driver.log"

    def run(self) -> int:
        """Returns 0 when the job has finished, 1 when it has failed or the driver ends again and again. Waits as long
        as etcd is unavailable."""
        starts, reached = 0, -1
        while starts <= _MAX_RESTARTS:
            self._with_etcd(self._acknowledge)  # what was requested while no driver ran is what this start does
            epoch = self._with_etcd(partial(fencing.current_epoch, self._etcd, self._keys))
            driver_id = f"driver-{secrets.token_hex(4)}"
            driver = processes.spawn([*self._command, "--id", driver_id], log=self._log_file, env=self._env)
            try:
                self._wait(driver)
            finally:
                processes.stop(driver.pid, grace_s=_STOP_GRACE_S)
            job = self._with_etcd(self._status)
            if job.phase in ("finished", "failed"):
                return 0 if job.phase == "finished" else 1
            # A restart request ends the epoch, so the driver may have ended because of it before this process saw it.
            if self._with_etcd(self._request) is not None:
                continue  # the leader counts these, and stops a crash loop
            # The leader counts these too, but it may be down: the same rule, in short.
            progress = progress_of(job)
            starts, reached = (starts + 1 if progress <= reached else 1), max(reached, progress)
            self._with_etcd(partial(self._report_end, epoch, driver_id, starts))
        log.error("the driver ended %d times without progress of the job: see %s", starts, self._log_file)
        return 1

    def _wait(self, driver: subprocess.Popen[bytes]) -> None:
        """Returns when the driver has ended, or a restart of the job is requested."""
        next_read = 0.0
        while driver.poll() is None:
            self._on_tick()
            if time.monotonic() >= next_read:
                with contextlib.suppress(EtcdUnavailable):  # running work continues without etcd
                    if self._request() is not None:
                        return
                next_read = time.monotonic() + _REQUESTS_INTERVAL_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(timeout=_TICK_S)
        self._on_tick()

    def _request(self) -> RestartRequest | None:
        """The open request to restart the job. Acknowledges one that the start of a newer driver has carried out."""
        request = open_requests(self._etcd, self._keys).get(JOB)
        if request is not None and request.has_newer_driver(
                fencing.current_epoch(self._etcd, self._keys)):
            acknowledge(self._etcd, self._keys, request)
            return None
        return request

    def _acknowledge(self) -> None:
        if (request := open_requests(self._etcd, self._keys).get(JOB)) is not None:
            acknowledge(self._etcd, self._keys, request)

    def _report_end(self, epoch: int, driver_id: str, starts: int) -> None:
        """Writes the event of a global restart, unless the driver was fenced off: then its end is no news.

        ``epoch``: the one that held when the driver was started, and still holds if it ended before it raised its own.
        """
        found = self._etcd.get(self._keys.epoch())
        now = found.version if found else 0
        if now != epoch and found is not None and Epoch.decode(found.value).holder != driver_id:
            return
        with contextlib.suppress(Fenced):
            fencing.emit(self._etcd, self._keys, now, "run.global_restart", self._ctx.job,
                         f"the driver ended; global restart {starts}", severity=Severity.ERROR)

    def _status(self) -> JobStatus:
        found = self._etcd.get(self._keys.job_status())
        return readable_one(found, JobStatus) or JobStatus(phase="")

    def _with_etcd(self, call: Callable[[], T]) -> T:
        """The result of a call, as soon as etcd answers it."""
        while True:
            try:
                return call()
            except EtcdUnavailable as e:
                log.warning("waiting for etcd: %s", e)
                until = time.monotonic() + _REQUESTS_INTERVAL_S
                while time.monotonic() < until:
                    self._on_tick()
                    time.sleep(_TICK_S)
