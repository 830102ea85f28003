"""Targets of operations, restarts and faults: ``pools/NAME``, ``engines/ID``, ``roles/NAME``, ``trainer``, ``job``."""

from __future__ import annotations

TRAINER = "trainer"
"""The trainer group, all of its ranks."""
JOB = "job"
"""The whole compute plane."""


def pool_target(name: str) -> str:
    return f"pools/{name}"


def engine_target(engine_id: str) -> str:
    return f"engines/{engine_id}"


def role_target(name: str) -> str:
    return f"roles/{name}"


def name_of(target: str) -> str:
    """``rollout`` of ``pools/rollout``; a target without a name is its own."""
    return target.partition("/")[2] or target
