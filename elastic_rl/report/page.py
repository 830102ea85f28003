"""What HTML pages of reports have in common: each is one file, with its style and its script in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files


def page(title: str, body: str, style: str = "") -> str:
    """A whole page. ``body`` is HTML; ``style``: rules of its own, after those that all have."""
    css = files("elastic_rl.report").joinpath("report.css").read_text(encoding="utf-8")
    script = files("elastic_rl.report").joinpath("report.js").read_text(encoding="utf-8")
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(title)} · elastic-rl</title><style>{css}{style}</style></head><body><main>{body}</main>'
            f'<div id="tip" role="status"></div><script>{script}</script></body></html>')


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def legend(*entries: tuple[str, str]) -> str:
    items = "".join(f'<li><i class="{kind}"></i>{escape(word)}</li>' for kind, word in entries)
    return f'<ul class="legend">{items}</ul>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: bool = False) -> str:
    if not rows:
        return ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="numeric"' if numeric else ""
    return (f'<div class="scroll"><table{kind}><thead><tr>{"".join(f"<th>{escape(h)}</th>" for h in head)}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>")


def value(value: float | None, digits: int, unit: str = "") -> str:
    if value is None:
        return "–"
    if 0 < abs(value) < 0.5 * 10.0 ** -digits:
        return f"{value:.1e}{unit}"
    return f"{value:,.{digits}f}{unit}"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(int(round(seconds)), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
