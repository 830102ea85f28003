"""The charts of a chaos run's report. Pure.

They stay small however long a run is: curves have ``POINTS`` points at most, each the mean of a stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from chaos_tests.event_log import Event
from chaos_tests.validate.attribution import began
from chaos_tests.validate.statistics import StepTime
from elastic_rl.report.charts import means
from elastic_rl.report.frame import LEFT, RIGHT, TOP, WIDTH, Frame, Point, nice_ticks, path

POINTS = 240
_MARK = 7
_MOST_NUMBERED = 30
"""Faults whose marks have numbers: those of more would cover one another. Each says its own where it is pointed at."""
_HEAD = 18
"""Height of the row of the faults' numbers."""


def rate(steps: Sequence[StepTime], start: float, end: float, points: int = POINTS) -> list[Point]:
    """Samples a second over the seconds since ``start``: each step's samples are spread over its time."""
    width = max(end - start, 1e-9) / points
    bins = [0.0] * points
    for step in steps:
        first, last = (step.began_at - start) / width, (step.ended_at - start) / width
        at = max(0, int(first))
        while at < points and at <= last:
            part = min(last, at + 1) - max(first, at)
            bins[at] += step.samples * (part / (last - first) if last > first else 1.0)
            at += 1
    return [((i + 0.5) * width, samples / width) for i, samples in enumerate(bins)]


def throughput(run: Sequence[StepTime], faults: Sequence[Event], baseline: Sequence[StepTime], *, start: float,
               end: float) -> str:
    """Samples a second over time, those of the baseline beside them from its own first step on, and the faults: a span
    from the injection of each to its detection, and to the recovery."""
    mine = rate(run, start, end)
    its = list[Point]()
    if baseline:
        begin = min(step.began_at for step in baseline)
        until = min(end, start + max(step.ended_at for step in baseline) - begin)
        its = rate(baseline, begin, begin + until - start)
    most = max((y for _, y in (*mine, *its)), default=1.0) or 1.0
    ticks = nice_ticks(0, most, 4)
    ticks = ticks if ticks[-1] >= most else [*ticks, ticks[-1] + ticks[1] - ticks[0]]
    frame = Frame((0, end - start), (0, ticks[-1] * 1.14), 300,
                  f"Samples a second over {end - start:.0f} seconds, with {len(faults)} faults")
    bottom = frame.height - frame.bottom
    for number, fault in enumerate(faults, 1):
        _span(frame, number, fault, start, end, bottom)
    frame.axes("seconds since the first step", y_ticks=ticks)
    if its:
        frame.add(f'<path class="line c2" d="{path(frame, its)}"/>')
    frame.add(f'<path class="line c1" d="{path(frame, mine)}"/>', *_hits(frame, mine, "s: {:.4g} samples/s"))
    for number, fault in enumerate(faults, 1):
        x = frame.px(min(began(fault), end) - start)
        mark = (f'<circle cx="{x}" cy="{_high(number)}" r="{_MARK}"/><text x="{x}" y="{_high(number) + 3.5}" '
                f'text-anchor="middle">{number}</text>' if len(faults) <= _MOST_NUMBERED else
                f'<line x1="{x}" x2="{x}" y1="{TOP - 10}" y2="{TOP + 2}"/>')
        frame.add(f'<g class="fault" data-tip="{escape(_told(number, fault))}">{mark}</g>')
    return frame.done()


def _high(number: int) -> float:
    """The heights of marks alternate, so that faults that follow one another soon can be told apart."""
    return TOP - 4 + _HEAD * ((number - 1) % 2)


def _span(frame: Frame, number: int, fault: Event, start: float, end: float, bottom: int) -> None:
    injected = began(fault) - start
    detected = fault["detected_at"] - start if fault.get("detected_at") is not None else None
    healed = fault["healed_at"] - start if fault.get("healed_at") is not None else end - start
    stretches = [(injected, detected if detected is not None else healed, "undetected")]
    stretches += [(detected, healed, "healing")] if detected is not None else []
    tip = escape(_told(number, fault))
    for begin, until, kind in stretches:
        x, width = frame.px(begin), max(1.0, frame.px(until) - frame.px(begin))
        frame.add(f'<rect class="span {kind}" x="{x}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}" '
                  f'data-tip="{tip}"/>')


def _told(number: int, fault: Event) -> str:
    def after(moment: str) -> str:
        return f"{fault[moment] - began(fault):.1f} s" if fault.get(moment) is not None else "never"
    return (f"{number}: {fault['name']} at step {fault.get('step')}, detected after {after('detected_at')}, healed "
            f"after {after('healed_at')}")


def _hits(frame: Frame, points: Sequence[Point], words: str) -> list[str]:
    width = (WIDTH - LEFT - RIGHT) / max(1, len(points))
    return [f'<rect class="hit" x="{frame.px(x) - width / 2:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{frame.height - frame.bottom - TOP}" data-tip="{x:.0f} {words.format(y)}"/>' for x, y in points]


def reward(run: Sequence[Point], baseline: Sequence[Point], faults: Sequence[Event]) -> str:
    """Mean reward over steps, of the run and of its baseline, with the faults."""
    mine, its = means(run, POINTS), means(baseline, POINTS)
    values = [y for _, y in (*mine, *its)]
    ticks = nice_ticks(min([0.0, *values]), max([1.0, *values]), 4)
    last = max([x for x, _ in (*run, *baseline)], default=1.0)
    frame = Frame((0, last), (ticks[0], ticks[-1]), 260, "Mean reward over steps, with faults and without")
    frame.axes("RL step", y_ticks=ticks, whole_x=True)
    for number, fault in enumerate(faults, 1):
        if isinstance(fault.get("step"), int | float):
            x = frame.px(min(fault["step"], last))
            frame.add(f'<line class="struck" x1="{x}" x2="{x}" y1="{TOP}" y2="{frame.height - frame.bottom}" '
                      f'data-tip="{escape(_told(number, fault))}"/>')
    for points, kind in ((its, "c2"), (mine, "c1")):
        if points:
            frame.add(f'<path class="line {kind}" d="{path(frame, points)}"/>')
    frame.add(*_hits(frame, mine, ": mean reward {:.3f}"))
    return frame.done()
