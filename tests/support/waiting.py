"""Waits of tests for events. Their ends say that something will not happen any more; what is only slow, on a machine
that other programs keep busy, must not fail a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic_rl.runtime import waiting

T = TypeVar("T")

PATIENCE_S = 300.0


def wait_until(check: Callable[..., T | None], *, what: str, timeout_s: float = PATIENCE_S, poll_s: float = 0.05,
               alive: Callable[..., bool] | None = None) -> T:
    """The product's ``wait_until`` with a generous end."""
    return waiting.wait_until(check, timeout_s=timeout_s, what=what, poll_s=poll_s, alive=alive)
