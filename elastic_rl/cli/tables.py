"""Listings for people and for programs: rows as a table, as a wide table, or as JSON."""

from __future__ import annotations

import json
import math
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

NONE = "–"


class Format(StrEnum):
    """How a command prints what it found."""

    TABLE = "table"
    """The main columns, fitted to the terminal; in a pipe or a file no cell is shortened."""
    WIDE = "wide"
    """A table with more columns; no cell is shortened."""
    JSON = "json"
    """JSON with every field."""


def show(console: Console, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: Format, *,
         wide: Sequence[str] = ()) -> None:
    """Prints rows, as ``table`` makes them or as JSON."""
    if output is Format.JSON:
        write_json(list(rows))
    else:
        put(console, table(rows, columns, output, wide=wide), output)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], output: Format, *,
          wide: Sequence[str] = ()) -> RenderableType:
    """Rows as a table. ``wide``: further columns of a wide table. On a narrow terminal the last of ``columns`` is
    wrapped, and the others are shortened. Columns without any value are left out."""
    if not rows:
        return "none"
    chosen = [*columns, *(wide if output is Format.WIDE else ())]
    shown = [c for c in chosen if any(cell(row.get(c), c) != NONE for row in rows)]
    made = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in shown:
        folds = column == columns[-1]
        right = all(isinstance(row.get(column), int | float | None) for row in rows) and not column.endswith("at")
        made.add_column(column.removesuffix("_at").replace("_", " "), no_wrap=not folds,
                        overflow="fold" if folds else "ellipsis", justify="right" if right else "left")
    for row in rows:
        made.add_row(*(Text(cell(row.get(c), c)) for c in shown))
    return made


def facts(values: Mapping[str, Any]) -> RenderableType:
    """One object as a table of names and values; unknown values are left out."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for key, value in values.items():
        if (text := cell(value, key)) != NONE:
            made.add_row(key.removesuffix("_at").replace("_", " "), Text(text))
    return made


def put(console: Console, what: RenderableType, output: Format) -> None:
    """Prints ``what`` fitted to the terminal; in a pipe, and with ``-o wide``, at its full width."""
    if output is Format.WIDE or not console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=1 << 16), what).maximum
        console = Console(file=console.file, width=max(1, needed), force_terminal=console.is_terminal)
    console.print(what, highlight=False)


def cell(value: Any, column: str) -> str:
    """A value as text. Columns that end with ``at`` hold unix seconds."""
    if value is None or value == "" or value == [] or value == {}:
        return NONE
    if column.endswith("at") and isinstance(value, int | float):
        return clock(value) if value > 1e9 else NONE
    if column == "nbytes" and isinstance(value, int | float):
        return size(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and all(isinstance(v, str | int) for v in value):
        text = ", ".join(str(v) for v in value)
    else:
        text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return " ".join(printable(text).splitlines())


def printable(text: str) -> str:
    """Text with control and format characters replaced, line breaks and tabs excepted: names and messages come from
    others, and escape sequences would steer the terminal."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else "\ufffd" for c in text)


def size(nbytes: float) -> str:
    """``1.5 MiB`` for 1572864."""
    nbytes = max(-1e30, min(nbytes, 1e30))  # no float holds just any integer
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """``12m`` for 750: in one unit, and never longer than it is."""
    if not math.isfinite(seconds):
        return NONE
    for unit, length_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length_s:
            return f"{int(seconds // length_s)}{unit}"
    return f"{int(seconds)}s"


def moment(at: float | None) -> str:
    """``2026-11-27 08:30`` for unix seconds, in local time; empty for none."""
    return clock(at, "%Y-%m-%d %H:%M") if at else ""


def clock(at: float, form: str = "%H:%M:%S") -> str:
    """Unix seconds in local time. A record of somebody else may have a number that no calendar has."""
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return NONE


def write_json(value: Any, *, line: bool = False) -> None:
    """Prints plain JSON to stdout, never wrapped or coloured. ``line``: on one line, for a stream of documents."""
    sys.stdout.write(json.dumps(value, indent=None if line else 2, default=str) + "\n")
    sys.stdout.flush()
