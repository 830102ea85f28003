"""Checkers of what a job has trained: its steps, its samples, and the report that it has written."""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.attribution import began, ended, happened
from chaos_tests.validate.replay import Transaction, below
from chaos_tests.validate.times import Times
from chaos_tests.validate.verdict import OWN_TARGETS, RUN, TEST_HOSTS, Checker
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState

LOGPROB_DIFF = 1e-4
"""Most by which an engine's log-probs may differ from the trainer's where both have the same weights, in float32."""
_OF_OTHER_DTYPES = 0.5
"""The same in other dtypes, in which engine and trainer round at other places."""
_WEIGHTS = "weights"
_SAME_VALUES = ("groups", "samples", "tokens", "reward_mean", "truncated", "response_tokens", "loss", "grad_norm", "lr",
                "kl", "clip_fraction", "reward_parts", "algorithm", "dropped_groups")
"""What a step's record says of what was trained, and not of how long it took."""
COMPARED_SHARE = 0.8
"""Least share of the steps that have to be compared, where no more are missing than there were faults: what a step has
measured is lost with the loop that did it."""
_VERSIONS = below(Keys("j").versions_prefix("policy"))
_NO_STEPS = "the log has no steps of a job"


def tolerance(settings: Mapping[str, Any]) -> float:
    """Most by which log-probs may differ, by the settings of a job."""
    told = (settings.get("train") or {}).get("logprob_tolerance")
    dtype = (settings.get("device") or {}).get("dtype", "float32")
    return float(told) if told is not None else LOGPROB_DIFF if dtype == "float32" else _OF_OTHER_DTYPES


def same_weights(step: Event) -> bool:
    """Whether a step compares the log-probs of engines and trainer of the same weights. Of a step that was committed
    when its loop ended, the next loop does not know what the trainer had measured."""
    return step.get("staleness") == 0 and step.get("logprob_diff_max") is not None


def may_be_lost(steps: int, faults: int) -> float:
    """Of so many steps, how many may lack what they have measured."""
    return max((1.0 - COMPARED_SHARE) * steps, faults)


class Effective:
    """Keeps for each step the record of when it was done last. A step that is done again undoes those after it."""

    def __init__(self) -> None:
        self.of = dict[int, Any]()
        self.done = self.last = 0

    def add(self, step: int, kept: Any) -> None:
        self.undo(step)
        self.done += 1
        self.of[step], self.last = kept, step

    def undo(self, step: int) -> int:
        """Forgets the steps from this one on, which are done again; how many there were."""
        undone = [done for done in self.of if done >= step] if step <= self.last else []
        for done in undone:
            del self.of[done]
        return len(undone)

    @property
    def redone(self) -> int:
        return self.done - len(self.of)


class StepChecker(Checker):
    reads: ClassVar[frozenset[Kind]] = frozenset({Kind.STEP})
    lacks: ClassVar[str] = _NO_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def see(self, event: Event) -> None:
        self.steps += 1
        self.step(event)

    def step(self, record: Event) -> None:
        """The record of a step."""

    @property
    def report(self) -> Mapping[str, Any]:
        """The job's report; {} where there is none."""
        found = self.end.get("report") if self.end is not None else None
        return found if isinstance(found, Mapping) else {}

    def evidence(self) -> str:
        return f"{self.steps} steps" if self.steps else ""


def proof(step: Event, *names: str) -> Event:
    """A step's record with only what proves something: whole ones are long."""
    return {name: step[name] for name in ("at", "kind", "step", *names) if name in step}


# -- I4 ----------------------------------------------------------------------------------------------------------------
class TrueWeights(StepChecker):
    """What the engines computed is what the weights of that version compute."""

    rule = "I4"
    lacks = "no step compares the log-probs of engines with those of the trainer"

    def __init__(self) -> None:
        super().__init__()
        self._compared, self._most = 0, 0.0

    def step(self, record: Event) -> None:
        if not same_weights(record):
            return
        self._compared += 1
        difference = float(record["logprob_diff_max"])
        self._most = max(self._most, difference)
        if not difference <= tolerance(self.settings):
            self.violated(f"step {record['step']}: samples have log-probs that differ by {difference:g} from those of "
                          "the weights that they name", proof(record, "logprob_diff_max", "sample_versions"))

    def evidence(self) -> str:
        return (f"log-probs of {self._compared} of {self.steps} steps compared, which differ by {self._most:.2g} at "
                "most" if self._compared else "")


class NamedVersions(Checker):
    """Samples name versions of the policy that were committed, and no older one than those of before in one engine."""

    rule = "I4"
    reads: ClassVar[frozenset[Kind]] = frozenset({Kind.STEP})
    keys = (_VERSIONS,)
    lacks = "the log has no steps with the versions of their samples, or no changes of etcd"

    def __init__(self) -> None:
        super().__init__()
        self._committed, self._newest, self._named = IntervalSet(), 0, 0
        self._unknown = dict[int, Event]()
        self._unseen = list[tuple[int, float]]()
        """Between which versions there may be others that were committed in a gap."""

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if not change.name.startswith(_VERSIONS) or change.new.get("state") != VersionState.COMMITTED:
                continue
            number = int(change.new["number"])
            if self._unseen and self._unseen[-1][1] == math.inf:
                self._unseen[-1] = (self._unseen[-1][0], number)
            if number not in self._committed:
                self._committed |= IntervalSet(((number, number + 1),))
            self._newest = max(self._newest, number)
            self._unknown.pop(number, None)

    def gap(self, first: int, last: int) -> None:
        self._unseen.append((self._newest, math.inf))

    def see(self, event: Event) -> None:
        for number in event.get("sample_versions") or ():
            self._named += 1
            if number not in self._committed:  # the observer may be behind
                self._unknown.setdefault(int(number), proof(event, "sample_versions"))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        oldest = self._committed.spans[0][0] if self._committed else 0
        for number, record in self._unknown.items():
            if oldest and number > oldest and not any(  # of older ones the log may have no record
                    low < number < high for low, high in self._unseen):
                self.violated(f"step {record['step']} has samples of version {number}, which was not committed", record)

    def evidence(self) -> str:
        return f"{self._named} versions of samples named, {len(self._committed)} committed" if (
            self._named and self._committed) else ""


@dataclass(frozen=True)
class _Trained:
    """The prompt groups of a step, in stretches, and how many were dropped with it."""

    groups: tuple[tuple[int, int], ...]
    dropped: int


# -- I5 ----------------------------------------------------------------------------------------------------------------
class TrainedOnce(StepChecker):
    rule = "I5"

    def __init__(self) -> None:
        super().__init__()
        self._effective = Effective()

    def step(self, record: Event) -> None:
        bound, staleness = int((self.settings.get("train") or {}).get("max_staleness") or 0), record.get("staleness")
        if staleness is not None and staleness > bound:
            self.violated(f"step {record['step']} has a staleness of {staleness}, above {bound}",
                          proof(record, "staleness", "sample_versions"))
        self._whole(record)
        self._effective.add(int(record["step"]), _Trained(
            tuple(_runs(sorted(record.get("groups") or ()))), int(record.get("dropped_groups") or 0)))

    @property
    def _alternates(self) -> bool:
        """Whether generation and training do."""
        return (self.settings.get("train") or {}).get("schedule", "sync") == "sync"

    def _whole(self, record: Event) -> None:
        """A step trains on samples, and where generation and training alternate on as many groups as its settings say,
        but for those that were dropped."""
        groups, dropped = len(record.get("groups") or ()), int(record.get("dropped_groups") or 0)
        wanted = (self.settings.get("train") or {}).get("prompts_per_step")
        if groups and not record.get("samples", 1):
            self.violated(f"step {record['step']} has no samples", proof(record, "samples", "groups"))
        elif self._alternates and isinstance(wanted, int) and not wanted - dropped <= groups <= wanted:
            self.violated(f"step {record['step']} has {groups} prompt groups of {wanted}, and {dropped} were dropped",
                          proof(record, "groups", "dropped_groups"))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for name in ("groups_lost", "groups_duplicated"):
            if self.report.get(name):
                self.violated(f"{name} is {self.report[name]}")
        for problem in self.report.get("audit_problems") or ():
            self.violated(str(problem))
        runs = sorted((first, last, step) for step, of in self._effective.of.items() for first, last in of.groups)
        reached, by, again = -1, 0, False
        for first, last, step in runs:
            if first <= reached:
                again = True
                self.violated(f"prompt group {first} was trained on in step {by} and in step {step}")
            if last > reached:
                reached, by = last, step
        if runs and not again and self._alternates:
            self._none_left_out(runs)

    def _none_left_out(self, runs: Sequence[tuple[int, int, int]]) -> None:
        """Where generation and training alternate, groups are trained in their order, and what is dropped is on the
        record of a step."""
        from_begin = min(self._effective.of) == 1
        reached, holes, step = -1 if from_begin else runs[0][0] - 1, list[int](), 0
        for first, last, of in runs:
            if first > reached + 1:
                holes.append(first - reached - 1)
                step = step or of
            reached = max(reached, last)
        dropped = sum(trained.dropped for trained in self._effective.of.values())
        if sum(holes) > dropped:
            self.violated(f"{sum(holes)} prompt groups were not trained on, and {dropped} were dropped on the record; "
                          f"the first of them are missing before step {step}")

    def evidence(self) -> str:
        if not self.steps:
            return ""
        groups = sum(last - first + 1 for of in self._effective.of.values() for first, last in of.groups)
        return (f"{groups} prompt groups of {self.steps} steps, {self._effective.redone} of them done again"
                + ("; the audit of the ledger" if "groups_lost" in self.report else ""))


def _runs(ordinals: list[int]) -> Iterator[tuple[int, int]]:
    """Stretches of ordinals that follow one another, as (first, last). One that is there twice is in two stretches."""
    first = last = None
    for ordinal in ordinals:
        if last is None or first is None:
            first = ordinal
        elif ordinal != last + 1:
            yield first, last
            first = ordinal
        last = ordinal
    if first is not None and last is not None:
        yield first, last


# -- I3, I11: the whole run --------------------------------------------------------------------------------------------
class CommittedVersions(StepChecker):
    """A version for each step, beside the one that the job begins with."""

    rule = "I3"
    lacks = "the log has no report of a job that has trained"

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        committed, steps = self.report.get("versions_committed"), wanted_steps(self.run, self.report)
        if steps and committed is not None and committed <= steps:
            self.violated(f"{committed} versions of {steps} steps were committed")

    def evidence(self) -> str:
        if not self.report.get("steps") or self.report.get("versions_committed") is None:
            return ""
        return f"{self.report['versions_committed']} versions committed in {self.report['steps']} steps"


def wanted_steps(run: Event, report: Mapping[str, Any]) -> int:
    """Steps that a run was to make: those of its schedule; of one by time as many as it has made."""
    schedule = run.get("schedule") or {}
    return int(report.get("steps") or 0) if schedule.get("minutes") else int(schedule.get("steps") or 0)


class WholeRun(StepChecker):
    """The job has made all its steps, and etcd has each of them once, but for old ones that the leader thins out. A job
    of somebody else goes on while it is read, so that etcd, which is read last, may have more of it."""

    rule = "I11"
    lacks = "the log has no report of a job that has trained"

    def __init__(self) -> None:
        super().__init__()
        self._done = set[int]()

    def step(self, record: Event) -> None:
        self._done.add(int(record["step"]))
        for name in ("loss", "grad_norm"):
            if isinstance(value := record.get(name), float) and not math.isfinite(value):
                self.violated(f"step {record['step']} has a {name} of {value}", proof(record, name), rule=RUN)

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        if end is None or end.get("aborted"):
            return
        own = self.run.get("target") in OWN_TARGETS
        if end.get("phase") == "failed":
            self.violated("the job has failed", end)
            return
        if "steps" not in self.report:
            if own:
                self.violated("the run has left no report", end)
            return
        wanted, made = wanted_steps(self.run, self.report), self.report["steps"]
        committed = end.get("committed_steps")
        if own and made != wanted:
            self.violated(f"the run ended after {made} of {wanted} steps", end)
        elif committed is not None and (wrong := self._wrong(list(committed), made, goes_on=not own)):
            self.violated(f"of {made} steps etcd has {len(committed)}, and {wrong}", end)
        elif own and (first := next((step for step in range(1, wanted + 1) if step not in self._done), 0)):
            self.violated(f"the log has no record of {wanted - len(self._done)} steps, the first of them step {first}",
                          rule=RUN)

    def _wrong(self, committed: list[int], made: int, *, goes_on: bool) -> str:
        """What is wrong with the steps of which etcd has the metrics; "" where nothing is."""
        last = committed[-1] if committed else 0
        if last < made or (last > made and not goes_on):
            return f"the last of them is step {last}"
        if twice := next((a for a, b in pairwise(committed) if a >= b), 0):
            return f"step {twice} is not followed by a later one"
        most = int((self.settings.get("coordinator") or {}).get("max_step_metrics") or last)
        first = 1 if last <= most else last - most // 2 + 1  # of a longer run the newest half of so many are whole
        whole = set(committed)
        if missing := next((step for step in range(first, last) if step not in whole), 0):
            return f"step {missing} is missing"
        return ""

    def evidence(self) -> str:
        return f"{self.report['steps']} steps, phase {(self.end or {}).get('phase')}" if "steps" in self.report else ""


# -- I7 ----------------------------------------------------------------------------------------------------------------
class SameAsBaseline(Checker):
    """What was trained in each step, and the weights after it, against the run without faults. It has evidence only
    where all that the baseline has of its steps was compared, but for what was lost with a loop."""

    rule = "I7"
    reads: ClassVar[frozenset[Kind]] = frozenset({Kind.STEP, Kind.FAULT})
    keys = (_VERSIONS,)
    lacks = "it needs a baseline, with all values and weights of the same steps, and deterministic: true in both runs"

    def __init__(self) -> None:
        super().__init__()
        self._values, self._weights = Effective(), dict[int, tuple[str, float]]()
        """Weights: step → the manifest of its version, and when that was committed."""
        self._faults, self._after_faults = list[Event](), 0
        """``_after_faults``: after how many of them weights were compared before the next fault."""
        self._of, self._compared = Counter[str](), Counter[str]()
        """How many steps of the baseline that both runs have done have a value, and in how many it was compared."""

    @property
    def _deterministic(self) -> bool:
        """Whether its steps say something: the stand-in of a job on test hosts computes nothing, and makes equal ones
        whatever happens."""
        return bool(self.settings.get("deterministic")) and self.run.get("target") != TEST_HOSTS

    def see(self, event: Event) -> None:
        if event["kind"] == Kind.FAULT:
            self._faults.append(event)
        elif self._deterministic:
            self._values.add(int(event["step"]), {
                name: hash(json.dumps(event[name], sort_keys=True)) for name in _SAME_VALUES
                if event.get(name) not in (None, {})})

    def transaction(self, found: Transaction) -> None:
        for change in found.changes if self._deterministic else ():
            if change.name.startswith(_VERSIONS) and change.new.get("state") == VersionState.COMMITTED:
                self._weights[int((change.new.get("meta") or {}).get("step", -1))] = (
                    str(change.new.get("manifest")), found.at)

    def against(self, baseline: SameAsBaseline) -> None:
        if not (self._deterministic and baseline._deterministic):
            return
        for step in sorted(self._values.of.keys() & baseline._values.of.keys()):
            mine, its = self._values.of[step], baseline._values.of[step]
            self._of.update([*its, *([_WEIGHTS] if step in baseline._weights else ())])
            self._compared.update([*mine.keys() & its.keys(), *(
                [_WEIGHTS] if step in baseline._weights.keys() & self._weights.keys() else ())])
            if differs := sorted(name for name in mine.keys() & its.keys() if mine[name] != its[name]):
                self.violated(f"step {step} differs from that of the baseline in {', '.join(differs)}")
        both = sorted(self._weights.keys() & baseline._weights.keys())
        for step in both:
            mine, its = self._weights[step][0], baseline._weights[step][0]
            if mine != its:
                self.violated(f"the weights after step {step} are not those of the baseline: manifests {mine} and "
                              f"{its}")
        struck = [*filter(happened, self._faults)]
        times = Times((began(fault), ended(fault)) for fault in struck)
        compared_at = sorted(at for step in both if not times.has(at := self._weights[step][1]))
        begins = sorted(map(began, struck))
        for fault in struck:
            following = bisect_right(begins, ended(fault))
            until = begins[following] if following < len(begins) else math.inf
            self._after_faults += bisect_left(compared_at, until) > bisect_right(compared_at, ended(fault))

    def evidence(self) -> str:
        for name in {*self._of, _WEIGHTS}:
            of, compared = self._of[name], self._compared[name]
            if not compared or of - compared > may_be_lost(of, len(self._faults)):
                return ""
        struck = sum(map(happened, self._faults))
        after = f", and after {self._after_faults} of {struck} faults before the next one" if struck else ""
        return (f"{max(self._compared.values())} steps compared with the baseline, and the weights after "
                f"{self._compared[_WEIGHTS]} of them{after}")


CHECKERS: tuple[type[Checker], ...] = (
    TrueWeights, NamedVersions, TrainedOnce, CommittedVersions, WholeRun, SameAsBaseline)
