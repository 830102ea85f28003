"""The plot area of a chart of the report: linear axes, and the SVG text that collects on it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

WIDTH = 920
LEFT, RIGHT, TOP = 48, 16, 14
Point = tuple[float, float]
_LARGEST = 1e300
"""Sums and differences of values up to this one are finite."""
MOST_MARKED = 50
"""Most faults, and lanes of engines, that a chart has: the newest."""


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round values that span [low, high], as far as numbers can be drawn."""
    low, high = (max(-_LARGEST, min(value, _LARGEST)) for value in (low, high))
    if high - low < 1e-9:  # ticks are rounded to a tenth of that
        high = low + 1
    raw = (high - low) / max(1, count)
    base = 10.0 ** floor(log10(raw))
    step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(first * step + i * step, 10) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


class Frame:
    """A plot area with linear axes, and the SVG text that collects on it."""

    def __init__(self, x: Point, y: Point, height: int, label: str, *, left: int = LEFT, bottom: int = 34) -> None:
        self.x0, self.x1 = x[0], x[1] if x[1] > x[0] else x[0] + 1
        self.y0, self.y1 = y[0], y[1] if y[1] > y[0] else y[0] + 1
        self.height, self.left, self.bottom = height, left, bottom
        self.parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">']

    def px(self, x: float) -> float:
        return round(self.left + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - self.left - RIGHT), 2)

    def py(self, y: float) -> float:
        return round(TOP + (1 - (y - self.y0) / (self.y1 - self.y0)) * (self.height - TOP - self.bottom), 2)

    def add(self, *parts: str) -> None:
        self.parts += parts

    def text(self, kind: str, x: float, y: float, words: str, anchor: str) -> None:
        self.add(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>')

    def axes(self, x_label: str, *, y_ticks: Sequence[float] = (), whole_x: bool = False, unit: str = "") -> None:
        floor_y = self.height - self.bottom
        for tick in y_ticks:
            y = self.py(tick)
            self.add(f'<line class="grid" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            self.text("tick", self.left - 8, y + 4, f"{short(tick)}{unit}", "end")
        self.add(f'<line class="axis" x1="{self.left}" x2="{WIDTH - RIGHT}" y1="{floor_y}" y2="{floor_y}"/>')
        for tick in nice_ticks(self.x0, self.x1, 8):
            if whole_x and tick != int(tick):
                continue
            self.text("tick", self.px(tick), floor_y + 16, short(tick), "middle")
        self.text("tick", WIDTH - RIGHT, self.height - 3, x_label, "end")

    def fault_marks(self, faults: Sequence[tuple[float, str]]) -> None:
        """Dotted verticals, numbered as in the table: the newest ones."""
        for number, (x, name) in [*enumerate(faults, 1)][-MOST_MARKED:]:
            at = self.px(x)
            self.add(f'<g class="fault" data-tip="{number}: {escape(name)} at step {short(x)}">'
                     f'<line x1="{at}" x2="{at}" y1="{TOP + 8}" y2="{self.height - self.bottom}"/>'
                     f'<circle cx="{at}" cy="{TOP}" r="8"/><text x="{at}" y="{TOP + 4}" text-anchor="middle">{number}'
                     f'</text></g>')

    def done(self) -> str:
        return "".join(self.parts) + "</svg>"


def path(frame: Frame, points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{frame.px(x)},{frame.py(y)}" for x, y in points)
