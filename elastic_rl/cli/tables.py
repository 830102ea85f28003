"""Listings for people and for programs: rows as a table, as a wide table, or as JSON."""

from __future__ import annotations

import json
import math
import re
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.containers import Lines
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

NONE = "–"
_GAP = 2
"""Blanks between two columns."""
_SHORT = 16
"""Characters of a value, at most, that is never wrapped."""
_JOINED = "\ue000"
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|s|ms|MFLOP/s|TFLOP/s|tokens/s|nats)\b|%)")
"""The blank between a number and its unit."""


class Format(StrEnum):
    """How a command prints what it found."""

    TABLE = "table"
    """The main columns, fitted to the terminal; in a pipe or a file each row is one line."""
    WIDE = "wide"
    """A table with more columns; each row is one line."""
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
    """Rows as a table. ``wide``: further columns of a wide table. On a narrow terminal the columns with long values are
    wrapped. Columns without any value are left out."""
    if not rows:
        return "none"
    chosen = [*columns, *(wide if output is Format.WIDE else ())]
    shown = [c for c in chosen if any(cell(row.get(c), c) != NONE for row in rows)]
    right = [all(isinstance(row.get(c), int | float | None) for row in rows) and not c.endswith("at") for c in shown]
    return Listing([c.removesuffix("_at").replace("_", " ") for c in shown],
                    [[cell(row.get(c), c) for c in shown] for row in rows], right)


def column_widths(natural: Sequence[int], room: int) -> list[int]:
    """Widths of columns in so many characters, of those that their longest values have: columns with short values keep
    theirs, and the others share what is left, of which each has a little at least: then the table is wider than the
    room. Pure."""
    widths = list(natural)
    left = room - sum(width for width in natural if width <= _SHORT)
    long = sorted((width, n) for n, width in enumerate(natural) if width > _SHORT)
    for done, (width, n) in enumerate(long):
        widths[n] = min(width, max(_SHORT, left // (len(long) - done)))
        left -= widths[n]
    return widths


class Listing:
    """A table that is laid out for the width of the console. A title is broken at blanks, if need be, and so are long
    values; nothing is cut off."""

    def __init__(self, titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
        self._titles, self._rows, self._right = titles, rows, right
        by_column = list(zip(*rows, strict=True))
        self._values = [max(map(cell_len, values)) for values in by_column]
        self._natural = [max(width, cell_len(title)) for width, title in zip(self._values, titles, strict=True)]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_GAP, sum(self._natural) + _GAP * len(self._natural))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths, room = self._natural, options.max_width - _GAP * (len(self._natural) - 1)
        if sum(widths) > room:
            widths = column_widths([max(width, *map(cell_len, title.split())) if title else width
                                    for width, title in zip(self._values, self._titles, strict=True)], room)
        made = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
        for title, width, right in zip(self._titles, widths, self._right, strict=True):
            made.add_column(title, width=width, overflow="fold", justify="right" if right else "left")
        for row in self._rows:
            made.add_row(*map(Value, row))
        needed = sum(widths) + _GAP * len(widths)
        yield from console.render(made, options.update(max_width=max(options.max_width, needed)))


class Value(Text):
    """A text that is never broken between a number and its unit."""

    def wrap(self, *args: Any, **options: Any) -> Lines:
        lines = Text.wrap(Text(_UNIT.sub(_JOINED, self.plain)), *args, **options)
        for line in lines:
            line.plain = line.plain.replace(_JOINED, " ")
        return lines


def facts(values: Mapping[str, Any]) -> RenderableType:
    """One object as a table of names and values; unknown values are left out."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for key, value in values.items():
        if (text := cell(value, key)) != NONE:
            made.add_row(key.removesuffix("_at").replace("_", " "), Value(text))
    return made


def put(console: Console, what: RenderableType, output: Format) -> None:
    """Prints ``what`` fitted to the terminal, wider where it does not fit; in a pipe, and with ``-o wide``, at its full
    width."""
    if output is Format.WIDE or not console.is_terminal:
        needed = Measurement.get(console, console.options.update(max_width=1 << 16), what).maximum
        console = Console(file=console.file, width=max(1, needed), force_terminal=console.is_terminal)
    console.print(what, highlight=False, crop=False)


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
    return one_line(text)


def one_line(text: str) -> str:
    """Text that others have written, which then forges neither a line nor a control sequence of the terminal."""
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
