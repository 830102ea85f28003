"""The rows of a running bench: shown, and written to a file, as soon as each one is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from elastic_rl.bench.measurement import Row, markdown

Emit = Callable[[Row], None]
"""Takes a row. A row of the same id replaces the earlier one: more of its alternatives were measured."""


class RowSink(Protocol):
    """Follows the rows of a bench."""

    def row(self, row: Row, earlier: Row | None) -> None:
        """``earlier``: what ``row`` replaces."""


class Recorder:
    """Keeps the rows of one run in order and passes each one on, so that an interrupted run keeps what it measured."""

    def __init__(self, *sinks: RowSink) -> None:
        self._sinks = sinks
        self._rows: dict[str, Row] = {}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def emit(self, row: Row) -> None:
        earlier = self._rows.get(row.id)
        self._rows[row.id] = row
        for sink in self._sinks:
            sink.row(row, earlier)


class Printer:
    """Prints each row as a line, and each alternative below it as soon as it is known."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def row(self, row: Row, earlier: Row | None) -> None:
        if earlier is None or (earlier.value is None and row.value is not None):
            self._write(_line(row))
            earlier = None
        before = earlier or Row.unmeasured(row.id, row.name, "not yet")
        for name, value in row.alternatives.items():
            if before.alternatives.get(name) != value:
                self._write(f"    {row.id}: {name} {value:.4g} {row.unit}".rstrip())
        for name, why in row.unmeasured_alternatives.items():
            if name not in before.unmeasured_alternatives:
                self._write(f"    {row.id}: {name} was not measured: {why}")


def _line(row: Row) -> str:
    if row.value is None:
        return f"{row.id:<26} not measured: {row.why}"
    met = "" if row.met is None else "met" if row.met else "MISSED"
    goal = f"{row.op} {row.goal:g}" if row.goal is not None else ""
    limit = f"limit {row.limit:.4g}" if row.limit is not None else ""
    value = f"{row.value:.4g} {row.unit}"
    return f"{row.id:<26} {value:>16}  {row.spread:>17}  {goal:>8} {met:<6} {limit:<12} {row.name}"


class MarkdownFile:
    """A section of a Markdown file that has the rows of one run so far; earlier sections stay. The section says that
    the run is incomplete until ``finish``."""

    def __init__(self, path: Path, bench: str, command: str) -> None:
        self._path, self._bench, self._command = path, bench, command
        self._at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self._before = path.read_text().rstrip() + "\n\n" if path.exists() else "# Results\n\n"
        self._rows: dict[str, Row] = {}

    def row(self, row: Row, earlier: Row | None) -> None:
        self._rows[row.id] = row
        self._write(f"{self._at} (incomplete)")

    def finish(self) -> None:
        """Marks the run as complete."""
        self._write(self._at)

    def _write(self, at: str) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text(self._before + markdown(self._bench, self._command, list(self._rows.values()), at))
        partial.replace(self._path)
