"""Keeps the driver of a job running: restarts it when it ends before the job does, and when a restart is requested."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from elastic_rl.coordinator.failure.policy import is_crash_loop, progress_of
from elastic_rl.coordinator.records import FaultOccurrence
from elastic_rl.coordinator.targets import JOB
from elastic_rl.driver.etcd_patience import patiently
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.errors import EtcdUnavailable, Fenced, PreflightFailed
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.records import Epoch, JobStatus, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes
from elastic_rl.host.paths import JobPaths

log = logging.getLogger(__name__)
T = TypeVar("T")

_TICK_S = 0.25
_REQUESTS_INTERVAL_S = 1.0
_STOP_GRACE_S = 30.0
"""Time for a driver to shut the compute plane down in order."""


class DriverSupervisor:
    """Runs one driver at a time. A restart of the driver is a global restart, since each driver raises the epoch.

    A driver that ends before its job does is restarted with the backoff of the failure policy, and what ends a run is
    the policy's crash-loop rule alone: so many ends in a row without progress of the job. The leader applies the same
    rule to what it sees; it does not see a driver that ends before it has registered.

    ``command`` starts the driver's process; it gets ``--id NAME``, under which it raises the epoch. ``on_tick`` is
    called four times a second.
    """

    def __init__(self, ctx: RunContext, etcd: EtcdClient, command: Sequence[str], *,
                 env: Mapping[str, str | None],
                 on_tick: Callable[[], None] = lambda: None) -> None:
        self._ctx, self._etcd, self._keys = ctx, etcd, ctx.keys
        self._policy = ctx.config.failure_policy
        self._command, self._env, self._on_tick = command, env, on_tick
        self._log_file = JobPaths.of(ctx.config).log("driver")

    def run(self) -> int:
        """Returns 0 when the job has finished, 1 when it has failed or the driver is in a crash loop. Waits as long as
        etcd is unavailable."""
        ends: list[FaultOccurrence] = []
        budget = no_backoff = StartBudget(base_s=self._policy.backoff_initial_s, ceiling_s=self._policy.backoff_max_s)
        while True:
            self._with_etcd(self._acknowledge)  # what was requested while no driver ran is what this start does
            epoch = self._with_etcd(partial(fencing.current_epoch, self._etcd, self._keys))
            driver_id = f"driver-{secrets.token_hex(4)}"
            began = time.monotonic()
            try:
                self._run_driver(driver_id)
            except PreflightFailed as e:  # no process could be made; that is no fault of the driver
                log.error("the driver could not be started: %s", e)
                budget = budget.after_failure(time.monotonic())
                self._pause_until(budget)
                continue
            job = self._with_etcd(self._status)
            if job.phase in ("finished", "failed"):
                return 0 if job.phase == "finished" else 1
            # A restart request ends the epoch, so the driver may have ended because of it before this process saw it.
            if self._with_etcd(self._request) is not None:
                continue  # the leader counts these, and stops a crash loop
            end = FaultOccurrence(at=began, progress=progress_of(job))
            if end.progress > max((e.progress for e in ends), default=-1):
                ends, budget = [], no_backoff
            elif ends:  # the first restart follows at once
                budget = budget.after_failure(time.monotonic(), jitter=random.random())
            ends.append(end)
            self._with_etcd(partial(self._report_end, epoch, driver_id, len(ends)))
            if is_crash_loop(ends, self._policy):
                self._with_etcd(partial(self._stop_run, len(ends)))
                return 1
            self._pause_until(budget)

    def _run_driver(self, driver_id: str) -> None:
        """Starts a driver, and returns when it has ended or was ended for a request. Raises PreflightFailed."""
        driver = processes.spawn([*self._command, "--id", driver_id], log=self._log_file, env=self._env)
        try:
            self._wait(driver)
        finally:
            processes.stop(driver.pid, grace_s=_STOP_GRACE_S)

    def _pause_until(self, budget: StartBudget) -> None:
        while not budget.open(time.monotonic()):
            self._on_tick()
            time.sleep(_TICK_S)

    def _stop_run(self, ends: int) -> None:
        """Ends the run where it is, as the leader does in a crash loop: every version is kept."""
        log.error("crash loop: the driver ended %d times without progress of the job: see %s", ends, self._log_file)
        message = (f"crash loop: the driver ended {ends} times without progress of the job. Everything is kept; see "
                   f"{self._log_file}, fix the cause, and train again")
        found = self._etcd.get(self._keys.job_status())
        status = (readable_one(found, JobStatus) or JobStatus(phase="")).replace(
            phase="failed", message=message, updated_at=time.time())
        epoch = fencing.current_epoch(self._etcd, self._keys)
        with contextlib.suppress(Fenced):  # another driver has begun: the run goes on there
            fencing.FencedWriter.of_epoch(self._etcd, self._keys, epoch).emit(
                event_kinds.RUN_CRASH_LOOP, self._ctx.job, message, severity=Severity.ERROR,
                ops=[Op.put(self._keys.job_status(), status.encode())])

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
        holder = readable_one(found, Epoch)
        if now != epoch and (holder is None or holder.holder != driver_id):
            return
        with contextlib.suppress(Fenced):
            fencing.emit(self._etcd, self._keys, now, event_kinds.RUN_GLOBAL_RESTART, self._ctx.job,
                         f"the driver ended; global restart {starts}", severity=Severity.ERROR)

    def _status(self) -> JobStatus:
        found = self._etcd.get(self._keys.job_status())
        return readable_one(found, JobStatus) or JobStatus(phase="")

    def _with_etcd(self, call: Callable[[], T]) -> T:
        """The result of a call, as soon as etcd answers it."""
        def pause(seconds: float) -> bool:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self._on_tick()
                time.sleep(_TICK_S)
            return False

        return patiently(call, pause=pause)
