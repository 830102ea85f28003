"""I10: a recovery is seen in what the job did, and not in the word of the fault alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from chaos_tests.event_log import Event, Kind
from chaos_tests.faults.catalogue import FAULTS
from chaos_tests.validate.faults import FaultChecker
from chaos_tests.validate.replay import OBSERVER_LATE_S, Transaction, below, is_job
from chaos_tests.validate.running import RecoveryBounds
from chaos_tests.validate.times import Unseen
from chaos_tests.validate.verdict import OWN_TARGETS
from elastic_rl.etcd.keys import Keys

_MEMBERS = below(Keys("j").members_prefix())


class WorkOfRecoveries(FaultChecker):
    """Between a fault and its recovery the job has made a step; where a member of the job was ended, another
    one has begun; and on a cluster of its own that took no longer than the job had needed to start, some times."""

    rule = "I10"
    reads = frozenset({Kind.FAULT, Kind.STEP})
    keys = (_MEMBERS,)

    def __init__(self) -> None:
        super().__init__()
        self._steps, self._began = list[float](), dict[str, list[float]]()
        self._known, self._unseen = set[tuple[str, str]](), Unseen()
        self._judged, self._bounds = 0, RecoveryBounds()

    def begin(self, run: Event) -> None:
        super().begin(run)
        self._bounds.begin(run)

    def other(self, event: Event) -> None:
        self._steps.append(float(event["at"]))
        self._bounds.see(event)

    def gap(self, first: int, last: int) -> None:
        self._unseen.gap()

    def listed(self, listing: Event) -> None:
        self._unseen.seen(float(listing["at"]))

    def transaction(self, found: Transaction) -> None:
        self._unseen.seen(found.at)
        for change in filter(is_job, found.changes):
            incarnation, role = str(change.new.get("incarnation") or ""), str(change.new.get("role") or "")
            if change.name.startswith(_MEMBERS) and incarnation and (role, incarnation) not in self._known:
                self._known.add((role, incarnation))
                self._began.setdefault(role, []).append(found.at)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for times in (self._steps, *self._began.values()):
            times.sort()
        unseen = self._unseen.times()
        for fault in self.happened:
            if fault.get("healed_at") is None or fault["healed_at"] < fault["injected_at"]:
                continue  # which ``Recoveries`` judges
            entry = FAULTS.get(str(fault["name"]))
            begin, until = float(fault["injected_at"]), float(fault["healed_at"])
            role = entry.loses if entry is not None else ""
            what = f"{fault['name']} of {fault.get('target')} is said to have healed"
            needs_step = bool(self._steps) and not (entry and entry.recovers_without_step)
            self._judged += needs_step or role in self._began
            if needs_step and bisect_right(self._steps, begin) == bisect_right(self._steps, until):
                self.violated(f"{what} after {until - begin:.1f} s, in which the job made no step", fault)
            elif role and role in self._began and not unseen.meets(begin, until + OBSERVER_LATE_S) and bisect_left(
                    self._began[role], begin) == bisect_right(self._began[role], until + OBSERVER_LATE_S):
                self.violated(f"{what}, and no other member of the role {role} has begun", fault)
            elif self.run.get("target") in OWN_TARGETS and until - begin > self._bounds.recovery_s:
                self.violated(f"{what} after {until - begin:.0f} s: the whole job had its first step after "
                              f"{self._bounds.start_s:.0f} s", fault)

    def evidence(self) -> str:
        return f"steps and members of {self._judged} recoveries" if self._judged else ""


CHECKERS: tuple[type[FaultChecker], ...] = (WorkOfRecoveries,)
