"""How long a run that its operator stops is waited for. Pure: the caller reads the clock and the job's status."""

from __future__ import annotations

from elastic_rl.etcd.records import ENDED_PHASES, WORKING_PHASES


class StopWindow:
    """The time that a run has to commit what it has trained, once its operator has stopped it.

    It ends early where nothing is there to be committed, which only etcd can say. No answer says nothing: the commit
    may be in progress, or wait for the same etcd.
    """

    def __init__(self, limit_s: float) -> None:
        """``limit_s``: seconds that the commit may take."""
        self._limit_s, self._deadline = limit_s, float("inf")

    def begin(self, now: float) -> None:
        """The run was stopped: its time counts from the first call."""
        self._deadline = min(self._deadline, now + self._limit_s)

    def is_over(self, now: float, phase: str | None = None) -> bool:
        """Whether the run is not waited for any more. ``phase``: of the job's status; None where it is not known. A run
        whose end is on record, as after its commit, has its time to end what it has started."""
        return now >= self._deadline or phase is not None and phase not in (*WORKING_PHASES, *ENDED_PHASES)
