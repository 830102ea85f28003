"""What a checker is, and what it says: the verdict on one rule, with the records that prove it. Pure.

A rule has any number of checkers, of two forms. A *fold* sees the records one after the other and keeps what it needs,
so that the log of a long run need not be held. A *replay* is one function of all records; it is given them anew, from
the file where they are in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Self

from chaos_tests.event_log import Event, Kind

MOST_SHOWN = 20
"""Violations of one checker that are kept; further ones are counted."""
RUN = "run"
"""The rule of what makes a run of the suite worth nothing, beside those of docs/architecture.md."""
OWN_TARGETS = ("one host", "test hosts")
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


class Fold:
    """A checker that sees the records in their order. ``found`` and ``evidence`` are asked at the end."""

    rule: ClassVar[str]
    reads: ClassVar[frozenset[Kind]]
    """Kinds of the records that it is shown, beside the first and the last one."""
    lacks: ClassVar[str]
    """Why it has no evidence, where it has none."""

    def __init__(self) -> None:
        self.run: Event = {}
        """The log's first record."""
        self.end: Event | None = None
        """Its last record, if it is whole."""
        self._violations, self._further = list[Violation](), 0

    def begin(self, run: Event) -> None:
        self.run = run

    def see(self, event: Event) -> None:
        """A record of ``reads``."""

    def finish(self, end: Event | None) -> None:
        """The log's end. What is known only then is violated here."""
        self.end = end

    def against(self, baseline: Self) -> None:
        """``baseline``: the same checker, when it has seen the run without faults. Called after ``finish``."""

    def evidence(self) -> str:
        """What it has looked at; "" where it has seen nothing that the rule is about."""
        raise NotImplementedError

    def violated(self, what: str, *records: Event) -> None:
        if len(self._violations) < MOST_SHOWN:
            self._violations.append(Violation(self.rule, what, records))
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


@dataclass(frozen=True)
class Replay:
    """A checker that is one function of the records."""

    rules: tuple[str, ...]
    """Those that its violations may be of."""
    reads: Kind
    """Kind of the records that it needs: without any it has no evidence."""
    find: Callable[[Iterable[Event]], Iterator[Violation]]
    what: str
    """What its evidence is, after a number of records: "changes replayed by …"."""
