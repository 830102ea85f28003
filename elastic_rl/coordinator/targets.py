"""Targets of operations, restarts and faults: ``pools/NAME``, ``engines/ID``, ``roles/NAME``, ``driver``, ``job``, and
the trainer groups by their names, ``trainer``, ``critic``, ``actor_fwd`` and ``reference``: all ranks of one."""

from __future__ import annotations

JOB = "job"
"""The whole compute plane."""
DRIVER = "driver"
"""The driver alone: the next one takes over what runs."""


def pool_target(name: str) -> str:
    return f"pools/{name}"


def router_target(pool: str) -> str:
    """The router of a pool, in what the driver reports."""
    return f"routers/{pool}"


def engine_target(engine_id: str) -> str:
    return f"engines/{engine_id}"


def role_target(name: str) -> str:
    return f"roles/{name}"


def name_of(target: str) -> str:
    """``rollout`` of ``pools/rollout``; a target without a name is its own."""
    return target.partition("/")[2] or target
