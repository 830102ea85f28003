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

from elastic_rl.coordinator.failure.policy import after_driver_ended, in_a_row
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.records import FaultOccurrence, LastSeen, RecoveryAction
from elastic_rl.coordinator.targets import DRIVER, JOB
from elastic_rl.driver.etcd_patience import Stopped, patiently
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.driver.stop_window import StopWindow
from elastic_rl.errors import EtcdUnavailable, Fenced, PreflightFailed, SharedDevicesLost
from elastic_rl.etcd import event_kinds, fencing, run_stop, witness
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import (
    ENDED_PHASES,
    Epoch,
    JobStatus,
    Member,
    MemberProcess,
    ProcessFinding,
    RestartRequest,
    Severity,
    ended,
)
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes, stacks
from elastic_rl.host.paths import JobPaths

log = logging.getLogger(__name__)
T = TypeVar("T")

STOPPED = 130
"""Result of a run that its operator has stopped."""
END_CODES = {"finished": 0, "failed": 1, "stopped": STOPPED}
_TICK_S = 0.25
_REQUESTS_INTERVAL_S = 1.0
_STOP_GRACE_S = 30.0
"""Time for a driver to shut the compute plane down in order."""


class _RunStopped(Exception):
    """The run was stopped, and nothing of it is waited for."""


class DriverSupervisor:
    """Runs one driver at a time. Each takes over what runs, unless the epoch of the run is one in which nothing runs: a
    restart of the job has begun it, or this process.

    A driver that ends before its job does is followed by the next one with the backoff of the failure policy, and what
    ends a run is the policy's rule for drivers alone (``after_driver_ended``). The leader counts deaths of drivers too;
    it does not see a driver that ends before it has registered.

    A run that its operator stops has ``trainer.stop_timeout_s`` to commit what it has trained (``StopWindow``): the
    actor does that, and writes that the run was stopped, before anything of it is ended. Where it does not, this
    process writes it. A driver that ends meanwhile is followed by the next one, since the commit may need the trainer.

    ``command`` starts the driver's process; it gets ``--id NAME``, under which it registers and raises the epoch.
    ``on_tick`` is called four times a second. ``goes_on``: whether another process goes on with the run when an error
    ends this one. ``stopped``: whether the operator has stopped the run.
    """

    def __init__(self, ctx: RunContext, etcd: EtcdClient, command: Sequence[str], *,
                 env: Mapping[str, str | None],
                 on_tick: Callable[[], None] = lambda: None, goes_on: Callable[[], bool] = lambda: False,
                 stopped: Callable[[], bool] = lambda: False) -> None:
        self._ctx, self._etcd, self._keys = ctx, etcd, ctx.keys
        self._policy = ctx.config.failure_policy
        self._command, self._env, self._on_tick, self._goes_on = command, env, on_tick, goes_on
        self._stopped, self._window = stopped, StopWindow(ctx.config.trainer.stop_timeout_s)
        self._stop_read = float("-inf")
        """Monotonic time at which it was last read whether a run that is stopped may end."""
        self._epoch: int | None = None
        """The newest epoch that was found before a driver of this process was started; None before the first."""
        self._drivers: set[str] = set()
        """Those that this process has started."""
        self._log_file = JobPaths.of(ctx.config).log("driver")

    def run(self) -> int:
        """Returns 0 when the job has finished, 1 when it has failed or the driver is in a crash loop, and ``STOPPED``.
        Waits as long as etcd is unavailable; where the run is stopped, for the time of the stop."""
        try:
            return self._keep_running()
        except _RunStopped:
            return END_CODES.get(self._record_stop(), STOPPED)

    def _keep_running(self) -> int:
        ends: list[FaultOccurrence] = []
        budget = no_backoff = StartBudget(base_s=self._policy.backoff_initial_s, ceiling_s=self._policy.backoff_max_s)
        while True:
            self._with_etcd(self._acknowledge)  # what was requested while no driver ran is what this start does
            self._epoch = epoch = self._with_etcd(partial(fencing.current_epoch, self._etcd, self._keys))
            driver_id = f"driver-{secrets.token_hex(4)}"
            self._drivers.add(driver_id)
            try:
                code = self._run_driver(driver_id)
            except PreflightFailed as e:  # no process could be made; that is no fault of the driver
                log.error("the driver could not be started: %s", e)
                budget = budget.after_failure(time.monotonic())
                self._pause_until(budget)
                continue
            job = self._with_etcd(self._status)
            if job.phase in ENDED_PHASES:
                return END_CODES[job.phase]
            self._require_time_to_stop()
            # A restart of the job ends the epoch: the driver may have ended for it before this process saw the request.
            request = self._with_etcd(self._request)
            if request is not None:  # the leader counts these, and stops a crash loop
                if request.target == DRIVER:
                    self._with_etcd(partial(self._deregister, driver_id))
                continue
            if code == SharedDevicesLost.EXIT_CODE:  # the next one looks for hosts, however often
                budget = budget.after_failure(time.monotonic(), jitter=random.random())
                self._pause_until(budget)
                continue
            ends = in_a_row(ends, time.monotonic(), job, self._policy)
            # The first restart follows at once.
            budget = no_backoff if len(ends) == 1 else budget.after_failure(time.monotonic(), jitter=random.random())
            # A global restart would give up what a stop is to commit, and the end of a stop is no crash loop.
            action = RecoveryAction.NONE if self._stopped() else after_driver_ended(ends, self._policy)
            if action is RecoveryAction.STOP:
                self._with_etcd(partial(self._stop_run, len(ends)))
                return 1
            self._with_etcd(partial(self._report_end, epoch, driver_id, len(ends), action))
            self._pause_until(budget)

    def _run_driver(self, driver_id: str) -> int | None:
        """Starts a driver, and returns when it has ended, with its exit code, or was ended for a request, with None.
        Raises PreflightFailed, and _RunStopped where the run was stopped and has not ended by itself in time.

        A driver that is told to stop ends all that runs. That is for the end of the run, and for a restart of the job:
        after every other end, also of this process, the next driver takes it over.
        """
        driver = processes.spawn([*self._command, "--id", driver_id], log=self._log_file, env=self._env)
        try:
            self._wait(driver)
            return driver.poll()
        except _RunStopped:  # first: the end of what runs is then no fault
            self._record_stop()
            raise
        except BaseException:
            if self._goes_on():
                driver.kill()
                driver.wait()  # else what it has started would be ended with it below
            raise
        finally:
            if driver.poll() is None:
                processes.stop(driver.pid, grace_s=_STOP_GRACE_S)

    def _pause_until(self, budget: StartBudget) -> None:
        while not budget.open(time.monotonic()):
            self._tick()
            time.sleep(_TICK_S)

    def _tick(self) -> None:
        """Called while no driver runs. Raises _RunStopped."""
        self._on_tick()
        self._require_time_to_stop()

    def _require_time_to_stop(self) -> None:
        """Raises _RunStopped when the run was stopped, and has nothing to commit, or no time left for it. Called as
        often as one likes; reads rarely."""
        if not self._stopped():
            return
        now = time.monotonic()
        self._window.begin(now)
        phase = None
        if now - self._stop_read >= _REQUESTS_INTERVAL_S:
            self._stop_read = now
            with contextlib.suppress(EtcdUnavailable):
                phase = self._status().phase
        if self._window.is_over(time.monotonic(), phase):
            raise _RunStopped

    def _record_stop(self) -> str:
        """Writes that the run was stopped, unless an end of it is on record, and tries until the time of the stop is
        over, but once at least. Returns the phase on record then; empty where there is none of an end."""
        def pause(seconds: float) -> bool:
            until = time.monotonic() + seconds
            while not self._window.is_over(now := time.monotonic()) and now < until:
                self._on_tick()
                time.sleep(_TICK_S)
            return self._window.is_over(time.monotonic())

        self._window.begin(time.monotonic())
        try:
            return patiently(self._put_stop, pause=pause)
        except Fenced as e:
            log.warning("the stop of the run is not recorded by this process, which another one has replaced: %s", e)
        except Stopped:
            log.error("the stop of the run could not be recorded in the %g s of trainer.stop_timeout_s: what it "
                      "trained after its last commit is trained again when the job is resumed",
                      self._ctx.config.trainer.stop_timeout_s)
        return ""

    def _put_stop(self) -> str:
        """Writes the stop as ``run_stop.put_stop`` does, whose result and errors are this one's, unless another process
        carries the job out."""
        def check(number: int, epoch: Epoch | None) -> None:
            if self._epoch not in (None, number) and (
                    epoch is None or epoch.holder not in (*self._drivers, fencing.GLOBAL_RESTART)):
                raise Fenced(f"epoch {number} of job {self._ctx.job} is another process's")

        return run_stop.put_stop(fencing.FencedWriter.of_assignment(
            self._etcd, ClusterKeys(self._ctx.config.cluster_name), self._ctx.job, self._ctx.assignment),
            self._keys, check)

    def _stop_run(self, ends: int) -> None:
        """Ends the run where it is, as the leader does in a crash loop: every version is kept."""
        log.error("crash loop: the driver ended %d times without progress of the job: see %s", ends, self._log_file)
        message = (f"crash loop: the driver ended {ends} times without progress of the job. Everything is kept; see "
                   f"{self._log_file}, fix the cause, and train again")
        found = self._etcd.get(self._keys.job_status())
        status = ended(readable_one(found, JobStatus) or JobStatus(phase=""), "failed", message, time.time())
        epoch = fencing.current_epoch(self._etcd, self._keys)
        with contextlib.suppress(Fenced):  # another driver has begun: the run goes on there
            fencing.FencedWriter.of_epoch(self._etcd, self._keys, epoch).emit(
                event_kinds.RUN_CRASH_LOOP, self._ctx.job, message, severity=Severity.ERROR,
                ops=[Op.put(self._keys.job_status(), status.encode())])

    def _wait(self, driver: subprocess.Popen[bytes]) -> None:
        """Returns when the driver has ended, or a restart of the job is requested. For a restart of the driver it is
        killed and not asked: it may hang, and where it does not it would end what it has started. One that is stopped
        (SIGSTOP) for longer than a member's lease is killed too: the leader finds it dead, and it would never end."""
        next_read, watched = 0.0, processes.StoppedProcesses(self._ctx.config.coordinator.lease_ttl_s)
        while driver.poll() is None:
            self._on_tick()
            if watched.lost(time.monotonic(), [driver.pid] if processes.is_stopped(driver.pid) else []):
                log.warning("the driver %d is stopped: it is killed, and the next one takes over", driver.pid)
                driver.kill()
            if time.monotonic() >= next_read:
                with contextlib.suppress(EtcdUnavailable):  # running work continues without etcd
                    if (request := self._request()) is not None:
                        if request.target == JOB:
                            return
                        if request.of_failure_policy:
                            self._kill_hung(driver)
                        else:
                            driver.kill()
                next_read = time.monotonic() + _REQUESTS_INTERVAL_S
            self._require_time_to_stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(timeout=_TICK_S)
        self._on_tick()

    def _kill_hung(self, driver: subprocess.Popen[bytes]) -> None:
        """Kills a driver that hangs, after its stacks were written, and says where they are, where etcd answers."""
        path = stacks.write_of_hang(JobPaths.of(self._ctx.config).hangs, registry.DRIVER, [driver.pid],
                                    "the driver hangs")
        driver.kill()
        if path is None:
            return
        found = f"the driver hung; the stacks of its processes on {self._ctx.host}: {path}"
        log.warning("%s", found)
        with contextlib.suppress(EtcdUnavailable, Fenced):
            writer = fencing.FencedWriter.of_epoch(self._etcd, self._keys,
                                                   fencing.current_epoch(self._etcd, self._keys))
            writer.emit(event_kinds.DRIVER_STACKS, self._ctx.job, found, severity=Severity.WARNING, file=str(path))

    def _request(self) -> RestartRequest | None:
        """The open request to restart the job, else the one to restart the driver. Acknowledges one to restart the job
        that the start of a newer driver has carried out."""
        requests = open_requests(self._etcd, self._keys)
        job = requests.get(JOB)
        if job is not None and job.has_newer_driver(fencing.current_epoch(self._etcd, self._keys)):
            acknowledge(self._etcd, self._keys, job)
            job = None
        return job or requests.get(DRIVER)

    def _acknowledge(self) -> None:
        requests = open_requests(self._etcd, self._keys)
        for target in (JOB, DRIVER):
            if target in requests:
                acknowledge(self._etcd, self._keys, requests[target])

    def _deregister(self, driver_id: str) -> None:
        """Deletes the entry of a driver that was killed on request, so that its end does not count as a death. The
        entry stays where the leader has seen a fault of this driver: that is over once the next one has registered."""
        entry = self._keys.registry_entry(registry.DRIVER, driver_id)
        found = self._etcd.get(entry)
        seen = readable_one(found, LastSeen)
        if seen is None or not (seen.hung_at or seen.dead):
            self._etcd.txn([Compare.mod(entry, "==", found.mod_revision if found else 0)],
                           [Op.delete(key(registry.DRIVER, driver_id)) for key in (
                               self._keys.member, self._keys.registry_entry, self._keys.evidence)])

    def _report_end(self, epoch: int, driver_id: str, ends: int, action: RecoveryAction) -> None:
        """Writes that the driver ended, and for a global restart ends the epoch, so that the next driver finds nothing
        that it could take over. Does neither if the driver was fenced off: then its end is no news.

        ``epoch``: the one that held when the driver was started, and still holds unless it has begun one of its own.
        """
        found = self._etcd.get(self._keys.epoch())
        now = found.version if found else 0
        holder = readable_one(found, Epoch)
        if now != epoch and (holder is None or holder.holder != driver_id):
            return
        writer = fencing.FencedWriter.of_epoch(self._etcd, self._keys, now)
        with contextlib.suppress(Fenced):
            if action is RecoveryAction.GLOBAL_RESTART:
                _, end = fencing.next_epoch(self._keys, now, holder=fencing.GLOBAL_RESTART)
                writer.emit(event_kinds.RUN_GLOBAL_RESTART, self._ctx.job,
                            f"global restart: the driver ended {ends} times without progress of the job",
                            severity=Severity.ERROR, ops=[end])
            else:
                writer.emit(event_kinds.DRIVER_RESTARTED, driver_id, "the driver ended; the next one takes over what "
                            "still runs", severity=Severity.ERROR)
                self._report_gone(driver_id)

    def _report_gone(self, driver_id: str) -> None:
        """Reports the end of a driver as a witness does, which says nothing of one that it has never seen alive. One
        that no leader has seen keeps its registration, by which the leader finds it, and then its end."""
        found = readable_one(self._etcd.get(self._keys.member(registry.DRIVER, driver_id)), Member)
        if found is not None and self._etcd.get(self._keys.registry_entry(registry.DRIVER, driver_id)) is not None:
            process = MemberProcess(role=found.role, id=found.id, incarnation=found.incarnation, pid=found.pid,
                                    started=0)
            witness.report(self._etcd, self._keys, process, ProcessFinding.GONE, f"its supervisor on {self._ctx.host}")

    def _status(self) -> JobStatus:
        found = self._etcd.get(self._keys.job_status())
        return readable_one(found, JobStatus) or JobStatus(phase="")

    def _with_etcd(self, call: Callable[[], T]) -> T:
        """The result of a call, as soon as etcd answers it."""
        def pause(seconds: float) -> bool:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                self._tick()
                time.sleep(_TICK_S)
            return False

        return patiently(call, pause=pause)
