"""A measurement of many rows: which module measures which, and how one that fails costs no other."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options
from elastic_rl.errors import ConfigError
from elastic_rl.runtime import freeze_heap

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Suite:
    """Rows of one bench. Each module measures one row or a few that belong together, with a ``measure(rig)`` of its
    own."""

    package: str
    """Name of the package that holds the modules."""
    rows: Mapping[str, tuple[str, ...]]
    """Module → the ids of its rows. A row that is asked for by id brings those of its module with it."""

    def wanted(self, ids: Sequence[str]) -> list[str]:
        """The modules that measure the rows of these ids (all, for none), in order. Raises ConfigError for an unknown
        id. ``P1`` asks for everything of P1: a row is meant by its id and by the part of it that ends at a dash."""
        known = [row for rows in self.rows.values() for row in rows]
        for given in ids:
            if not any(_means(given, row) for row in known):
                raise ConfigError(f"there is no row {given!r}", hint=f"rows: {', '.join(known)}")
        return [module for module, rows in self.rows.items()
                if not ids or any(_means(given, row) for given in ids for row in rows)]

    def run(self, options: Options, start: Callable[[], AbstractContextManager[Any]]) -> list[Row]:
        """Measures the wanted rows, one module after the other, on a rig that ``start`` makes and that ends here."""
        modules = self.wanted(options.rows)
        rows: list[Row] = []
        with start() as rig:
            for module in modules:
                options.say(f"measuring {', '.join(self.rows[module])}")
                rows += self.measure(module, rig)
        return rows

    def measure(self, module: str, rig: Any) -> list[Row]:
        """The module's rows; when one fails, those that it owes say why."""
        try:
            found = importlib.import_module(f"{self.package}.{module}")
            freeze_heap()
            rows: list[Row] = list(found.measure(rig))
        except Exception as e:  # whatever it is: it must not cost the other rows
            log.warning("%s could not be measured", module, exc_info=True)
            rows = [Row.unmeasured(row, row, why_of(e)) for row in self.rows[module]]
        missing = set(self.rows[module]) - {row.id for row in rows}
        return rows + [Row.unmeasured(row, row, "its measurement gave no such row") for row in sorted(missing)]


def _means(given: str, row: str) -> bool:
    return row == given or row.startswith(given + "-")


def why_of(error: Exception) -> str:
    """One line about an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
