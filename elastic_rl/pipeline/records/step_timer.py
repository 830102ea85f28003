"""Measures the seconds of the stages of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepTimer:
    """Adds up named stages of a step that began with this object."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._spent: dict[str, float] = {}
        self._within = 0.0
        """Seconds of stages within the one that goes on."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Stages within this one count as themselves only."""
        start, outer, self._within = time.perf_counter(), self._within, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self._spent[name] = self._spent.get(name, 0.0) + spent - self._within
            self._within = outer + spent

    def move(self, stage: str, other: str, seconds: float) -> None:
        """Counts seconds of a stage, which had them inside, as another one's."""
        self._spent[other] = self._spent.get(other, 0.0) + seconds
        self._spent[stage] = max(0.0, self._spent.get(stage, 0.0) - seconds)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, with ``total`` since the step began and ``other``, which no stage covers."""
        total = time.perf_counter() - self._began
        return {**self._spent, "other": max(0.0, total - sum(self._spent.values())), "total": total}
