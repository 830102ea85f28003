"""The rows of a running bench: shown, and written to a file, as soon as each one is measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from elastic_rl.bench.measurement import Row, markdown
from elastic_rl.errors import ConfigError, ElasticRLError

log = logging.getLogger(__name__)

Emit = Callable[[Row], None]
"""Takes a row. A row of the same id replaces the earlier one: more of its alternatives were measured."""


class RowSink(Protocol):
    """Follows the rows of a bench."""

    def row(self, row: Row, earlier: Row | None) -> None:
        """``earlier``: what ``row`` replaces."""


class Recorder:
    """Keeps the rows of one run in order and passes each one on, so that an interrupted run keeps what it measured.

    A sink that fails costs no measurement: it is reported once, and still gets the rows that follow.
    """

    def __init__(self, *sinks: RowSink) -> None:
        self._sinks = sinks
        self._failed: set[int] = set()
        self._rows: dict[str, Row] = {}

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def emit(self, row: Row) -> None:
        earlier = self._rows.get(row.id)
        self._rows[row.id] = row
        for number, sink in enumerate(self._sinks):
            try:
                sink.row(row, earlier)
            except Exception as e:  # whatever it is: what was measured must not be lost
                if number not in self._failed:
                    log.warning("row %s is not passed on to %s: %s", row.id, type(sink).__name__, e)
                self._failed.add(number)


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
        """Raises ConfigError when the file cannot be written."""
        self._path, self._bench, self._command = path, bench, command
        self._at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        self._partial = path.parent / f".{path.name}.partial"
        self._before = self._opened()
        self._rows: dict[str, Row] = {}

    def row(self, row: Row, earlier: Row | None) -> None:
        self._rows[row.id] = row
        self._write(f"{self._at} (incomplete)")

    def finish(self) -> None:
        """Marks the run as complete. Raises ElasticRLError when the file cannot be written any more."""
        try:
            self._write(self._at)
        except OSError as e:
            raise ElasticRLError(f"the results cannot be written to {self._path}: {e.strerror}",
                                 hint="they were printed; the file may lack rows") from e

    def _opened(self) -> str:
        """What the file has already, and the proof that it can be written: this is known before hours of measuring."""
        hint = "name a Markdown file, new or not, in a folder that exists and can be written"
        if self._path.exists() and not self._path.is_file():
            raise ConfigError(f"{self._path} is not a file, so the results cannot be written to it", hint=hint)
        try:
            before = self._path.read_text(encoding="utf-8").rstrip() if self._path.exists() else "# Results"
            before += "\n\n"
            self._partial.write_text(before, encoding="utf-8")
            self._partial.unlink()
        except UnicodeDecodeError as e:
            raise ConfigError(f"{self._path} is not a text file, so the results cannot be appended to it",
                              hint=hint) from e
        except OSError as e:
            raise ConfigError(f"the results cannot be written to {self._path}: {e.strerror}", hint=hint) from e
        return before

    def _write(self, at: str) -> None:
        rows = markdown(self._bench, self._command, list(self._rows.values()), at)
        self._partial.write_text(self._before + rows, encoding="utf-8")
        self._partial.replace(self._path)
