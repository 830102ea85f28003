"""What a checker is, and what it says: the verdict on one rule, with the records that prove it. Pure.

A rule has any number of checkers. Each sees the records of a log once, in their order, and keeps what it needs, so that
the log of a long run need not be held: the changes of etcd as transactions (``replay``), the others one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Self

from chaos_tests.event_log import Event, Kind

if TYPE_CHECKING:
    from chaos_tests.validate.replay import KeyChange, Transaction

MOST_SHOWN = 20
"""Violations of one checker that are kept; further ones are counted."""
RUN = "run"
"""The rule of what makes a run of the suite worth nothing, beside those of docs/architecture.md."""
TEST_HOSTS = "test hosts"
OWN_TARGETS = ("one host", TEST_HOSTS)
"""Targets that are taken down after their run, so that what is left of them can be seen."""
GROWTH = "growth"
"""The rule of what a run takes and keeps."""
RULES: Mapping[str, str] = {
    RUN: "the run is worth something: what was planned happened, under load, to a job that is sound without faults",
    "I1": "no write of a superseded leader, driver or trainer is accepted",
    "I2": "a version is visible only when it is complete",
    "I3": "version numbers only grow, and no kept version is lost",
    "I4": "engines serve verified weights, and samples name the version that made them",
    "I5": "each prompt group is trained on exactly once, within the bound of staleness",
    "I6": "pools reach their desired number of engines",
    "I7": "a deterministic run with faults equals the one without, bit for bit",
    "I8": "nothing outlives its owner",
    "I9": "one alert and one resolution a fault",
    "I10": "each fault ends in a recovery, and each wait in a result",
    "I11": "a fault pauses the job, which says what it waits for, and goes on to its last step",
    "I12": "what there is one of comes back",
    "I13": "what a job has decided is not changed",
    "I14": "slow work is not a fault",
    "I15": "stopping deletes nothing",
    GROWTH: "nothing grows with the steps of a run",
}
"""Each rule by its number, in short."""


class State(StrEnum):
    KEPT = "kept"
    VIOLATED = "violated"
    UNSEEN = "unseen"
    """The log has no evidence for the rule: it is neither kept nor violated."""


@dataclass(frozen=True)
class Violation:
    rule: str
    """Its number in docs/architecture.md, or ``RUN``."""
    what: str
    records: tuple[Event, ...] = ()
    """The records of the log that prove it."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


@dataclass(frozen=True)
class Verdict:
    rule: str
    state: State
    evidence: str
    """What was looked at; of a rule that is unseen, why there was nothing."""
    violations: tuple[Violation, ...] = ()
    further: int = 0
    """Violations that are not among those."""

    def __str__(self) -> str:
        return f"{self.rule} {self.state}: {self.evidence}"


class Checker:
    """Judges one rule. ``violations`` and ``evidence`` are asked for at the end."""

    rule: ClassVar[str]
    reads: ClassVar[frozenset[Kind]] = frozenset()
    """Kinds of the records that it is shown, beside the first and the last one. Changes come as transactions."""
    keys: ClassVar[tuple[str, ...]] = ()
    """How the names of keys begin (``replay.below``) whose transactions it is shown; "" begins all."""
    judges: ClassVar[str] = ""
    """What ``judged`` counts, in the plural."""
    lacks: ClassVar[str] = "the log has no changes of etcd that the rule is about"
    """Why it has no evidence, where it has none."""

    def __init__(self) -> None:
        self.run: Event = {}
        """The log's first record."""
        self.end: Event | None = None
        """Its last record, if it is whole."""
        self.judged = 0
        """How many things it has judged. Nothing judged is no evidence: neither that the rule was kept, nor that it was
        violated."""
        self._violations, self._further = list[Violation](), 0

    def begin(self, run: Event) -> None:
        self.run = run

    def see(self, event: Event) -> None:
        """A record of ``reads``."""

    def transaction(self, found: Transaction) -> None:
        """A transaction with a change of one of ``keys``; its other changes are in it too."""

    def gap(self, first: int, last: int) -> None:
        """The changes of these revisions were not seen. What is known of the keys is no longer true."""

    def present(self, change: KeyChange) -> None:
        """A key, of those of ``keys``, that was there at the end of the last gap, with the last change that it had."""

    def listed(self, listing: Event) -> None:
        """All keys that were there at the end of the last gap have been shown. Not called where they could not be
        read."""

    def finish(self, end: Event | None) -> None:
        """The log's end. What is known only then is violated here."""
        self.end = end

    def against(self, baseline: Self) -> None:
        """``baseline``: the same checker, when it has seen the run without faults. Called after ``finish``."""

    def evidence(self) -> str:
        """What it has judged; "" where that is nothing."""
        return f"{self.judged:,} {self.judges}" if self.judged else ""

    def violated(self, what: str, *records: Event, rule: str = "") -> None:
        """``rule``: where it is another one than the checker's."""
        if len(self._violations) < MOST_SHOWN:
            self._violations.append(Violation(rule or self.rule, what, records))
        else:
            self._further += 1

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(self._violations)

    @property
    def further(self) -> int:
        return self._further

    @property
    def settings(self) -> Event:
        """Of the job."""
        found = self.run.get("settings")
        return found if isinstance(found, Mapping) else {}
