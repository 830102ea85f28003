"""Budgets of the failure policy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class FailurePolicyConfig(Section):
    """Budgets of the failure policy (coordinator/failure/policy.py)."""

    budget: Positive = 5
    """Faults of one part (the trainer group, a role) within ``window_s`` that are mended in place; one more is a global
    restart."""
    window_s: Seconds = 600.0
    backoff_s: Seconds = 2.0
    """Pause before the second restart of a part; it doubles with each further one ..."""
    backoff_max_s: Seconds = 300.0
    """... up to this."""
    settle_s: Seconds = 10.0
    """Faults of one part that come within this time of each other are one."""
    stop_after: Annotated[int, Field(ge=2)] = 4
    """Global restarts without progress in between after which the run is stopped."""
