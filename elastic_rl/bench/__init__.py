"""Measurements that the ``bench`` command runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastic_rl.bench import control, dcs, loop, recovery
from elastic_rl.bench.options import Options
from elastic_rl.bench.recorder import Emit


@dataclass(frozen=True)
class Benches:
    """Benches that one program offers."""

    program: str
    """The command that runs one, without its name."""
    by_name: Mapping[str, Callable[[Options, Emit], None]]
    """Functions that emit rows as they measure them."""


BENCHES = Benches("elastic-rl bench", {"control": control.run, "dcs": dcs.run, "loop": loop.run,
                                          "recovery": recovery.run})
