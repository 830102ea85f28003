"""SVG charts for the report, drawn here so that the file needs nothing from anywhere. Pure.

Colours are CSS variables of the page (light and dark). Every chart has a text for screen readers, and marks carry
``data-tip`` which the page's small script shows under the pointer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from operator import itemgetter
from typing import TypeVar

from elastic_rl.report.frame import LEFT as _LEFT
from elastic_rl.report.frame import MOST_MARKED, WIDTH, Point, nice_ticks
from elastic_rl.report.frame import RIGHT as _RIGHT
from elastic_rl.report.frame import TOP as _TOP
from elastic_rl.report.frame import Frame as _Frame
from elastic_rl.report.frame import path as _path
from elastic_rl.report.frame import short as _num

STAGE_ORDER = ("devices", "sync", "generate", "reward", "groups", "teacher", "advantage", "train", "publish_stall",
               "other")
MOST_DRAWN = 240
"""Most marks of a kind that a chart has: of more steps, evaluations or times, each mark stands for several. A page does
not grow with the steps of a run beyond that."""
_FEWEST_CELLS = 16
"""Cells that a lane may have however many lanes there are."""
_MOST_DOTS = 150
"""Most evaluations that have a dot: of each run of them the last one."""
T = TypeVar("T")


def parts(items: Sequence[T], limit: int = MOST_DRAWN) -> list[Sequence[T]]:
    """Items in their order as at most ``limit`` runs of them, which differ by one item in length at most."""
    if len(items) <= limit:
        return [items[i:i + 1] for i in range(len(items))]
    edges = [i * len(items) // limit for i in range(limit + 1)]
    return [items[a:b] for a, b in pairwise(edges)]


def means(points: Sequence[Point], limit: int = MOST_DRAWN) -> list[Point]:
    """A curve of at most ``limit`` points: the means of as many runs of points."""
    return [(sum(x / len(part) for x, _ in part), sum(y / len(part) for _, y in part)) for part in parts(points, limit)]


def envelope(points: Sequence[Point], limit: int = MOST_DRAWN) -> list[Point]:
    """A curve of at most ``limit`` points, which has the least and the largest one of each run of points, in their
    order: a spike of one step of many is still there."""
    if len(points) <= limit:
        return list(points)
    return [point for part in parts(points, limit // 2)
            for point in sorted({min(part, key=itemgetter(1)), max(part, key=itemgetter(1))})]


def steps_of(first: float, last: float) -> str:
    """How a mark that stands for these steps says so."""
    return f"steps {_num(first)}–{_num(last)}" if last > first else f"step {_num(first)}"


def _smooth(points: Sequence[Point], window: int) -> list[Point]:
    half = window // 2
    near = [[y for _, y in points[max(0, i - half): i + half + 1]] for i in range(len(points))]
    return [(x, sum(ys) / len(ys)) for (x, _), ys in zip(points, near, strict=True)]


def learning(rewards: Sequence[Point], eval_accuracy: Sequence[Point], faults: Sequence[tuple[float, str]], *,
             axis: str = "RL step") -> str:
    """Mean reward of each step (faint) with its moving average, and the mean reward of evaluations, over steps. Of many
    steps, the faint line has the range, and the average is of means."""
    last = max([x for x, _ in (*rewards, *eval_accuracy)], default=1)
    frame = _Frame((0, last), (0, 1), 280, "Reward of steps and of evaluations")
    frame.axes(axis, y_ticks=(0, 0.25, 0.5, 0.75, 1), whole_x=True)
    frame.fault_marks(faults)
    if rewards:
        averages = means(rewards)
        window = max(3, len(averages) // 25) | 1
        frame.add(f'<path class="line faint c1" d="{_path(frame, envelope(rewards, 2 * MOST_DRAWN))}"/>',
                  f'<path class="line c1" d="{_path(frame, _smooth(averages, window))}"/>')
        width = max(2.0, (WIDTH - _LEFT - _RIGHT) / len(averages))
        frame.add(*(f'<rect class="hit" x="{frame.px(x) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}" '
                    f'height="{frame.height - frame.bottom - _TOP}" '
                    f'data-tip="{steps_of(part[0][0], part[-1][0])}: reward {y:.3f}"/>'
                    for part, (x, y) in zip(parts(rewards), averages, strict=True)))
    if eval_accuracy:
        frame.add(f'<path class="line c2" d="{_path(frame, envelope(eval_accuracy, 2 * MOST_DRAWN))}"/>')
        frame.add(*(f'<circle class="dot c2" cx="{frame.px(part[-1][0])}" cy="{frame.py(part[-1][1])}" r="4" '
                    f'data-tip="step {_num(part[-1][0])}: eval {part[-1][1]:.3f}"/>'
                    for part in parts(eval_accuracy, _MOST_DOTS)))
    return frame.done()


def step_seconds(steps: Sequence[tuple[int, Mapping[str, float]]], faults: Sequence[tuple[float, str]]) -> str:
    """Stacked bars: seconds of each stage of a step, or of many steps in the mean. The axis ends at the 98th
    percentile, so that the one step that waited for a recovery does not flatten all others; a bar that goes beyond it
    is marked."""
    bars = [(part[0][0], part[-1][0], _mean_seconds([seconds for _, seconds in part])) for part in parts(steps)]
    totals = sorted(sum(s.get(p, 0.0) for p in STAGE_ORDER) for _, _, s in bars) or [1.0]
    cap = max(totals[min(len(totals) - 1, int(len(totals) * 0.98))], totals[len(totals) // 2] * 2) * 1.05
    cap = min(cap, totals[-1] * 1.05)
    if cap < 1e-6:  # nothing was measured
        cap = 1.0
    first, last = (steps[0][0], steps[-1][0]) if steps else (0, 1)
    frame = _Frame((first - 0.5, last + 0.5), (0, cap), 250, "Seconds of each stage of a step")
    frame.axes("RL step", y_ticks=nice_ticks(0, cap, 4), whole_x=True, unit=" s")
    for begin, end, seconds in bars:
        width = (WIDTH - _LEFT - _RIGHT) * (end - begin + 1) / max(1, last - first + 1)
        gap = min(1.0, width * 0.15)
        base, left = 0.0, frame.px(begin - 0.5) + gap / 2
        tip = f"{steps_of(begin, end)}: " + ", ".join(f"{p.replace('_', ' ')} {seconds[p]:.2f} s" for p in STAGE_ORDER
                                                        if seconds.get(p, 0) > 0.0005)
        frame.add(f'<g data-tip="{escape(tip)}">')
        for stage in STAGE_ORDER:
            top = min(cap, base + seconds.get(stage, 0.0))
            if top > base:
                y = frame.py(top)
                frame.add(f'<rect class="p-{stage}" x="{left:.2f}" y="{y}" width="{width - gap:.2f}" '
                          f'height="{frame.py(base) - y:.2f}"/>')
            base = top
        if sum(seconds.get(p, 0.0) for p in STAGE_ORDER) > cap:
            x = left + (width - gap) / 2
            frame.add(f'<path class="over" d="M{x - 5:.1f},{_TOP + 1}l5,-8l5,8z"/>')
        frame.add("</g>")
    frame.fault_marks(faults)
    return frame.done()


def _mean_seconds(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each stage that a step has."""
    return {stage: sum(s.get(stage, 0.0) for s in steps) / len(steps) for stage in STAGE_ORDER
            if any(stage in s for s in steps)}


def engine_lanes(lags: Mapping[str, Mapping[int, int]], steps: Sequence[int], bound: int) -> str:
    """One lane an engine, of the newest ones: a cell for each step it served, coloured by how many versions it lay
    behind. Of many steps, a cell has the largest lag of several."""
    lane, left = 26, 150
    first, last = (steps[0], steps[-1]) if steps else (0, 1)
    lags = dict(sorted(lags.items(), key=lambda lane: max(lane[1], default=0))[-MOST_MARKED:])
    most = max(MOST_DRAWN // max(1, len(lags)), _FEWEST_CELLS)
    frame = _Frame((first - 0.5, last + 0.5), (0, 1), _TOP + lane * max(1, len(lags)) + 34, "Version lag per engine",
                   left=left)
    frame.axes("RL step", whole_x=True)
    width = (WIDTH - left - _RIGHT) / max(1, last - first + 1)
    for row, (engine, by_step) in enumerate(sorted(lags.items())):
        y = _TOP + row * lane
        name = engine if len(engine) <= 20 else "…" + engine[-19:]
        frame.text("lane", left - 10, y + 15, name, "end")
        frame.add(f'<rect class="track" x="{left}" y="{y + 3}" width="{WIDTH - left - _RIGHT}" height="{lane - 8}" '
                  f'rx="3"/>')
        for start, end, lag in _runs(by_step, most):
            kind = "l0" if lag == 0 else "l1" if lag <= max(bound, 1) else "l2"
            span = f"steps {start}–{end}" if end > start else f"step {start}"
            frame.add(f'<rect class="{kind}" x="{frame.px(start - 0.5)}" y="{y + 3}" height="{lane - 8}" rx="2" '
                      f'width="{max(1.0, (end - start + 1) * width):.2f}" '
                      f'data-tip="{escape(engine)}, {span}: {lag} version{"" if lag == 1 else "s"} behind"/>')
    return frame.done()


def _runs(by_step: Mapping[int, int], limit: int = MOST_DRAWN) -> list[tuple[int, int, int]]:
    """Stretches of consecutive steps with the same lag, as (first, last, lag): at most ``limit``, of which each may
    then have lags up to its own, and gaps."""
    runs: list[tuple[int, int, int]] = []
    for step in sorted(by_step):
        lag = by_step[step]
        if runs and runs[-1][1] == step - 1 and runs[-1][2] == lag:
            runs[-1] = (runs[-1][0], step, lag)
        else:
            runs.append((step, step, lag))
    return [(part[0][0], part[-1][1], max(lag for *_, lag in part)) for part in parts(runs, limit)]


def fault_timeline(faults: Sequence[Mapping[str, object]], step_times: Sequence[tuple[float, int]], start: float,
                   end: float) -> str:
    """A lane a fault, of the newest ones, over wall time: until it was detected, until it was healed; under them a tick
    for each finished step, or one of several, which shows what went on meanwhile."""
    lane, left = 30, 210
    drawn = [*enumerate(faults, 1)][-MOST_MARKED:]
    frame = _Frame((0, end - start), (0, 1), _TOP + lane * (len(drawn) + 1) + 40, "Faults over time", left=left)
    frame.axes("seconds since the start")
    for row, (number, fault) in enumerate(drawn):
        y = _TOP + row * lane
        injected, detected, healed = (_seconds(fault.get(f"{k}_at"), start) for k in ("injected", "detected", "healed"))
        if injected is None:
            continue
        stop = healed if healed is not None else end - start
        seen = detected if detected is not None else stop
        frame.text("lane", left - 10, y + 17, f"{number} · {fault['name']}", "end")
        frame.add(_bar(frame, injected, seen, y + 5, lane - 12, "undetected",
                       f"{seen - injected:.1f} s until it was detected"),
                  _bar(frame, seen, stop, y + 5, lane - 12, "healing",
                       f"{stop - injected:.1f} s until it was healed" if healed is not None else "never healed"))
        word = f"{stop - injected:.1f} s" if healed is not None else "not healed"
        x, anchor = (frame.px(stop) + 6, "start") if frame.px(stop) < WIDTH - 90 else (frame.px(injected) - 6, "end")
        frame.text("tick", x, y + 17, word, anchor)
    y = _TOP + len(drawn) * lane
    frame.text("lane", left - 10, y + 17, "finished steps", "end")
    frame.add(*(f'<path class="step" d="M{frame.px(at - start)},{y + 6}v16" '
                f'data-tip="step {step} after {at - start:.0f} s"/>'
                for at, step in (part[-1] for part in parts(step_times, 2 * MOST_DRAWN))))
    return frame.done()


def _seconds(value: object, start: float) -> float | None:
    return float(value) - start if isinstance(value, int | float) else None


def _bar(frame: _Frame, begin: float, end: float, y: float, height: float, kind: str, tip: str) -> str:
    width = max(2.0, frame.px(end) - frame.px(begin))
    return (f'<rect class="{kind}" x="{frame.px(begin)}" y="{y}" width="{width:.2f}" height="{height}" rx="2" '
            f'data-tip="{escape(tip)}"/>')
