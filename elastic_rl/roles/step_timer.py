"""Measures the seconds of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class StepTimer:
    """Adds up named phases. ``total`` spans the others; ``other`` is the time that no phase covers."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - start

    def seconds(self, *, inside: Mapping[str, tuple[str, float]] | None = None) -> dict[str, float]:
        """Seconds by phase, with ``other`` and ``total``. ``inside``: part → (its phase, its seconds); the seconds are
        subtracted from the phase."""
        out = dict(self._spent)
        for part, (phase, spent) in (inside or {}).items():
            out[part] = spent
            out[phase] = max(0.0, out[phase] - spent)
        total = out.pop("total", sum(out.values()))
        return {**out, "other": max(0.0, total - sum(out.values())), "total": total}
