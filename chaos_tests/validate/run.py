"""Whether a run that had faults kept the rules. A pure check of what the run has recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos_tests.nemesis.schedule import Schedule
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.etcd.records import Severity

LOGPROB_DIFF = 1e-4
"""Most by which an engine's log-probs may differ from the trainer's where both have the same weights, in fp32."""


@dataclass(frozen=True)
class Violation:
    rule: str
    """Its number in docs/architecture.md; "run" for what makes a run of the suite worth nothing."""
    what: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}"


@dataclass(frozen=True)
class Evidence:
    """What is known of a run that has ended."""

    schedule: Schedule
    report: Mapping[str, Any]
    """report.json."""
    steps: Sequence[Mapping[str, Any]]
    """The record of each step, as often as it was done."""
    committed_steps: Sequence[int]
    """Steps of which etcd has the metrics."""
    max_staleness: int
    alerts: Sequence[Alert] = ()
    """The alerts that etcd had at the end of the run."""
    leftovers: Sequence[str] = ()
    """Processes, files and segments that were there after the cluster was taken down."""


def check(evidence: Evidence) -> list[Violation]:
    return [Violation(rule, what) for rule, what in _found(evidence)]


def _found(e: Evidence) -> Iterator[tuple[str, str]]:
    yield from _faults(e)
    report = e.report
    steps = report["steps"] if e.schedule.by_time else e.schedule.steps
    if report["steps"] != steps or [*e.committed_steps] != list(range(1, steps + 1)):
        yield "I11", (f"the run ended after {report['steps']} of {steps} steps, and etcd has "
                      f"{len(e.committed_steps)} of them")
    if report["versions_committed"] <= steps:
        yield "I3", f"{report['versions_committed']} versions of {steps} steps were committed"
    for name in ("groups_lost", "groups_duplicated"):
        if report[name]:
            yield "I5", f"{name} is {report[name]}"
    for problem in report["audit_problems"]:
        yield "I5", problem
    for step in e.steps:
        if step["staleness"] > e.max_staleness:
            yield "I5", f"step {step['step']} has a staleness of {step['staleness']}, above {e.max_staleness}"
        difference = step["logprob_diff_max"]
        # Of a step that was committed when its loop ended, the next loop does not know what the trainer had measured.
        if step["staleness"] == 0 and difference is not None and not difference <= LOGPROB_DIFF:
            yield "I4", f"step {step['step']}: samples have log-probs that differ by {difference:g} from those weights"
    if not any(step["staleness"] == 0 and step["logprob_diff_max"] is not None for step in e.steps):
        yield "run", "no step compares the log-probs of engines with those of the trainer"
    for alert in e.alerts:
        if alert.phase is not Phase.RESOLVED and alert.severity is not Severity.INFO:
            yield "I9", f"the alert {alert.kind} of {alert.subject} is {alert.phase} at the end: {alert.message}"
    yield from (("I8", f"{left} is left") for left in e.leftovers)


def _faults(e: Evidence) -> Iterator[tuple[str, str]]:
    """What was planned happened, was noticed, and is over."""
    planned = Counter(name for strike in e.schedule.strikes for name in strike.faults)
    happened = Counter(str(fault["name"]) for fault in e.report["faults"] if fault["witness"])
    for name, times in sorted((planned - happened).items()):
        yield "run", f"{name} was planned, and {times} of {planned[name]} did not happen"
    for fault in e.report["faults"]:
        for moment, after in (("detected_at", "injected_at"), ("healed_at", "detected_at")):
            at, before = (fault[m] if fault[m] is not None else math.nan for m in (moment, after))
            if not at >= before:  # one of them is missing, too
                yield "I10", (f"{fault['name']} at step {fault['step']}: {moment} is {fault[moment]} "
                              f"({fault['witness']})")
                break
