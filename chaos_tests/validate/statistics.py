"""The numbers of a run with faults: recoveries, what they cost, what was kept of its throughput. Pure.

*Effective training time ratio* (ETTR) is the part of a run's wall time in which it made progress that counts, as
Kokolis et al. define it ("Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025,
arXiv:2410.21680): productive time over wall time. Steps that were done again count once, as they were done last. Of a
step during which a fault was under way, no more counts than the median of the steps without one takes: the rest it has
waited. The wall time is from the begin of the first step to the end of the last one.

*Throughput kept* is the samples a second of the run over those of its baseline, the same job with the same seed and no
fault, over the same steps: how long a step takes depends on what the job has learned.

*Training lost* to a fault is the time from the end of the last step before it to the end of the first one after the
recovery, less what so many steps take in this run while no fault is under way. Unlike the other two it needs no
baseline, and says which fault has cost what: on a machine that others use, the speed of a run an hour ago says little.
What faults have cost together whose times meet is no one's: it counts for the run, and for no kind of fault.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.attribution import attributed, began, ended, is_of_fault, victims
from chaos_tests.validate.faults import happened
from chaos_tests.validate.replay import below, record
from chaos_tests.validate.times import Times
from chaos_tests.validate.training import Effective, same_weights, tolerance
from elastic_rl.coordinator.alerts.state_machine import Phase
from elastic_rl.etcd.keys import Keys
from elastic_rl.report.build import percentile

_ALERTS = below(Keys("j").alerts_prefix())


_LARGEST = 1e15


@dataclass(frozen=True)
class StepTime:
    """A step, as it was done once."""

    step: int
    began_at: float
    ended_at: float
    samples: int
    reward: float | None

    @property
    def seconds(self) -> float:
        return self.ended_at - self.began_at


@dataclass(frozen=True)
class Spread:
    """Median and 95th percentile of several values of one kind; None where there was no value."""

    n: int
    median: float | None
    p95: float | None
    max: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(len(values), percentile(values, 0.5), percentile(values, 0.95), max(values, default=None))


@dataclass(frozen=True)
class FaultKind:
    """The faults of one name."""

    name: str
    planned: int
    happened: int
    detect_s: Spread
    """From its injection to its detection."""
    heal_s: Spread
    """From its injection to the recovery."""
    lost_s: Spread
    """Training lost to those whose time meets no other's and has an end; below 0 where the steps were faster than
    usual."""
    redone: Spread
    """Steps that were done again."""
    alerts: Spread


@dataclass
class Timeline:
    """What a report draws and counts: the steps as often as they were done, and the faults."""

    run: Event = field(default_factory=dict)
    end: Event | None = None
    steps: list[StepTime] = field(default_factory=list)
    effective: Effective = field(default_factory=Effective)
    """The ``StepTime`` of each step, as it was done last."""
    faults: list[Event] = field(default_factory=list)
    redone: list[tuple[float, int]] = field(default_factory=list)
    """(time, number of steps) each time that steps were begun again."""
    alerts: dict[str, Event] = field(default_factory=dict)
    """Those that have fired and are about a part that does not work, by id."""
    wrong_tokens: int = 0
    """Tokens of steps whose samples were made by other weights than those that they name."""

    def add(self, event: Event) -> None:
        kind = event["kind"]
        if kind == Kind.STEP:
            self._step(event)
        elif kind == Kind.FAULT:
            self.faults.append(event)
        elif kind == Kind.CHANGE:
            if below(event["key"]).startswith(_ALERTS):
                alert = record(event)
                if alert.get("id") and alert.get("phase") == Phase.FIRING and is_of_fault(alert):
                    self.alerts.setdefault(str(alert["id"]), alert)
        elif kind == Kind.RUN:
            self.run = event
        elif kind == Kind.END:
            self.end = event

    def _step(self, event: Event) -> None:
        step, at = int(event["step"]), float(event["at"])
        seconds = _bounded((event.get("seconds") or {}).get("total")) or 0.0
        one = StepTime(step, at - seconds, at, int(_bounded(event.get("samples")) or 0),
                       _bounded(event.get("reward_mean")))
        if undone := self.effective.undo(step):
            self.redone.append((at, undone))
        self.effective.add(step, one)
        self.steps.append(one)
        if same_weights(event) and not float(event["logprob_diff_max"]) <= tolerance(self.run.get("settings") or {}):
            self.wrong_tokens += int(event.get("tokens") or 0)

    @property
    def kept(self) -> list[StepTime]:
        """The steps that count, by their number."""
        return [self.effective.of[step] for step in sorted(self.effective.of)]

    @property
    def happened(self) -> list[Event]:
        return sorted(filter(happened, self.faults), key=began)

    @property
    def times_of_faults(self) -> Times:
        return Times((began(fault), ended(fault)) for fault in self.happened)


def _bounded(value: Any) -> float | None:
    """A number with which others can be reckoned; None for what is none."""
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else None


def timeline(events: Iterable[Event]) -> Timeline:
    found = Timeline()
    for event in events:
        found.add(event)
    return found


def samples_per_s(steps: Sequence[StepTime]) -> float | None:
    """Samples a second from the begin of the first step to the end of the last one; None where there is no step."""
    if not steps:
        return None
    wall_s = max(s.ended_at for s in steps) - min(s.began_at for s in steps)
    return sum(s.samples for s in steps) / wall_s if wall_s > 0 else None


def throughput_kept(run: Timeline, baseline: Timeline) -> float | None:
    both = run.effective.of.keys() & baseline.effective.of.keys()
    mine, its = (samples_per_s([one for one in of.kept if one.step in both]) for of in (run, baseline))
    return mine / its if mine is not None and its else None


def effective_training_time_ratio(run: Timeline) -> float | None:
    steps, faults = run.kept, run.times_of_faults
    if not steps:
        return None
    usual = percentile([s.seconds for s in steps if not faults.meets(s.began_at, s.ended_at)], 0.5)
    useful = sum(min(s.seconds, usual) if usual is not None and faults.meets(s.began_at, s.ended_at) else s.seconds
                 for s in steps)
    wall_s = max(s.ended_at for s in steps) - min(s.began_at for s in run.steps)
    return min(1.0, useful / wall_s) if wall_s > 0 else None


def training_lost(run: Timeline) -> list[tuple[list[Event], float]]:
    """The seconds of training that were lost to faults: to one, or to several whose times meet. One that was not
    recovered from lasts to the end of the run. Nothing where no step was made without a fault."""
    at, times = sorted(s.ended_at for s in run.kept), run.times_of_faults
    quiet = [until - since for since, until in pairwise(at) if not times.meets(since, until)]
    if not quiet:
        return []
    over = max(at[-1], float((run.end or {}).get("at") or 0.0))
    meeting = list[tuple[float, float, list[Event]]]()
    for fault in run.happened:
        first = at[max(0, bisect_right(at, began(fault)) - 1)]
        after = bisect_left(at, ended(fault))
        last = at[after] if after < len(at) else over
        if meeting and first < meeting[-1][1]:
            begins, ends, faults = meeting.pop()
            meeting.append((begins, max(ends, last), [*faults, fault]))
        else:
            meeting.append((first, last, [fault]))
    # The mean, and not the median as above: among these are the steps after which the policy is evaluated.
    return [(faults, last - first - (bisect_right(at, last) - bisect_right(at, first)) * fmean(quiet))
            for first, last, faults in meeting]


def by_fault(run: Timeline, together: Iterable[tuple[Sequence[Event], float]]) -> list[FaultKind]:
    """A row for each kind of fault that was planned. ``together``: the training lost (``training_lost``)."""
    redone, alerts, happened = dict[int, int](), dict[int, int](), run.happened
    lost = {id(faults[0]): seconds for faults, seconds in together
            if len(faults) == 1 and faults[0].get("healed_at") is not None}
    for at, steps in run.redone:
        if before := bisect_right(happened, at, key=began):
            last = id(happened[before - 1])
            redone[last] = redone.get(last, 0) + steps
    for _, fault in attributed(run.alerts.values(), happened, sorted(s.ended_at for s in run.steps)).of:
        alerts[id(fault)] = alerts.get(id(fault), 0) + 1
    strikes = (run.run.get("schedule") or {}).get("strikes") or ()
    planned = [str(name) for strike in strikes for name in strike["faults"]]

    def seconds(faults: Sequence[Event], moment: str) -> Spread:
        return Spread.of([float(f[moment]) - began(f) for f in faults if f.get(moment) is not None])

    names = sorted({*planned, *(str(fault["name"]) for fault in run.faults)})
    return [FaultKind(name, planned.count(name), len(of), seconds(of, "detected_at"), seconds(of, "healed_at"),
                      Spread.of([lost[id(f)] for f in of if id(f) in lost]),
                      Spread.of([redone.get(id(f), 0) for f in of]), Spread.of([alerts.get(id(f), 0) for f in of]))
            for name in names for of in [[fault for fault in happened if fault["name"] == name]]]


def statistics(run: Timeline, baseline: Timeline | None = None) -> dict[str, Any]:
    """All numbers, as report.json has them. Times are in seconds; what could not be measured is None."""
    report = (run.end or {}).get("report") or {}
    happened, lost = run.happened, training_lost(run)
    kinds = by_fault(run, lost)
    struck = sum(map(victims, happened))
    return {
        "steps": len(run.effective.of), "steps_redone": run.effective.redone,
        "samples": sum(s.samples for s in run.kept), "samples_per_s": samples_per_s(run.kept),
        "baseline_samples_per_s": samples_per_s(baseline.kept) if baseline is not None else None,
        "throughput_kept": throughput_kept(run, baseline) if baseline is not None else None,
        "effective_training_time_ratio": effective_training_time_ratio(run),
        "training_lost_s": sum(seconds for _, seconds in lost) if lost or not happened else None,
        "wall_s": max((s.ended_at for s in run.steps), default=0.0) - min((s.began_at for s in run.steps), default=0.0),
        "faults_planned": sum(kind.planned for kind in kinds), "faults": len(happened),
        "faults_healed": sum(fault.get("healed_at") is not None for fault in happened),
        "parts_struck": struck, "alerts": len(run.alerts),
        "alerts_per_part_struck": len(run.alerts) / struck if struck else None,
        "wrong_version_tokens": run.wrong_tokens,
        "groups_lost": report.get("groups_lost"), "groups_duplicated": report.get("groups_duplicated"),
        "eval_accuracy_last": report.get("eval_accuracy_last"),
        "baseline_eval_accuracy_last": (((baseline.end or {}).get("report") or {}).get("eval_accuracy_last")
                                        if baseline is not None else None),
        "by_fault": [asdict(kind) for kind in kinds]}
