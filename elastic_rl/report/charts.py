"""SVG charts for the report, drawn here so that the file needs nothing from anywhere. Pure.

Colours are CSS variables of the page (light and dark). Every chart has a text for screen readers, and marks carry
``data-tip`` which the page's small script shows under the pointer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from elastic_rl.report.frame import LEFT as _LEFT
from elastic_rl.report.frame import RIGHT as _RIGHT
from elastic_rl.report.frame import TOP as _TOP
from elastic_rl.report.frame import WIDTH, Point, nice_ticks
from elastic_rl.report.frame import Frame as _Frame
from elastic_rl.report.frame import path as _path
from elastic_rl.report.frame import short as _num

STAGE_ORDER = ("devices", "sync", "generate", "reward", "groups", "teacher", "advantage", "train", "publish_stall",
               "other")
def _smooth(points: Sequence[Point], window: int) -> list[Point]:
    half = window // 2
    near = [[y for _, y in points[max(0, i - half): i + half + 1]] for i in range(len(points))]
    return [(x, sum(ys) / len(ys)) for (x, _), ys in zip(points, near, strict=True)]


def learning(rewards: Sequence[Point], eval_accuracy: Sequence[Point], faults: Sequence[tuple[float, str]], *,
             axis: str = "RL step") -> str:
    """Mean reward of each step (faint) with its moving average, and the mean reward of evaluations, over steps."""
    last = max([x for x, _ in (*rewards, *eval_accuracy)], default=1)
    frame = _Frame((0, last), (0, 1), 280, "Reward of steps and of evaluations")
    frame.axes(axis, y_ticks=(0, 0.25, 0.5, 0.75, 1), whole_x=True)
    frame.fault_marks(faults)
    if rewards:
        window = max(3, len(rewards) // 25) | 1
        frame.add(f'<path class="line faint c1" d="{_path(frame, rewards)}"/>',
                  f'<path class="line c1" d="{_path(frame, _smooth(rewards, window))}"/>')
        width = max(2.0, (WIDTH - _LEFT - _RIGHT) / max(1, len(rewards)))
        frame.add(*(f'<rect class="hit" x="{frame.px(x) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}" '
                    f'height="{frame.height - frame.bottom - _TOP}" data-tip="step {_num(x)}: reward {y:.3f}"/>'
                    for x, y in rewards))
    if eval_accuracy:
        frame.add(f'<path class="line c2" d="{_path(frame, eval_accuracy)}"/>')
        frame.add(*(f'<circle class="dot c2" cx="{frame.px(x)}" cy="{frame.py(y)}" r="4" '
                    f'data-tip="step {_num(x)}: eval {y:.3f}"/>' for x, y in eval_accuracy))
    return frame.done()


def step_seconds(steps: Sequence[tuple[int, Mapping[str, float]]], faults: Sequence[tuple[float, str]]) -> str:
    """Stacked bars: seconds of each stage of a step. The axis ends at the 98th percentile, so that the one step that
    waited for a recovery does not flatten all others; a bar that goes beyond it is marked."""
    totals = sorted(sum(s.get(p, 0.0) for p in STAGE_ORDER) for _, s in steps) or [1.0]
    cap = max(totals[min(len(totals) - 1, int(len(totals) * 0.98))], totals[len(totals) // 2] * 2) * 1.05
    cap = min(cap, totals[-1] * 1.05)
    if cap < 1e-6:  # nothing was measured
        cap = 1.0
    first, last = (steps[0][0], steps[-1][0]) if steps else (0, 1)
    frame = _Frame((first - 0.5, last + 0.5), (0, cap), 250, "Seconds of each stage of a step")
    frame.axes("RL step", y_ticks=nice_ticks(0, cap, 4), whole_x=True, unit=" s")
    width = (WIDTH - _LEFT - _RIGHT) / max(1, last - first + 1)
    gap = min(1.0, width * 0.15)
    for step, seconds in steps:
        base, left = 0.0, frame.px(step - 0.5) + gap / 2
        tip = f"step {step}: " + ", ".join(f"{p.replace('_', ' ')} {seconds[p]:.2f} s" for p in STAGE_ORDER
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


def engine_lanes(lags: Mapping[str, Mapping[int, int]], steps: Sequence[int], bound: int) -> str:
    """One lane an engine: a cell for each step it served, coloured by how many versions it lay behind."""
    lane, left = 26, 150
    first, last = (steps[0], steps[-1]) if steps else (0, 1)
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
        for start, end, lag in _runs(by_step):
            kind = "l0" if lag == 0 else "l1" if lag <= max(bound, 1) else "l2"
            span = f"steps {start}–{end}" if end > start else f"step {start}"
            frame.add(f'<rect class="{kind}" x="{frame.px(start - 0.5)}" y="{y + 3}" height="{lane - 8}" rx="2" '
                      f'width="{max(1.0, (end - start + 1) * width):.2f}" '
                      f'data-tip="{escape(engine)}, {span}: {lag} version{"" if lag == 1 else "s"} behind"/>')
    return frame.done()


def _runs(by_step: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """Stretches of consecutive steps with the same lag, as (first, last, lag)."""
    runs: list[tuple[int, int, int]] = []
    for step in sorted(by_step):
        lag = by_step[step]
        if runs and runs[-1][1] == step - 1 and runs[-1][2] == lag:
            runs[-1] = (runs[-1][0], step, lag)
        else:
            runs.append((step, step, lag))
    return runs


def fault_timeline(faults: Sequence[Mapping[str, object]], step_times: Sequence[tuple[float, int]], start: float,
                   end: float) -> str:
    """A lane a fault over wall time: until it was detected, until it was healed; under them a tick for each finished
    step, which shows what went on meanwhile."""
    lane, left = 30, 210
    frame = _Frame((0, end - start), (0, 1), _TOP + lane * (len(faults) + 1) + 40, "Faults over time", left=left)
    frame.axes("seconds since the start")
    for row, fault in enumerate(faults):
        y = _TOP + row * lane
        injected, detected, healed = (_seconds(fault.get(f"{k}_at"), start) for k in ("injected", "detected", "healed"))
        if injected is None:
            continue
        stop = healed if healed is not None else end - start
        seen = detected if detected is not None else stop
        frame.text("lane", left - 10, y + 17, f"{row + 1} · {fault['name']}", "end")
        frame.add(_bar(frame, injected, seen, y + 5, lane - 12, "undetected",
                       f"{seen - injected:.1f} s until it was detected"),
                  _bar(frame, seen, stop, y + 5, lane - 12, "healing",
                       f"{stop - injected:.1f} s until it was healed" if healed is not None else "never healed"))
        word = f"{stop - injected:.1f} s" if healed is not None else "not healed"
        x, anchor = (frame.px(stop) + 6, "start") if frame.px(stop) < WIDTH - 90 else (frame.px(injected) - 6, "end")
        frame.text("tick", x, y + 17, word, anchor)
    y = _TOP + len(faults) * lane
    frame.text("lane", left - 10, y + 17, "finished steps", "end")
    frame.add(*(f'<path class="step" d="M{frame.px(at - start)},{y + 6}v16" '
                f'data-tip="step {step} after {at - start:.0f} s"/>' for at, step in step_times))
    return frame.done()


def _seconds(value: object, start: float) -> float | None:
    return float(value) - start if isinstance(value, int | float) else None


def _bar(frame: _Frame, begin: float, end: float, y: float, height: float, kind: str, tip: str) -> str:
    width = max(2.0, frame.px(end) - frame.px(begin))
    return (f'<rect class="{kind}" x="{frame.px(begin)}" y="{y}" width="{width:.2f}" height="{height}" rx="2" '
            f'data-tip="{escape(tip)}"/>')
