"""What the updates of the last steps did to the policy, for the job's status. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from elastic_rl.etcd.records import JobStatus

_STEPS = 10
MOST_KL = 1000.0
"""Nats that stand for all that is more, and for what is no number: JSON has neither."""


class RecentUpdates:
    """The divergences of the last ten steps that were made. One step that is far off must not be an alert that ends
    with the next step, and one with each such step."""

    def __init__(self) -> None:
        self._kl: deque[tuple[int, float]] = deque(maxlen=_STEPS)

    def add(self, step: int, trained: Mapping[str, Any], before: JobStatus) -> dict[str, Any]:
        """Fields of ``JobStatus`` after a step. ``trained``: what the trainer answered; ``before``: the status before
        it."""
        while self._kl and self._kl[-1][0] >= step:  # a recovery has undone it
            self._kl.pop()
        if isinstance(kl := trained.get("kl"), int | float):
            self._kl.append((step, min(kl, MOST_KL) if math.isfinite(kl) else MOST_KL))
        lr = _finite(trained.get("lr"))
        found = {"lr": lr, "entropy": _finite(trained.get("entropy"))}
        if not self._kl:
            return {**found, "update_kl": None, "update_kl_step": 0}
        at, largest = max(self._kl, key=lambda each: each[1])
        last = self._kl[-1][1]
        if before.worst_kl is None or before.worst_kl_step >= step or last > before.worst_kl:
            found |= {"worst_kl": last, "worst_kl_step": step, "worst_kl_lr": lr}
        return {**found, "update_kl": largest, "update_kl_step": at}


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
