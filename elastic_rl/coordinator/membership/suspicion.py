"""Slow or dead? When the leader may say of a member that is no longer registered that it has died. Pure.

A lease ends when nobody renews it. A dead process does not, and neither does one that has no core, holds the GIL, or is
cut off from etcd. So the end of a lease makes a member only suspected, which has no consequences. It is dead

- at once with evidence: a witness of its machine saw that its process is gone or stopped;
- after ``host_lost_s`` if its machine has no witness that is heard: the host has failed or is cut off as a whole;
- after ``suspicion_s`` in any case, longer on an overloaded machine: a process that exists and is not heard for so long
  is of no use, whatever the reason.

There is no way from "late" to "dead" without one of these three.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.membership.hang_detection import stretch
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.etcd.records import Evidence, ProcessFinding, Witness

_FINDINGS = {ProcessFinding.GONE: "its process is gone", ProcessFinding.STOPPED: "its process is stopped"}


@dataclass(frozen=True)
class WitnessReports:
    """What the witnesses of all machines say, at one reading of etcd."""

    leader_s: float
    """Seconds of the leader clock."""
    witnesses: Iterable[Witness] = ()
    evidence: Mapping[tuple[str, str], Evidence] = field(default_factory=dict)
    """Role and id → evidence, of members that are not registered."""

    @cached_property
    def loads(self) -> dict[str, float]:
        """Load per core of each machine that has a witness, by machine."""
        loads: dict[str, float] = {}
        for w in self.witnesses:
            loads[w.machine] = max(w.load_per_core, loads.get(w.machine, 0.0))
        return loads

    @cached_property
    def _others(self) -> dict[str, set[int]]:
        """Pids of the witnesses of each machine."""
        pids: dict[str, set[int]] = {}
        for w in self.witnesses:
            pids.setdefault(w.machine, set()).add(w.pid)
        return pids

    def about(self, entry: LastSeen) -> Evidence | None:
        """Evidence about this incarnation of a member."""
        found = self.evidence.get(entry.name)
        return found if found is not None and found.incarnation == entry.incarnation else None

    def watched(self, entry: LastSeen) -> bool:
        """Whether the machine of a member has a witness other than the member's own process."""
        return bool(entry.machine and self._others.get(entry.machine, set()) - {entry.pid})


@dataclass(frozen=True)
class Suspicion:
    """The times for which a member is only suspected, in seconds of the leader clock."""

    suspicion_s: float
    host_lost_s: float

    @classmethod
    def from_config(cls, cfg: CoordinatorConfig) -> Suspicion:
        return cls(cfg.suspicion_s, cfg.host_lost_s)

    def why_dead(self, entry: LastSeen, reports: WitnessReports) -> str:
        """Why a member that is not registered is dead, for people; empty while it may only be slow."""
        evidence = reports.about(entry)
        if evidence is not None:
            return f"{_FINDINGS.get(evidence.finding, evidence.finding)} ({evidence.by})"
        if not entry.suspected:
            return ""
        silent_s = max(0.0, reports.leader_s - entry.suspected_leader_s)
        if not reports.watched(entry):
            return "no process of its machine is heard" if silent_s >= self.host_lost_s else ""
        if silent_s >= self.suspicion_s * stretch(reports.loads.get(entry.machine, 0.0)):
            return f"no heartbeat for {silent_s:.0f} s after the end of its lease"
        return ""
