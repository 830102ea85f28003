"""What a kill is followed by, and the rows of many kills."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median

from elastic_rl.bench.measurement import Row
from elastic_rl.errors import DeadlineExceeded, EtcdUnavailable

Trial = Mapping[str, float]
"""Seconds from a kill until each of its milestones."""
SPARE_S = 3.0
"""Goal of a part that has to be started again: so long beyond its bare start."""
_POLL_S = 0.05


def follow(milestones: Mapping[str, Callable[[], object]], needed: Collection[str], *, timeout_s: float,
           now: Callable[[], float] = time.monotonic, pause: Callable[[float], None] = time.sleep) -> Trial:
    """Returns, once all the ``needed`` milestones hold, the seconds from this call until each of those that hold began
    to. One that stops holding counts from when it holds again: a part that is just ending may still look as if it
    worked. Raises DeadlineExceeded."""
    began, seen = now(), dict[str, float]()
    while True:
        for name, check in milestones.items():
            if holds(check):
                seen.setdefault(name, now() - began)
            else:
                seen.pop(name, None)
        if seen.keys() >= set(needed):
            return seen
        if now() - began > timeout_s:
            missing = ", ".join(name for name in needed if name not in seen)
            raise DeadlineExceeded(f"{timeout_s:g} s after a kill this did not hold: {missing}")
        pause(_POLL_S)


def holds(check: Callable[[], object]) -> bool:
    """Whether a milestone holds; an etcd that does not answer says nothing of it."""
    try:
        return bool(check())
    except EtcdUnavailable:
        return False


# -- arithmetic, pure -------------------------------------------------------------------------------------------------
def rows(row_id: str, what: str, trials: Sequence[Trial], ends: Collection[str], *, goal: float,
         stages: Collection[str] = (), bare: Sequence[float] = (), begin: str = "the kill") -> list[Row]:
    """The median and the maximum of the seconds until all of ``ends`` held, beside the medians of all milestones.
    ``bare``: seconds of bare starts of the part, whose median is taken off. A median that misses its goal says between
    which two of ``stages`` and ``ends`` most of the time passed, the first of which is called ``begin``."""
    start_s = median(bare) if bare else 0.0
    whole = [max(trial[end] for end in ends) for trial in trials]
    beyond = [seconds - start_s for seconds in whole]
    name = f"{what} → {' and '.join(ends)}" + (", without the part's bare start" if bare else "")
    others = {**({"with it": median(whole), "bare start": start_s} if bare else {}), **medians(trials)}
    row = Row.of(row_id, name, beyond, "s", goal=goal, alternatives=others if len(others) > 1 else {})
    if row.met is False and (bound := longest(trials, ends, stages, begin)):
        row = row.model_copy(update={"name": f"{name}; longest: {bound}"})
    most = Row.unmeasured(f"{row_id}-max", "… at most", "no sample was taken", unit="s", goal=goal) if not beyond else \
        Row(id=f"{row_id}-max", name=f"… at most, of {len(beyond)}", value=max(beyond), unit="s", goal=goal,
            samples=len(beyond))
    return [row, most]


def unmeasured(row_id: str, what: str, why: str, *, goal: float) -> list[Row]:
    """The two rows of kills that could not be measured."""
    return [Row.unmeasured(f"{row_id}{end}", name, why, unit="s", goal=goal)
            for end, name in (("", what), ("-max", "… at most"))]


def medians(trials: Sequence[Trial]) -> dict[str, float]:
    """The median of each milestone that every trial has, the earliest first."""
    common = set.intersection(*(set(trial) for trial in trials)) if trials else set()
    found = {name: median(trial[name] for trial in trials) for name in common}
    return dict(sorted(found.items(), key=lambda item: (item[1], item[0])))


def longest(trials: Sequence[Trial], ends: Collection[str], stages: Collection[str], begin: str = "the kill") -> str:
    """Between which two milestones on the way to the end most of the time passed, in words; empty where there is only
    one."""
    times = {name: at for name, at in medians(trials).items() if name in (*ends, *stages)}
    last = max((times[end] for end in ends if end in times), default=0.0)
    way = [(begin, 0.0), *((name, at) for name, at in times.items() if at <= last)]
    gaps = [(at - since, before, name) for (before, since), (name, at) in pairwise(way)]
    if len(gaps) < 2:
        return ""
    gap, before, name = max(gaps)
    return f"{gap:.1f} of {last:.1f} s from “{before}” to “{name}”"
