"""Records that only coordinators read and write. Those that other processes share are in ``etcd.records``."""

from __future__ import annotations

from enum import StrEnum

from elastic_rl.etcd.records import Record

COORDINATOR = "coordinator"
"""Role of the replicas of the coordinator, which are members of each job."""


class Leadership(Record):
    """The leadership that was announced last. ``term`` is the create revision of the leader's candidate key."""

    replica: str
    url: str
    pid: int
    term: int
    since: float


class LastSeen(Record):
    """What the leader last knew of a member: an entry of the member registry. Times are unix seconds, for people."""

    role: str
    id: str
    incarnation: str
    epoch: int = 0
    pid: int = 0
    host: str = ""
    machine: str = ""
    first_seen: float
    registered_revision: int = 0
    """Revision at which it registered."""
    suspected_at: float = 0.0
    """When it was found to be no longer registered without evidence of its end; 0 while it is registered."""
    suspected_leader_s: float = 0.0
    """The same in seconds of the leader clock, which decides."""
    dead_at: float = 0.0
    dead_revision: int = 0
    """A revision at which it was dead or silent already, or the one of its last heartbeat: who registers later replaces
    it."""
    hung_at: float = 0.0
    """When it was found to send heartbeats without making progress; 0 while it makes progress."""
    late_at: float = 0.0
    """When it was found to take much longer than usual or than it has stated; 0 while it does not."""
    reported: bool = False
    """Whether the member's runner or driver reported the death before its lease ended."""

    @property
    def name(self) -> tuple[str, str]:
        return self.role, self.id

    @property
    def dead(self) -> bool:
        return self.dead_at > 0

    @property
    def suspected(self) -> bool:
        """Whether it may be dead, or only slow."""
        return self.suspected_at != 0 and not self.dead


class ProgressIntervals(Record):
    """How long a role goes without progress in each of its phases. Kept in etcd, so that a new leader knows it too."""

    role: str
    longest_s: dict[str, float] = {}
    """Phase → longest time between two signs of progress, fading."""
    samples: dict[str, int] = {}
    """Phase → intervals seen, counted up to the number at which the phase counts as known."""
    s_per_flop: float = 0.0
    """Seconds that the slowest member of the role takes for an operation of its stated work; 0: not known."""


class RecoveryAction(StrEnum):
    NONE = "none"
    """Another part recovers it, or nothing has to be done at once."""
    RESTART = "restart"
    """Restart the part in place."""
    GLOBAL_RESTART = "global_restart"
    """Raise the epoch, tear the compute plane down, and resume from the last committed state."""
    STOP = "stop"
    """End the run, keep everything, and alert."""


class FaultOccurrence(Record):
    """A fault that was counted: when, in seconds of the leader clock, and how far the run had come."""

    at: float
    progress: int


class FaultLog(Record):
    """The faults of one target that count, and the action that is still to be taken about them."""

    target: str
    epoch: int = 0
    """Number of the epoch in which the log was begun. That of the job, whose faults are global restarts, has none."""
    occurrences: list[FaultOccurrence] = []
    """The faults in a row, without a step of the run in between, the oldest first."""
    pending: RecoveryAction = RecoveryAction.NONE
    due_at: float = 0.0
    """When the pending action is due, in seconds of the leader clock."""
    reason: str = ""
    operation: str = ""
    """Id of the operation that the policy began last; empty once its end was taken into account."""
    reported_revision: int = 0
    """Revision of the newest event that was counted as a fault of a trainer group; earlier ones were too."""
