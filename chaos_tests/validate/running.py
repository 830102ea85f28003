"""I6, I12, I13 and I15: what a job that runs has, what it has decided, and what it keeps when it has ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from chaos_tests.event_log import Event
from chaos_tests.validate.replay import Step, Transaction, below, is_job
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.job_records import ENDED_PHASES
from elastic_rl.etcd.keys import Keys

RECOVERY_S = 900.0
"""Longest that a part may be away, or an operation under way: as long as the injector waits for a recovery."""
_JOB = Keys("j")
STATUS, SPEC, EPOCH = below(_JOB.job_status()), below(_JOB.job_spec()), below(_JOB.epoch())
MEMBERS, POOLS = below(_JOB.members_prefix()), below(_JOB.pools_prefix())
_STREAMS, _HEAD = below(_JOB.streams_prefix()), "/head"


class _Shortages(Checker, ABC):
    """Times in which something is short, while its job runs."""

    def __init__(self) -> None:
        super().__init__()
        self._since = dict[tuple[str, str], tuple[float, str, Event]]()
        """Time, how it is short, and what says so, by scope and what is short."""
        self._over = set[str]()
        self._at = 0.0

    def gap(self, first: int, last: int) -> None:
        self._since.clear()

    def transaction(self, found: Transaction) -> None:
        self._at = found.at
        for step in filter(is_job, found.steps):
            if step.name == STATUS and step.new:
                if step.new.get("phase") in ENDED_PHASES:
                    self._over.add(step.scope)
                    for one in [key for key in self._since if key[0] == step.scope]:
                        self._whole(*one)
                else:
                    self._over.discard(step.scope)
            elif step.scope not in self._over:
                self.of_job(step)

    @abstractmethod
    def of_job(self, step: Step) -> None:
        """A change in a job that is not over."""

    def _is(self, step: Step, what: str, short: str) -> None:
        """``short``: how it is short; "" where it is not."""
        if not short:
            self._whole(step.scope, what)
        else:
            self._since.setdefault((step.scope, what), (self._at, short, step.event))

    def _whole(self, scope: str, what: str) -> None:
        since, short, proof = self._since.pop((scope, what), (self._at, "", {}))
        if self._at - since > RECOVERY_S:
            self.violated(f"{what} was short for {self._at - since:.0f} s: {short}", proof)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for scope, what in [*self._since]:
            self._whole(scope, what)


class PoolSizes(_Shortages):
    rule = "I6"
    keys = (STATUS, POOLS)
    judges = "sizes of pools"

    def __init__(self) -> None:
        super().__init__()
        self._desired, self._ready = dict[tuple[str, str], int](), dict[tuple[str, str], int]()

    def gap(self, first: int, last: int) -> None:
        super().gap(first, last)
        self._desired.clear()
        self._ready.clear()

    def of_job(self, step: Step) -> None:
        if not step.name.startswith(POOLS) or not step.new:
            return
        pool, _, what = step.name.removeprefix(POOLS).partition("/")
        of = (step.scope, pool)
        if what == "spec":
            self._desired[of] = int(step.new.get("desired", 0))
        elif what == "status":  # released engines are there, and wait for the trainer's phase to end
            self._ready[of] = int(step.new.get("ready", 0)) + int(step.new.get("released", 0))
        if of in self._desired and of in self._ready:
            desired, ready = self._desired[of], self._ready[of]
            self.judged += 1
            self._is(step, f"pool {pool}", f"{ready} of {desired} engines" if ready < desired else "")


class Singletons(_Shortages):
    """A job that runs has a driver, an actor and a trainer, and its cluster a coordinator."""

    rule = "I12"
    keys = (STATUS, MEMBERS)
    lacks = "the log has no members of a job"
    _ROLES: ClassVar[tuple[str, ...]] = ("driver", "actor", "trainer", "coordinator")

    def __init__(self) -> None:
        super().__init__()
        self._members = dict[tuple[str, str], set[str]]()
        self._losses = 0

    def gap(self, first: int, last: int) -> None:
        super().gap(first, last)
        self._members.clear()

    def of_job(self, step: Step) -> None:
        role, _, name = step.name.removeprefix(MEMBERS).partition("/")
        if not step.name.startswith(MEMBERS) or role not in self._ROLES:
            return
        members = self._members.setdefault((step.scope, role), set())
        if step.put:
            members.add(name)
        elif name not in members:
            return  # nothing is known of the others that were there with it
        else:
            members.discard(name)
            self._losses += 1
        self.judged += 1
        self._is(step, f"the {role} of {step.job}", "" if members else "there was none")

    def evidence(self) -> str:
        roles = ", ".join(sorted({role for _, role in self._members}))
        return f"{roles}: {self._losses} members lost" if self.judged else ""


class Decisions(Checker):
    rule = "I13"
    keys = (SPEC,)
    lacks = "the log has no decision of a job: it was begun before"

    def __init__(self) -> None:
        super().__init__()
        self._decided = dict[str, Step]()

    def transaction(self, found: Transaction) -> None:
        for step in found.steps:
            if step.name == SPEC and is_job(step):
                self.judged += 1
                before = self._decided.setdefault(step.job, step)
                if step.new.get("settings") != before.new.get("settings"):
                    self.violated(f"{step.at()}: what {step.job} had decided was changed", before.event, step.event)

    def evidence(self) -> str:
        return f"the decisions of {', '.join(sorted(self._decided))}" if self._decided else ""


class KeptAfterStop(Checker):
    """A job that has ended keeps what it is resumed and exported from."""

    rule = "I15"
    keys = (SPEC, STATUS, EPOCH, _STREAMS)
    lacks = "the job did not end within the log"

    def __init__(self) -> None:
        super().__init__()
        self._ended, self._seen = dict[str, Event](), set[str]()

    def gap(self, first: int, last: int) -> None:
        self._ended.clear()

    def transaction(self, found: Transaction) -> None:
        for step in filter(is_job, found.steps):
            if step.name == STATUS and step.new:
                if step.new.get("phase") in ENDED_PHASES:
                    self._ended[step.job] = step.event
                    self._seen.add(step.job)
                else:
                    self._ended.pop(step.job, None)
            head = step.name.startswith(_STREAMS) and step.name.endswith(_HEAD)
            if step.job in self._ended and not step.put and (step.name in (SPEC, STATUS, EPOCH) or head):
                self.violated(f"{step.at()} was deleted after the job had ended", self._ended[step.job], step.event)

    def evidence(self) -> str:
        return f"what is kept of {', '.join(sorted(self._seen))}" if self._seen else ""


CHECKERS: tuple[type[Checker], ...] = (PoolSizes, Singletons, Decisions, KeptAfterStop)
