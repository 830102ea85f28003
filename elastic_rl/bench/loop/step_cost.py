"""cpu-a-step, etcd-a-step: what a step of a small job costs beside its computing, by process and by key of etcd; and
how long it waits for the engines to serve its policy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

import psutil

from elastic_rl.bench.loop import job
from elastic_rl.bench.loop.steps import timed_steps
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.etcd.keys import ROOT
from elastic_rl.etcd.watch import Watch
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import OWNER_ENV, marked
from elastic_rl.report.build import Record, read_records

_GOAL_CPU_S, _GOAL_TXNS, _GOAL_SYNC_S = 0.3, 12.0, 0.08
_STEPS, _QUICK_STEPS = 40, 12
"""Steps that are measured."""
_LAST_STEPS = 2
"""Steps after them, so that the run has not begun to end."""
_DRAIN_S = 10.0
"""Longest wait for the last change of a watch."""
_RANK = "rank"
_COMPUTING = (_RANK, "sglang::")
"""Beginnings of the kinds of process that compute: the trainer's ranks, and SGLang's schedulers."""

_ON_THE_WAY = re.compile(r".*/python[\d.]*$|python[\d.]*$|-")
"""Words of a command line before the program that matters: the interpreter, and its options."""


@dataclass
class Span:
    """What the measured steps took; it is complete once ``steps`` is not 0."""

    steps: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds, of user and system, by kind of process."""
    transactions: int = 0
    writes: Counter[str] = field(default_factory=Counter)
    """Keys written and deleted, by kind of key."""


class _Observation(Fault):
    """An observation has the form of a fault, so that the injector makes it at a step of a run that works."""

    def __init__(self, context: FaultContext) -> None:
        self.context = context

    def detected(self) -> bool:
        return True

    def healed(self) -> bool:
        return True


class _Begin(_Observation):
    """The observation before the measured steps: where the processes and etcd are."""

    name = "step_cost_begins"

    def __init__(self, context: FaultContext) -> None:
        super().__init__(context)
        self.step = 0
        self.cpu_s: dict[tuple[int, float], float] = {}
        self.revision = 0
        self.watch: Watch | None = None

    def inject(self) -> tuple[str, str]:
        self.revision = self.context.etcd.revision()
        self.watch = self.context.etcd.watch(f"{ROOT}/", start_revision=self.revision + 1)
        self.step, self.cpu_s = self.context.step(), {who: used for who, (_, used) in _used(self.context).items()}
        return "", f"measured from step {self.step} on"


class _End(_Observation):
    """The observation after the measured steps, which fills the span from what ``begin`` noted."""

    name = "step_cost_ends"

    def __init__(self, context: FaultContext, begin: _Begin, span: Span) -> None:
        super().__init__(context)
        self._begin, self._span = begin, span

    def inject(self) -> tuple[str, str]:
        watch = self._begin.watch
        if watch is None:
            return "", "the beginning was not noted"
        try:
            step, used, revision = self.context.step(), _used(self.context), self.context.etcd.revision()
            for who, (kind, cpu_s) in used.items():
                self._span.cpu_s[kind] = self._span.cpu_s.get(kind, 0.0) + cpu_s - self._begin.cpu_s.get(who, 0.0)
            job_name = self.context.cfg.job
            while (event := watch.get(_DRAIN_S)) is not None and event.kv.mod_revision <= revision:
                self._span.writes[kind_of_key(event.kv.key, job_name)] += 1
        finally:
            watch.close()
        self._span.transactions, self._span.steps = revision - self._begin.revision, step - self._begin.step
        return "", f"measured to step {step}"


def _used(context: FaultContext) -> dict[tuple[int, float], tuple[str, float]]:
    """Kind, and CPU seconds so far, of each process of the cluster and the run, by pid and time of its start."""
    found: dict[tuple[int, float], tuple[str, float]] = {}
    ranks = {rank.pid for rank in context.trainer_ranks()}  # forked from a process that has another command line
    for process in [*context.processes(), *marked(str(ClusterPaths.of(context.cfg).folder), OWNER_ENV)]:
        try:
            times = process.cpu_times()
            found[process.pid, process.create_time()] = (
                _RANK if process.pid in ranks else kind_of_process(process.cmdline()), times.user + times.system)
        except psutil.Error:  # it has ended
            continue
    return found


def kind_of_process(cmdline: Sequence[str]) -> str:
    """What people call a process of this command line: its own title (``ServeReplica Actor``, ``sglang::scheduler``),
    the module of this package that it runs, or its program, without what only says which of several it is. Pure.
    """
    words = " ".join(cmdline).split()
    if not words:
        return "ended"
    if words[0].startswith("ray::"):  # ray::ServeReplica:the job:actor, ray::ComponentActor.wait
        return " ".join(words[0].removeprefix("ray::").split(":")[:3:2])
    if "::" in words[0]:
        return words[0].split("_")[0].lower()
    for option, at in (("-m", 1), ("-c", 2)):  # python -m MODULE; python -c from MODULE import …
        if option in words[:-at]:
            return words[words.index(option) + at].removeprefix("elastic_rl.")
    return next((PurePath(word).name for word in words if not _ON_THE_WAY.match(word)), words[0])


def kind_of_key(key: str, job_name: str) -> str:
    """The part of a key that says what it is of, without which one: ``members/engine``, ``_tokens``. Pure."""
    parts = key.removeprefix(f"{ROOT}/").split("/")
    if parts[0] == job_name:
        return "/".join(parts[1:3] if parts[1:2] in (["members"], ["registry"], ["streams"]) else parts[1:2])
    return parts[0] if parts[0] == "_tokens" else f"cluster: {'/'.join(parts[2:3])}"


def plan_of(span: Span, steps: int) -> job.FaultPlan:
    """A plan of the injector that measures so many steps."""
    def make(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
        begin = _Begin(context)
        return [(job.WARM_STEPS, [begin]), (job.WARM_STEPS + steps, [_End(context, begin, span)])]

    return make


def measure(testbed: Testbed) -> Iterator[Row]:
    steps = _QUICK_STEPS if testbed.options.quick else _STEPS
    span, folder = Span(), testbed.folder / "step-cost"
    folder.mkdir()
    cfg = job.configure_short_steps(folder, testbed.options, job.WARM_STEPS + steps + _LAST_STEPS)
    job.run(cfg, plan=plan_of(span, steps))
    if not span.steps:
        raise Unmeasurable("the run ended before its steps were measured")
    yield from rows(span, read_records(JobPaths.of(cfg).steps))


def rows(span: Span, records: Sequence[Record]) -> list[Row]:
    """The rows of the measured steps; ``records`` are those of the run. Pure."""
    cpu = {kind: seconds / span.steps for kind, seconds in sorted(span.cpu_s.items(), key=lambda item: -item[1])}
    beside = {kind: seconds for kind, seconds in cpu.items() if not kind.startswith(_COMPUTING)}
    return [
        Row(id="cpu-a-step", name="CPU seconds of a step beside those of ranks and of SGLang's schedulers; beside "
            "it each kind of process", value=sum(beside.values()), unit="s", goal=_GOAL_CPU_S, samples=span.steps,
            alternatives=_shown(cpu)),
        Row(id="etcd-a-step", name="transactions of etcd a step; beside it the keys that they write, by kind",
            value=span.transactions / span.steps, goal=_GOAL_TXNS, samples=span.steps,
            alternatives=_shown({kind: n / span.steps for kind, n in span.writes.most_common()})),
        Row.of("sync-small", "of a step: until the engines serve the policy of the one before",
               [step["seconds"]["sync"] for step in timed_steps(records)[job.WARM_STEPS:]
                if "sync" in step["seconds"]], "s", goal=_GOAL_SYNC_S)]


def _shown(values: Mapping[str, float]) -> dict[str, float]:
    """The values that are not next to nothing."""
    return {kind: value for kind, value in values.items() if value >= 0.005}
