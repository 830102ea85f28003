"""The training metrics of a run over its steps, as small charts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from math import floor, log10
from typing import Any

from elastic_rl.report.charts import envelope, means, parts, steps_of
from elastic_rl.report.frame import Point, nice_ticks
from elastic_rl.telemetry.training_metrics import THROUGHPUT, UPDATE

Record = Mapping[str, Any]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 300, 150, 48, 20, 8
_MOST_POINTS = 160
"""Most points of a curve: of more steps the means, before their range."""
_MOST_HITS = 80
"""Most places of a curve that say under the pointer what is there: the mean of their steps."""
_SMALLEST, _LARGEST = 1e-30, 1e30
"""What is smaller is drawn as 0, and what is larger not at all."""
_MOST_OWN = 16
"""Curves of what an algorithm of the user's own reports."""
_TITLES = {
    "kl": "KL to sampler", "kl_reference": "KL to reference", "kl_teacher": "KL to teacher",
    "kl_teacher_top": "KL to teacher, top tokens", "teacher_refused": "Refused by the teacher", "entropy": "Entropy",
    "clip_fraction": "Clip fraction",
    "ratio_mean": "Ratio, mean", "gate_mean": "Gate, mean", "advantage_std": "Advantage std",
    "grad_norm": "Gradient norm", "lr": "Learning rate", "loss": "Loss",
    "logprob_diff_mean": "Log-prob difference, mean", "logprob_diff_max": "Log-prob difference, max",
    "tis_weight_mean": "TIS weight, mean",
    "tis_capped_fraction": "TIS weights at the cap", "critic_loss": "Loss of the critic",
    "explained_variance": "Explained variance", "value_mean": "Value, mean", "return_mean": "Return, mean",
    "value_clip_fraction": "Value clip fraction", "critic_grad_norm": "Gradient norm of the critic",
    "critic_lr": "Learning rate of the critic",
    "staleness_min": "Staleness of groups, min", "staleness_mean": "Staleness of groups, mean",
    "staleness_max": "Staleness of groups, max", "groups_queued": "Groups queued", "groups_leased": "Groups generating",
    "groups_stale": "Groups too stale", "groups_lost": "Groups lost",
    "producer_wait_s": "Generation waits for a part", "producer_no_room_s": "Generation has no room",
    "train_tokens_per_s": "Trained", "mfu": "MFU",
    "generate_tokens_per_s": "Generated", "tflops_per_rank": "Model FLOPs", "peak_memory_bytes": "Memory, peak"}
"""Metrics with a curve of their own, in order."""


def curves(steps: Sequence[Record]) -> str:
    """A chart for each metric that the steps have."""
    return f'<div class="curves">{"".join(_chart(*curve) for curve in _curves(steps))}</div>'


def _curves(steps: Sequence[Record]) -> Iterator[tuple[str, str, list[Point]]]:
    """Title, unit and points of each curve."""
    def curve(title: str, unit: str, values: Iterable[Any]) -> Iterator[tuple[str, str, list[Point]]]:
        points = [(float(s["step"]), float(v)) for s, v in zip(steps, values, strict=True)
                  if isinstance(v, int | float) and abs(v) < _LARGEST]
        if points:
            yield title, unit, points

    parts = dict.fromkeys(name for s in steps for name in s.get("reward_parts") or {})
    for part in list(parts)[:_MOST_OWN] if len(parts) > 1 else ():
        yield from curve(f"Reward: {part}", "", [_part(s, "reward_parts", part) for s in steps])
    for what in ("mean", "max"):
        lengths = [_part(s, "response_tokens", what) for s in steps]
        yield from curve(f"Response length, {what}", "tokens", lengths)
    yield from curve("Truncated", "%", [_scaled(s.get("truncated"), 100.0) for s in steps])
    for name, title in _TITLES.items():
        unit, scale = _unit(name)
        yield from curve(title, unit, [_scaled(_reported(s, name), scale) for s in steps])
    others = dict.fromkeys(name for s in steps for name in s.get("algorithm") or {} if name not in UPDATE)
    for name in list(others)[:_MOST_OWN]:
        yield from curve(name, "", [_part(s, "algorithm", name) for s in steps])


def _part(step: Record, what: str, name: str) -> Any:
    return (step.get(what) or {}).get(name)


def _reported(step: Record, name: str) -> Any:
    """A metric of the updates or of the throughput, wherever the record has it."""
    places = (step.get(name), _part(step, "algorithm", name), _part(step, "throughput", name))
    return next((value for value in places if value is not None), None)


def _unit(name: str) -> tuple[str, float]:
    """What is shown, and by how much a value is multiplied for it."""
    unit = {**UPDATE, **THROUGHPUT}[name].unit
    return {"0 to 1": ("%", 100.0), "bytes": ("GiB", 2.0 ** -30)}.get(unit, (unit, 1.0))


def _scaled(value: Any, by: float) -> Any:
    return value * by if isinstance(value, int | float) else None


def _chart(title: str, unit: str, points: Sequence[Point]) -> str:
    drawn = means(points, _MOST_POINTS)
    low, high = min(y for _, y in points), max(y for _, y in points)
    ticks = _ticks(min(low, 0.0), high)
    y0, y1 = min(ticks[0], low), max(ticks[-1], high)
    first, last = points[0][0], points[-1][0]

    def px(x: float) -> float:
        return round(LEFT + (x - first) / max(last - first, 1.0) * (WIDTH - LEFT - 6), 1)

    def py(y: float) -> float:
        return round(TOP + (1 - (y - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM), 1)

    lines = "".join(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 6}" y1="{py(t)}" y2="{py(t)}"/>'
                    f'<text class="tick" x="{LEFT - 6}" y="{py(t) + 4}" text-anchor="end">{_number(t)}</text>'
                    for t in ticks)
    path = "M" + "L".join(f"{px(x)},{py(y)}" for x, y in drawn)
    spread = "M" + "L".join(f"{px(x)},{py(y)}" for x, y in envelope(points, _MOST_POINTS)) if (
        len(points) > _MOST_POINTS) else ""
    faint = f'<path class="line faint c1" d="{spread}"/>' if spread else ""
    hits = "".join(_hit(part, px, unit, (WIDTH - LEFT - 6) * len(part) / len(points))
                   for part in parts(points, _MOST_HITS))
    ends = (f'<text class="tick" x="{LEFT}" y="{HEIGHT - 4}">{first:.0f}</text>'
            f'<text class="tick" x="{WIDTH - 6}" y="{HEIGHT - 4}" text-anchor="end">{last:.0f}</text>')
    name = escape(f"{title} over steps, last {_number(points[-1][1])} {unit}")
    return (f'<figure><figcaption>{escape(title)} <b>{_number(points[-1][1])} {escape(unit)}</b></figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{lines}{ends}'
            f'{faint}<path class="line c1" d="{path}"/>{hits}</svg></figure>')


def _hit(part: Sequence[Point], px: Callable[[float], float], unit: str, width: float) -> str:
    """A place that says what is there."""
    values = [y for _, y in part]
    x = (px(part[0][0]) + px(part[-1][0]) - width) / 2
    return (f'<path class="hit" d="M{x:.1f},{TOP}h{max(width, 1):.1f}v{HEIGHT - TOP - BOTTOM}H{x:.1f}z" data-tip="'
            f'{steps_of(part[0][0], part[-1][0])}: {_number(sum(v / len(values) for v in values))} {escape(unit)}"/>')


def _ticks(low: float, high: float) -> list[float]:
    """Round values of any size, two at least; ``nice_ticks`` is for those that are not tiny."""
    size = max(abs(high), abs(low))
    if size < _SMALLEST:
        low, high = 0.0, 1.0
    elif high - low <= size * 1e-6:
        high = low + size
    unit = 10.0 ** floor(log10(high - low))
    return [t * unit for t in nice_ticks(low / unit, high / unit, 4)]


def _number(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}".replace("e-0", "e-")
