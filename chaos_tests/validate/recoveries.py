"""I10: a recovery is seen in what the job did, and not in the word of the fault alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.faults import FaultChecker
from chaos_tests.validate.replay import Transaction, below, is_job
from elastic_rl.etcd.keys import Keys

_MEMBERS = below(Keys("j").members_prefix())
_OBSERVED_S = 30.0
"""Longest by which the observer may be late, which is started again where etcd was killed."""
_ENDED = re.compile(r"(?P<part>.*?)_(killed|terminated|exited)(_.*)?|(?P<stopped>trainer(_rank)?)_stopped")
_WITHOUT_STEPS = ("coordinator_killed",)
"""Faults that a run on one host has recovered from without a step: nothing that runs needs the part."""
_ON_ONE_HOST = "one host"
_ROLES: Mapping[str, str] = {
    "engine": "engine", "scheduler": "engine", "engine_runner": "engine", "all_engines": "engine",
    "trainer_rank": "trainer", "trainer": "trainer", "trainer_agent": "trainer", "actor": "actor", "driver": "driver",
    "rollout": "rollout", "advantages": "advantages"}
"""Part that a fault of one process ends, as in the fault's name → the role of the members that it loses."""


def lost_role(fault: Event) -> str:
    """The role of which a fault has ended a member; "" for another fault."""
    match = _ENDED.fullmatch(str(fault["name"]))
    return _ROLES.get(match["part"] or match["stopped"], "") if match else ""


class WorkOfRecoveries(FaultChecker):
    """Between a fault on one host and its recovery the job has made a step; and where a member of the job was ended,
    another one has begun."""

    rule = "I10"
    reads = frozenset({Kind.FAULT, Kind.STEP})
    keys = (_MEMBERS,)

    def __init__(self) -> None:
        super().__init__()
        self._steps, self._began = list[float](), dict[str, list[float]]()
        self._known, self._gaps = set[tuple[str, str]](), False
        self._judged = 0

    def other(self, event: Event) -> None:
        self._steps.append(float(event["at"]))

    def gap(self, first: int, last: int) -> None:
        self._gaps = True

    def transaction(self, found: Transaction) -> None:
        for step in filter(is_job, found.steps):
            incarnation, role = str(step.new.get("incarnation") or ""), str(step.new.get("role") or "")
            if step.name.startswith(_MEMBERS) and incarnation and (role, incarnation) not in self._known:
                self._known.add((role, incarnation))
                self._began.setdefault(role, []).append(found.at)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for fault in self.happened:
            if fault.get("healed_at") is None or fault["healed_at"] < fault["injected_at"]:
                continue  # which ``Recoveries`` judges
            self._judged += 1
            begin, until, role = float(fault["injected_at"]), float(fault["healed_at"]), lost_role(fault)
            what = f"{fault['name']} of {fault.get('target')} is said to have healed"
            needs_step = self.run.get("target") == _ON_ONE_HOST and fault["name"] not in _WITHOUT_STEPS
            if needs_step and self._steps and not any(begin < at <= until for at in self._steps):
                self.violated(f"{what} after {until - begin:.1f} s, in which the job made no step", fault)
            elif role and role in self._began and not self._gaps and not any(
                    begin <= at <= until + _OBSERVED_S for at in self._began[role]):
                self.violated(f"{what}, and no other member of the role {role} has begun", fault)

    def evidence(self) -> str:
        return f"steps and members of {self._judged} recoveries" if self._judged else ""


CHECKERS: tuple[type[FaultChecker], ...] = (WorkOfRecoveries,)
