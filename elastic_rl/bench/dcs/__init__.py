"""The checkpoint service measured: each row beside what else could do the same, and beside the machine's limit.

Each module of ``ROWS`` measures one row or a few that belong together, with a ``measure(rig) -> list[Row]`` of its own.
A row that cannot be measured here is in the result all the same and says why.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from elastic_rl.bench.options import Options
from elastic_rl.errors import ConfigError
from elastic_rl.measure import Row
from elastic_rl.processes import freeze_heap

if TYPE_CHECKING:
    from elastic_rl.bench.dcs.rig import Rig

log = logging.getLogger(__name__)

ROWS: Mapping[str, tuple[str, ...]] = {
    "limits": ("limit-memcpy", "limit-tcp", "limit-disk"),
    "deltas": ("P5-bytes", "P5-encode", "P5-decode"),
    "hold": ("P1",),
    "link": ("P2-link",),
    "fleet": ("P2-fleet", "P2-fleet-sent", "P2-fleet-slow", "P2-fleet-slow-sent"),
    "commit": ("commit-100k",),
    "node_memory": ("memory-node",),
    "stall": ("P3", "memory-trainer"),
    "applied": ("P1-apply-1", "P1-apply-2", "P4", "memory-engine"),
}
"""Module → the ids of its rows. A row that is asked for by id brings those of its module with it."""


def wanted(ids: Sequence[str]) -> list[str]:
    """The modules that measure the rows of these ids (all, for none), in order. Raises ConfigError for an unknown id.

    ``P1`` asks for everything of P1: a row is meant by its id and by the part of it that ends at a dash.
    """
    known = [row for rows in ROWS.values() for row in rows]
    for given in ids:
        if not any(_means(given, row) for row in known):
            raise ConfigError(f"there is no row {given!r}", hint=f"rows: {', '.join(known)}")
    return [module for module, rows in ROWS.items()
            if not ids or any(_means(given, row) for given in ids for row in rows)]


def _means(given: str, row: str) -> bool:
    return row == given or row.startswith(given + "-")


def run(options: Options) -> list[Row]:
    """Measures the wanted rows, one module after the other, on processes of their own that all end here."""
    modules = wanted(options.rows)
    from elastic_rl.bench.dcs.rig import Rig  # brings torch: not for those who only ask which rows there are
    rows: list[Row] = []
    with Rig.start(options) as rig:
        for module in modules:
            options.say(f"measuring {', '.join(ROWS[module])}")
            rows += _measure(module, rig)
    return rows


def _measure(module: str, rig: Rig) -> list[Row]:
    """The module's rows; when one fails, those that it owes say why."""
    try:
        found = importlib.import_module(f"{__name__}.{module}")
        freeze_heap()
        rows: list[Row] = list(found.measure(rig))
    except Exception as e:  # whatever it is: it must not cost the other rows
        log.warning("%s could not be measured", module, exc_info=True)
        rows = [Row.unmeasured(row, row, why_of(e)) for row in ROWS[module]]
    missing = set(ROWS[module]) - {row.id for row in rows}
    return rows + [Row.unmeasured(row, row, "its measurement gave no such row") for row in sorted(missing)]


def why_of(error: Exception) -> str:
    """One line about an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
