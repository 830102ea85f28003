"""Why groups are dropped that are never taken: what samples, rewards or judges them failed for them."""

from __future__ import annotations

from elastic_rl.data.samples import Group

REWARD_FAILED, GENERATE_FAILED, FILTER_FAILED = "reward failed", "generate failed", "filter failed"
"""Why groups are dropped whose reward failed, or for which the user's function to generate, or a filter, did."""
FAILED = frozenset({REWARD_FAILED, GENERATE_FAILED, FILTER_FAILED})
"""Reasons for which a group is never taken, so that ``max_dropped_groups``, which is for filters that work, does not
count it: the sampling has limits of its own for them."""


def failure(group: Group) -> str:
    """Why a group that failed is dropped: one that could not be generated has no samples."""
    return REWARD_FAILED if group.samples else GENERATE_FAILED
