"""Limits that depend on one another, as a table, and its checker. Pure.

A wait that encloses another one must be the longer one: else the outer one ends first, and blames the part that waited
for the one that was slow. Such a pair is a row here; a test tries each row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Ordered:
    """One setting stays below another. Both may be products of a number and settings, as in ``a.b * (c.d + 1)``."""

    smaller: str
    larger: str
    why: str
    may_equal: bool = False
    only_if: str = ""
    """Property of the configuration that says whether it matters; "": always."""

    def holds(self, cfg: BaseModel) -> bool:
        if self.only_if and not getattr(cfg, self.only_if):
            return True
        small, large = value_of(self.smaller, cfg), value_of(self.larger, cfg)
        return small <= large if self.may_equal else small < large

    def explain(self, cfg: BaseModel) -> str:
        """What is wrong, with both keys and values, and what to set."""
        small, large = value_of(self.smaller, cfg), value_of(self.larger, cfg)
        word = "at least" if self.may_equal else "larger than"
        return (f"{self.larger}={large:g} must be {word} {self.smaller}={small:g}: {self.why}; set a larger "
                f"{keys_of(self.larger)[0]} or a smaller {keys_of(self.smaller)[0]}")


LIMITS = (
    # What the trainer's ranks and the leader wait for, from the inside to the outside.
    Ordered("dcs.io_timeout_s", "dcs.publish_timeout_s",
            "one answer of a node that is slow would take the whole publish"),
    Ordered("dcs.publish_timeout_s", "coordinator.hang_max_s",
            "a rank makes no progress while it waits for the publish before, and would count as hung"),
    Ordered("trainer.collective_timeout_s", "coordinator.hang_max_s",
            "a rank whose peer is lost must end by itself before it counts as hung"),
    Ordered("trainer.collective_timeout_s", "trainer.start_timeout_s",
            "ranks that wait for one that does not join must end, and join again, within the start"),
    # Engines.
    Ordered("engine.apply_timeout_s", "coordinator.hang_max_s",
            "an engine makes no progress while it loads a version, and would count as hung"),
    Ordered("dcs.io_timeout_s", "coordinator.hang_max_s",
            "whoever pulls makes no progress while it waits for a node, and would count as hung"),
    Ordered("engine.request_timeout_s", "engine.drain_timeout_s",
            "an engine that is scaled in must be able to finish a request that it has begun", may_equal=True),
    Ordered("engine.drain_timeout_s", "engine.release_timeout_s",
            "an engine whose turn is over must be able to finish the requests that it has", only_if="colocated"),
    Ordered("engine.apply_timeout_s", "engine.release_timeout_s",
            "an engine whose turn is over must be able to finish the update that it has begun", only_if="colocated"),
    Ordered("coordinator.reconcile_interval_s", "coordinator.hang_max_s",
            "the driver reports its progress once in each pass, and would count as hung"),
    Ordered("train.queue_call_timeout_s", "coordinator.hang_max_s",
            "the actor makes no progress while it waits for the queue, and would count as hung"),
    # etcd and leases.
    Ordered("etcd.retry_budget_s", "coordinator.reconcile_deadline_s",
            "the leader would be blamed for an outage of etcd"),
    Ordered("coordinator.reconcile_interval_s", "coordinator.reconcile_deadline_s",
            "the leader would resign between two passes"),
    Ordered("coordinator.lease_ttl_s", "alerts.leader_gap_s",
            "another leader takes over only when the lease of the one before ends, which would be an alert"),
    # Failure policy.
    Ordered("failure_policy.fault_merge_s", "failure_policy.fault_window_s",
            "faults would be forgotten before a second one could count"),
)

_KEY = re.compile(r"[a-z_]+\.[a-z_]+")


def keys_of(expression: str) -> list[str]:
    """The settings in an expression, in order."""
    return _KEY.findall(expression)


def value_of(expression: str, cfg: BaseModel) -> float:
    """The value of a key, or of ``a.b * (c.d + 1)``."""
    first, *rest = keys_of(expression)
    value = float(_get(first, cfg))
    for key in rest:
        value *= float(_get(key, cfg)) + 1
    return value


def broken(cfg: BaseModel, limits: Iterable[Ordered] = LIMITS) -> Iterator[str]:
    """A message for each limit that does not hold."""
    return (limit.explain(cfg) for limit in limits if not limit.holds(cfg))


def _get(key: str, cfg: Any) -> Any:
    for part in key.split("."):
        cfg = getattr(cfg, part)
    return cfg
