"""Schedules of faults: which ones happen when in a run, by its steps or by time. Pure.

A schedule follows from its seed, but it is the file that reproduces a run: another release may draw other faults.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

FORM = 2
"""Form of the file. One of another form is refused."""
_MOST = 1 << 128
"""Numbers of a schedule are below it; a seed may be long."""
_MOST_STEPS, _MOST_MINUTES, _MOST_FAULTS = 10_000_000, 60_000.0, 10_000
"""As long as ``chaos run`` lets a run be, and as many faults as it lets it have."""


@dataclass(frozen=True)
class Strike:
    """Faults that happen at once. Names are those of the catalogue."""

    step: int
    """The step after which the faults happen; 0 in a schedule by time."""
    faults: tuple[str, ...]
    second: float = 0.0
    """Seconds from the first step to the faults; 0 in a schedule by steps."""


@dataclass(frozen=True)
class Schedule:
    """What reproduces a run: its scenario, seed and length, and which faults happen when. The last strike comes early
    enough that the run has recovered when its final state is read."""

    seed: int
    """The seed from which the faults are drawn, and that of the job."""
    steps: int
    """Steps that the job does; 0 in a schedule by time, in which it does as many as it can."""
    strikes: tuple[Strike, ...]
    minutes: float = 0.0
    """Minutes that a run by time lasts from its first step; 0 in a schedule by steps."""
    scenario: str = ""
    settings: tuple[str, ...] = ()
    """Settings of the job beside those of its scenario, each as ``--key.sub=value``."""
    baseline: bool | None = None
    """Whether the job runs without faults first; None: as its scenario has it."""

    @property
    def faults(self) -> int:
        return sum(len(strike.faults) for strike in self.strikes)

    @property
    def by_time(self) -> bool:
        return self.minutes > 0

    @property
    def fault_free_steps(self) -> int:
        """Most steps in a row without a strike; 0 in a run by time."""
        at = [0, *(strike.step for strike in self.strikes), self.steps]
        return 0 if self.by_time else max(after - before for before, after in pairwise(at))

    def to_json(self) -> str:
        return json.dumps({"form": FORM, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, catalogue: Collection[str]) -> Schedule:
        """Raises ValueError for what is no schedule of this form, or names faults that are not in the catalogue."""
        try:
            read = json.loads(text, object_pairs_hook=_once)
        except RecursionError as e:
            raise ValueError("it is nested too deeply") from e
        if not isinstance(read, dict) or read.get("form") != FORM:
            raise ValueError(f"this is no schedule of form {FORM}")
        try:
            if type(read["strikes"]) is not list or not all(type(strike) is dict for strike in read["strikes"]):
                raise TypeError("strikes are no list of objects")
            strikes = tuple(Strike(_whole(s["step"]), _words(s["faults"]), _number(s["second"]))
                            for s in read["strikes"])
            known = {"form", *(field.name for field in fields(cls))}, {field.name for field in fields(Strike)}
            if unknown := {*read} - known[0] | {name for strike in read["strikes"] for name in strike} - known[1]:
                raise TypeError(f"unknown fields: {', '.join(sorted(unknown))}")
            found = cls(_whole(read["seed"]), _whole(read["steps"]), strikes, _number(read["minutes"]),
                        _word(read["scenario"]), _words(read["settings"]), _choice(read.get("baseline")))
        except (KeyError, TypeError, OverflowError) as e:
            raise ValueError(f"the schedule cannot be read: {type(e).__name__} {e}") from e
        if not all(strike.faults and len(set(strike.faults)) == len(strike.faults) for strike in strikes):
            raise ValueError("each strike has faults, each of them once")
        if odd := next((word for word in found.settings if not (word.startswith("--") and "=" in word)), ""):
            raise ValueError(f"{odd!r} is no setting of the form --key.sub=value")
        if strange := {name for strike in strikes for name in strike.faults} - {*catalogue}:
            raise ValueError(f"unknown faults: {', '.join(sorted(strange))}; known: {', '.join(sorted(catalogue))}")
        if found.faults > _MOST_FAULTS:
            raise ValueError(f"it has {found.faults:,} faults, and a run has {_MOST_FAULTS:,} at most")
        if bool(found.steps) == found.by_time or found.steps > _MOST_STEPS or found.minutes > _MOST_MINUTES:
            raise ValueError(f"a run has steps, at most {_MOST_STEPS:,}, or minutes, at most {_MOST_MINUTES:,.0f}")
        if found.by_time:
            triggers, last = [strike.second for strike in strikes], found.minutes * 60
            mixed = found.steps or any(strike.step for strike in strikes)
        else:
            triggers, last = [float(strike.step) for strike in strikes], float(found.steps)
            mixed = any(strike.second for strike in strikes)
        if mixed or triggers != sorted(set(triggers)) or (triggers and not 0 < triggers[0] <= triggers[-1] <= last):
            raise ValueError("strikes are at steps of the run, or at seconds of it, each at its own, in order")
        return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where it has a name twice."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise TypeError(f"{str(value)[:40]!r} is no whole number from 0 on")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < _MOST:
        raise TypeError(f"{str(value)[:40]!r} is no number from 0 on")
    return float(value)


def _word(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


def _choice(value: Any) -> bool | None:
    if type(value) not in (bool, type(None)):
        raise TypeError(f"{str(value)[:40]!r} is not true, false or null")
    return value  # type: ignore[no-any-return]


def _words(value: Any) -> tuple[str, ...]:
    if type(value) is not list:
        raise TypeError(f"{str(value)[:40]!r} is no list of texts")
    return tuple(map(_word, value))


def drawn(seed: int, steps: int, faults: int, catalogue: Mapping[str, float], *, together: float = 0.25,
          before: int = 2, apart: int = 4, after: int = 6, struck: Mapping[str, Set[str]] = MappingProxyType({}),
          unit: str = "steps") -> Schedule:
    """A schedule with this many faults. ``catalogue``: the faults by name, each with its weight. ``together``: share of
    the strikes that have two faults. ``before``, ``after``: steps at the begin and at the end without a strike.
    ``apart``: steps from one strike to the next one, at least: a recovery is over when further steps were done.
    ``struck``: what each fault strikes; two faults that strike the same are not in one strike, since one may leave the
    other nothing to strike. ``unit``: what errors call the steps.

    Each fault of the catalogue comes once before any comes again, as long as there are enough. Raises ValueError for
    numbers that do not fit."""
    if not catalogue or any(weight <= 0 for weight in catalogue.values()) or faults < 1:
        raise ValueError("a schedule has faults, each with a weight above 0")
    if not apart * (faults // 2 - 1) <= steps < math.inf:  # before many are drawn; two may be struck at once
        raise ValueError(f"{faults} faults, {apart} {unit} apart, need more than {steps} {unit}")
    choose = random.Random(seed)
    names = sorted(catalogue)
    order = choose.sample(names, len(names))[:faults]
    order += choose.choices(names, [catalogue[name] for name in names], k=max(0, faults - len(order)))
    groups = list[tuple[str, ...]]()
    while order:
        one = order.pop(0)
        others = (n for n in order if n != one and struck.get(n, {n}).isdisjoint(struck.get(one, {one})))
        other = next(others, None) if choose.random() < together else None
        if other is not None:
            order.remove(other)
        groups.append((one,) if other is None else (one, other))
    spare = steps - before - after - (len(groups) - 1) * (apart - 1)  # places if the steps in between took none
    if len(groups) > spare:
        raise ValueError(f"{len(groups)} strikes, {apart} {unit} apart, with {before} {unit} before and {after} after "
                         f"them, need more than {steps} {unit}")
    places = sorted(choose.sample(range(spare), len(groups)))
    at = [1 + before + place + i * (apart - 1) for i, place in enumerate(places)]
    return Schedule(seed, steps, tuple(Strike(step, group) for step, group in zip(at, groups, strict=True)))


def drawn_by_time(seed: int, minutes: float, faults: int, catalogue: Mapping[str, float], *, together: float = 0.25,
                  before_s: int = 20, apart_s: int = 10, after_s: int = 60,
                  struck: Mapping[str, Set[str]] = MappingProxyType({})) -> Schedule:
    """As ``drawn``, of a run of so many minutes, with whole seconds in the place of steps."""
    found = drawn(seed, int(minutes * 60), faults, catalogue, together=together, before=before_s, apart=apart_s,
                  after=after_s, struck=struck, unit="seconds")
    return replace(found, steps=0, minutes=minutes,
                   strikes=tuple(Strike(0, strike.faults, float(strike.step)) for strike in found.strikes))


def shrunk(schedule: Schedule, fails: Callable[[Schedule], bool], *, tries: int) -> Schedule:
    """A schedule that still fails, with as few faults as were found in ``tries`` calls of ``fails``: Zeller's
    minimizing delta debugging, over single faults. ``schedule`` is one that fails."""
    parts = [(i, n) for i, strike in enumerate(schedule.strikes) for n in range(len(strike.faults))]
    size = max(1, len(parts) // 2)
    while tries > 0 and len(parts) > 1:
        for first in range(0, len(parts), size):
            if tries <= 0:
                break
            left = parts[:first] + parts[first + size:]
            tries -= 1
            if left and fails(_only(schedule, left)):
                parts = left
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
            continue
        size = max(1, min(size, len(parts) // 2))
    return _only(schedule, parts)


def _only(schedule: Schedule, parts: Sequence[tuple[int, int]]) -> Schedule:
    kept = [replace(strike, faults=tuple(fault for n, fault in enumerate(strike.faults) if (i, n) in parts))
            for i, strike in enumerate(schedule.strikes)]
    return replace(schedule, strikes=tuple(strike for strike in kept if strike.faults))
