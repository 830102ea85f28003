"""Jobs: their queue and their phases, as a pure state machine over the leader's record of each one. No I/O, no clock.

    (submitted) ──▶ QUEUED ──its turn──▶ STARTING ──its run has begun──▶ RUNNING ──▶ FINISHED | FAILED | STOPPED
                      └───stop──────────────────────────────────────────────────────────────────▶ STOPPED

The queue is ordered by priority, then by the order of submissions; ``parallel`` jobs are live at once. A live job keeps
its place until its driver is gone, however it ended, so that the next one finds the devices free. A job whose driver,
host or engines are away stays RUNNING, since it goes on where it was: there is no edge RUNNING → QUEUED.

A run that is stopped commits what it has trained, for which its status has a limit, ends what it has started, and
writes its report: while its driver runs it has that limit and ``stop_run_s`` for all of it.

The transition that must NOT exist: out of an ended phase without a new submission. A leader that reads the last status
of a driver late would start a finished job again, which would write over its results while the next job trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_rl.etcd.cluster_records import JobPhase, JobRecord, JobState, RunStatus

STOP_RUN_S = 60.0
"""Longest time for a run that was stopped to end in order, once it has committed what it had trained: it takes its
processes down, one after the other, and writes its report."""
_BY_OPERATOR = (JobPhase.STOPPED, "stopped by its operator")
_RESUBMITTED = (JobPhase.STOPPED, "it was submitted once more")


@dataclass(frozen=True)
class Driver:
    """The driver of a job as assignments and agents have it."""

    runs: bool = False
    """Whether the present generation runs on the host that it is assigned to."""
    gone: bool = True
    """Whether it is assigned to no host, and none that is heard runs one of any generation."""
    waits_for: str = ""
    """What it waits for before it can run."""


@dataclass(frozen=True)
class SeenJob:
    """What etcd says about a job at one reading. ``revision``: the one at which ``record`` was written."""

    record: JobRecord
    revision: int
    state: JobState | None = None
    run: RunStatus | None = None
    driver: Driver = Driver()

    @property
    def _run(self) -> RunStatus | None:
        """How the submission goes that is live or waits."""
        submission = self.record.submission if self.state is None else self.state.submission
        return self.run if self.run is not None and self.run.submission == submission else None

    @property
    def begun(self) -> bool:
        return self._run is not None and self._run.phase is JobPhase.RUNNING

    @property
    def stop_s(self) -> float:
        """Seconds that the run of that submission may take to commit when it is stopped. The record may have those of
        the next submission."""
        run = self._run
        return run.stop_s if run is not None and run.stop_s is not None else self.record.stop_s

    @property
    def ending(self) -> tuple[JobPhase, str] | None:
        """The phase in which the submission ends that is live or waits, and why; None while it is to go on."""
        if self._run is not None and self._run.phase.ended:
            return self._run.phase, self._run.message
        if self.state is not None and self.record.submission != self.state.submission:
            return _RESUBMITTED
        return _BY_OPERATOR if self.record.stopped else None

    def ends_in_order(self, leader_s: float) -> bool:
        """Whether it was stopped, and its run has time to end by itself. The process of a run that had begun may be
        between two incarnations, of which the next one ends it."""
        runs = self.driver.runs or self.begun and not self.driver.gone
        return (self.ending in (_BY_OPERATOR, _RESUBMITTED) and runs and self.state is not None
                and not 0 < self.state.stop_deadline_s <= leader_s)

    def wants_driver(self, leader_s: float) -> bool:
        """Whether a host is to run the job's driver."""
        return (self.state is not None and self.state.phase.live
                and (self.ending is None or self.ends_in_order(leader_s)))


def advance(jobs: Mapping[str, SeenJob], parallel: int, leader_s: float, stop_run_s: float = STOP_RUN_S
            ) -> dict[str, JobState]:
    """The jobs that were submitted as they are now, by name; a state equal to the one before where nothing has changed.
    ``stop_run_s``: longest time for a run that was stopped to end in order after its commit, by the leader clock."""
    jobs = {name: job for name, job in jobs.items() if job.record.submission}
    states = {name: _advance(job, leader_s, stop_run_s) for name, job in jobs.items()}
    # A job that ends in this pass has its place until the next one, so that its end is written before another begins.
    live = [name for name, job in jobs.items() if job.state is not None and job.state.phase.live]
    queue = sorted((name for name, state in states.items() if state.phase is JobPhase.QUEUED),
                   key=lambda name: (-jobs[name].record.priority, states[name].order, name))
    free = max(0, parallel - len(live))
    for place, name in enumerate(queue):
        if place < free and _is_queued(jobs[name]):
            states[name] = states[name].replace(phase=JobPhase.STARTING, reason="its driver is about to be assigned")
        elif place < free:
            states[name] = states[name].replace(reason="is next")
        else:
            states[name] = states[name].replace(reason=_waits_behind([*live, *queue[:place]], parallel))
    return states


def _advance(job: SeenJob, leader_s: float, stop_run_s: float) -> JobState:
    state, submission = job.state, job.record.submission
    if state is not None and not state.phase.known:  # a newer release's
        return state
    if state is None or not state.phase.live and submission != state.submission:
        return JobState(phase=JobPhase.QUEUED, submission=submission, order=job.revision)
    if state.phase.ended:
        return state
    if (ending := job.ending) is not None:
        phase, reason = ending
        if state.phase is JobPhase.QUEUED or job.driver.gone:
            return state.replace(phase=phase, reason=reason, stop_deadline_s=0.0)
        if job.ends_in_order(leader_s):
            return state.replace(reason="is stopping: its run ends what it has started",
                                 stop_deadline_s=state.stop_deadline_s or leader_s + job.stop_s + stop_run_s)
        return state.replace(reason=f"is about to be {phase}: waits for the end of its driver")
    if state.phase is JobPhase.STARTING and job.begun:
        return state.replace(phase=JobPhase.RUNNING, reason="")
    if state.phase.live:
        return state.replace(reason="" if job.driver.runs else job.driver.waits_for or "waits for its driver to run")
    return state


def _is_queued(job: SeenJob) -> bool:
    """Whether the job's present submission is on record as QUEUED, so that its order is fixed."""
    return (job.state is not None and job.state.phase is JobPhase.QUEUED
            and job.state.submission == job.record.submission)


def _waits_behind(ahead: Sequence[str], parallel: int) -> str:
    shown = ", ".join(ahead[:3]) + (f" and {len(ahead) - 3} more" if len(ahead) > 3 else "")
    limit = "one job runs at a time" if parallel == 1 else f"{parallel} jobs run at a time"
    return f"waits for {shown}: {limit} (coordinator.parallel_jobs)"
