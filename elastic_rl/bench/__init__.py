"""Measurements that the ``bench`` command runs: name → function that emits rows as it measures them."""

from __future__ import annotations

from collections.abc import Callable

from elastic_rl.bench import control, dcs, loop
from elastic_rl.bench.options import Options
from elastic_rl.bench.recorder import Emit

BENCHES: dict[str, Callable[[Options, Emit], None]] = {"control": control.run, "dcs": dcs.run, "loop": loop.run}
