"""Limits of the failure policy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class FailurePolicyConfig(Section):
    """How often a part is restarted in place before the whole compute plane is, and when the run is stopped."""

    max_faults: Positive = 5
    """Number of faults of one part (the trainer group, a role, the driver) in a row, without a step of the run in
    between, that are handled by a restart in place. One more leads to a global restart."""
    fault_window_s: Seconds = 3600.0
    """Faults of one part are in a row while each comes within this many seconds of the one before: longer than a part
    may take to be there again and to fail."""
    fault_merge_s: Seconds = 10.0
    """Faults of one part within this many seconds of each other count as one, since the ranks of a group fail
    together."""
    backoff_initial_s: Seconds = 2.0
    """Seconds before the second restart of a part. The first one follows at once, and each further one waits twice as
    long as the one before, up to ``backoff_max_s``."""
    backoff_max_s: Seconds = 300.0
    """Longest pause, in seconds, before a restart."""
    max_global_restarts: Annotated[int, Field(ge=2)] = 4
    """Number of global restarts in a row after which the run is stopped as a crash loop, if it has got no further
    meanwhile: no step, no finished prompt group and no part of a step. So many ends of the driver are one too; the last
    but one leads to a global restart. Restarts are in a row while each comes soon after the one before:
    ``crash_loop_window_s``, ``crash_loop_steps``."""
    crash_loop_window_s: Seconds = 3600.0
    """Seconds within which a restart comes soon after the one before, at least."""
    crash_loop_steps: Annotated[float, Field(gt=0)] = 10.0
    """A restart also comes soon after the one before within the time that so many steps usually take."""
