"""Measurements that the ``bench`` command runs: name → function of ``quick`` that returns rows."""

from __future__ import annotations

from collections.abc import Callable

from elastic_rl.bench import loop
from elastic_rl.measure import Row

BENCHES: dict[str, Callable[[bool], list[Row]]] = {"loop": loop.run}
