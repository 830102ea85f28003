"""A bench of many rows: which module measures which. A module that fails costs no row of another."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options, is_selected
from elastic_rl.bench.recorder import Emit
from elastic_rl.errors import ConfigError
from elastic_rl.runtime.process import freeze_heap

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Suite:
    """The modules of a bench. Each has ``measure(testbed)``, which yields its rows as soon as it has them; a row may
    come again with further alternatives. Rows that are measured together belong to one module."""

    package: str
    """Name of the package that holds the modules."""
    rows: Mapping[str, tuple[str, ...]]
    """Module → the ids of all its rows."""
    other_packages: Mapping[str, str] = field(default_factory=dict)
    """Module → its package, where that is another one."""

    def extended(self, package: str, rows: Mapping[str, tuple[str, ...]]) -> Suite:
        """This suite with the modules of another package as well; those of the same name replace its own."""
        return Suite(self.package, {**self.rows, **rows}, {**self.other_packages, **dict.fromkeys(rows, package)})

    def modules(self, ids: Sequence[str]) -> list[str]:
        """The modules that measure the rows of these ids (all, for none), in order. Raises ConfigError for an unknown
        id."""
        require_known(ids, [row for rows in self.rows.values() for row in rows])
        return [module for module, rows in self.rows.items() if not ids or any(is_selected(row, ids) for row in rows)]

    def run(self, options: Options, emit: Emit, start: Callable[[], AbstractContextManager[Any]], *,
            among: Collection[str] | None = None) -> None:
        """Measures the selected rows, one module after the other, on a testbed that ``start`` makes and that ends
        here. Rows that a module measures along with a selected one are emitted too. ``among``: the modules that this
        testbed is for; None: all."""
        modules = [module for module in self.modules(options.rows) if among is None or module in among]
        if not modules:
            return
        with start() as testbed:
            for module in modules:
                options.say(f"measuring {', '.join(self.rows[module])}")
                self.measure(module, testbed, emit, options.rows)

    def measure(self, module: str, testbed: Any, emit: Emit, ids: Sequence[str] = ()) -> None:
        """Emits the module's rows. The selected rows (all, for no ids) that it failed to measure are emitted with the
        reason."""
        missing = dict.fromkeys(row for row in self.rows[module] if is_selected(row, ids))
        why = "its measurement gave no such row"
        try:
            found = importlib.import_module(f"{self.other_packages.get(module, self.package)}.{module}")
            freeze_heap()
            with contextlib.ExitStack() as stack:
                rows: Iterable[Row] = found.measure(testbed)
                if hasattr(rows, "close"):  # ends what a generator started, at once
                    stack.callback(rows.close)
                for row in rows:
                    if row.id not in self.rows[module]:
                        raise KeyError(f"row {row.id} is not listed in the suite")
                    missing.pop(row.id, None)
                    emit(row)
        except Exception as e:  # whatever it is: it must not cost the other rows
            log.warning("%s could not be measured", module, exc_info=True)
            why = why_of(e)
        for row_id in missing:
            emit(Row.unmeasured(row_id, row_id, why))


def require_known(ids: Sequence[str], known: Sequence[str]) -> None:
    """Raises ConfigError for an id that selects none of the known rows."""
    for given in ids:
        if not any(is_selected(row, [given]) for row in known):
            raise ConfigError(f"there is no row {given!r}", hint=f"rows: {', '.join(known)}")


def why_of(error: Exception) -> str:
    """One line about an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
