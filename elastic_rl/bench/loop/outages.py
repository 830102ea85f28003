"""outage-*: how soon the next step is done after a part was away. One run of short steps, with the product's own fault
injection: one outage after the other, each injected as a step begins and after the recovery from the one before."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from elastic_rl.bench.loop import job
from elastic_rl.bench.loop.bare_engines import started
from elastic_rl.bench.loop.steps import intervals, is_timed
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.faults.context import INJECT_TIMEOUT_S, Fault, FaultContext, WrappedFault
from elastic_rl.faults.injector import FaultPlan
from elastic_rl.faults.outages import (
    ActorKilled,
    AllEnginesKilled,
    DcsNodeKilled,
    EtcdStopped,
    RouterKilled,
    TrainerStopped,
)
from elastic_rl.host import inherited_model
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import Record, read_records
from elastic_rl.runtime.waiting import wait_until

ETCD_AWAY_S = 20.0
"""Time that etcd is away: longer than every lease."""
_WARM_STEPS = 6
_APART_STEPS = 2
"""Steps that end between the recovery from an outage and the next one, so that at least one of them is undisturbed."""
_STEPS_EACH = 8
"""Steps that an outage may take from its turn until the next one's."""
_ENGINES_GOAL_S = 3.0


@dataclass(frozen=True)
class _Kind:
    """An outage. ``what``: in words, with its end."""

    make: Callable[[FaultContext], Fault]
    what: str
    goal: float | None = None


KINDS: Mapping[str, _Kind] = {
    "etcd": _Kind(lambda c: EtcdStopped(c, ETCD_AWAY_S), f"etcd stopped for {ETCD_AWAY_S:g} s, continued", 5.0),
    "router": _Kind(RouterKilled, "kill -9 of the router", 5.0),
    "engines": _Kind(AllEnginesKilled, "kill -9 of all engines"),
    "dcs": _Kind(DcsNodeKilled, "kill -9 of the only DCS node"),
    "actor": _Kind(ActorKilled, "kill -9 of the actor as a step is trained"),
    "trainer": _Kind(TrainerStopped, "SIGSTOP of the trainer's agent and ranks"),
}


@dataclass
class Outage:
    """When an outage happened, in unix seconds; None: it has not come so far."""

    step: int = 0
    """The newest step as it began."""
    began: float | None = None
    ended: float | None = None
    healed: float | None = None
    """When the injector saw that the run had recovered and all engines were there."""


class TimedOutage(WrappedFault):
    """An outage that begins with a step, and notes when it was over."""

    def __init__(self, fault: Fault, context: FaultContext, noted: Outage, now: Callable[[], float] = time.time
                 ) -> None:
        """``noted``: where the times are noted."""
        super().__init__(fault)
        self._context, self._noted, self._now = context, noted, now

    def inject(self) -> tuple[str, str]:
        first = self._context.step() + _APART_STEPS
        wait_until(lambda: self._context.step() >= first, timeout_s=INJECT_TIMEOUT_S, what="a step", poll_s=0.01)
        self._noted.step, self._noted.began = self._context.step(), self._now()
        found = super().inject()
        self._noted.ended = self._now()
        return found

    def healed(self) -> bool:
        """Whether the engines are all there too, so that the next outage begins as this one did."""
        if not super().healed() or len(self._context.ready()) < self._context.cfg.rollout.engines:
            return False
        self._noted.healed = self._now()
        return True


def plan_of(outages: Mapping[str, Sequence[Outage]]) -> FaultPlan:
    """A plan of the injector: the first outage of each kind, then the second ones, and so on. It notes into them."""
    def make(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
        return [(_WARM_STEPS, [TimedOutage(KINDS[kind].make(context), context, noted)])
                for trial in zip(*outages.values(), strict=True) for kind, noted in zip(outages, trial, strict=True)]

    return make


def measure(testbed: Testbed) -> Iterator[Row]:
    options = testbed.options
    kinds = [kind for kind in KINDS if options.selects(f"outage-{kind}") or (
        kind == "engines" and options.selects("outage-engines-s"))]
    trials = 1 if options.quick else 3
    outages: dict[str, list[Outage]] = {kind: [Outage() for _ in range(trials)] for kind in kinds}
    folder = testbed.folder / "outages"
    folder.mkdir()
    cfg = job.configure_short_steps(folder, options, _WARM_STEPS + _STEPS_EACH * trials * len(kinds))

    def measured() -> list[Row]:
        return rows(read_records(JobPaths.of(cfg).steps), outages)

    try:
        job.run(cfg, plan=plan_of(outages))
    except BaseException:
        yield from measured()
        raise
    yield from measured()
    if "engines" in kinds:
        with started(cfg, inherited_model.began_with(cfg), folder) as (_, seconds):
            start_s = median(seconds)
        yield from engine_rows(read_records(JobPaths.of(cfg).steps), outages, start_s)


def rows(records: Sequence[Record], outages: Mapping[str, Sequence[Outage]]) -> list[Row]:
    """Rows of all outages but that of the engines. Pure."""
    return [_row(f"outage-{kind}", f"{KINDS[kind].what} → the next step is done", records, outages, kind,
                 KINDS[kind].goal) for kind in outages if kind != "engines"]


def engine_rows(records: Sequence[Record], outages: Mapping[str, Sequence[Outage]], start_s: float) -> list[Row]:
    """``start_s``: seconds of a bare engine's start. Pure."""
    what = KINDS["engines"].what
    seconds = _row("outage-engines-s", f"{what} → the next step is done", records, outages, "engines", None)
    name = f"{what} → the next step is done, without the start of a bare engine"
    if seconds.why:
        return [Row.unmeasured("outage-engines", name, seconds.why, unit="s", goal=_ENGINES_GOAL_S), seconds]
    times = seconds_until(records, outages["engines"], 1)
    return [Row.of("outage-engines", name, [t - start_s for t in times], "s", goal=_ENGINES_GOAL_S),
            seconds.model_copy(update={"alternatives": {"start of a bare engine": start_s, **seconds.alternatives}})]


def _row(row_id: str, name: str, records: Sequence[Record], outages: Mapping[str, Sequence[Outage]], kind: str,
         goal: float | None) -> Row:
    begun = [outage for outage in outages[kind] if outage.began is not None]
    times = seconds_until(records, begun, 1)
    if not begun or len(times) < len(begun):
        why = f"after {len(begun) - len(times)} of {len(begun)} outages the run did no further step" if begun else \
            "the run ended before such an outage"
        return Row.unmeasured(row_id, name, why, unit="s", goal=goal)
    every = [outage for of_kind in outages.values() for outage in of_kind]
    others = {"the step after that one": seconds_until(records, begun, 2),
              "an undisturbed step": undisturbed(records, every)}
    return Row.of(row_id, name, times, "s", goal=goal,
                  alternatives={other: median(values) for other, values in others.items() if values})


def seconds_until(records: Sequence[Record], outages: Sequence[Outage], ahead: int) -> list[float]:
    """Seconds from the end of each outage until the run has done ``ahead`` steps that it had not done before. Steps
    that a recovery repeats do not count, nor those that a dead actor had finished and its successor recorded. Outages
    without such a step are left out. Pure."""
    found = []
    for outage in outages:
        if outage.ended is None:
            continue
        newest, new = outage.step, []
        for record in records:
            if record["kind"] == "step" and record["step"] > newest:
                newest = record["step"]
                if record["at"] > outage.ended and is_timed(record):
                    new.append(record["at"] - outage.ended)
        found += new[ahead - 1:ahead]
    return found


def undisturbed(records: Sequence[Record], outages: Sequence[Outage]) -> list[float]:
    """Seconds of the steps that no outage touched, from its beginning until the run had recovered from it. Pure."""
    spans = [(o.began, o.healed if o.healed is not None else math.inf) for o in outages if o.began is not None]
    return [seconds for record, seconds in intervals(records)
            if not any(record["at"] > began and record["at"] - seconds < healed for began, healed in spans)]
