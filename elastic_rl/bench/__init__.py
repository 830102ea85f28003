"""Measurements that the ``bench`` command runs: name → function of the options that returns rows."""

from __future__ import annotations

from collections.abc import Callable

from elastic_rl.bench import control, dcs, loop
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options

BENCHES: dict[str, Callable[[Options], list[Row]]] = {
    "control": control.run, "dcs": dcs.run, "loop": lambda options: loop.run(options.quick)}
