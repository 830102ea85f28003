"""How the driver deploys a role. Light: a driver that takes over deploys none, and must not import what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic_rl.config import Config


@dataclass(frozen=True)
class RoleSpec:
    """How the driver deploys a role: its class, its replicas and the resources of one replica."""

    name: str
    cls: type | str
    """Class of a replica, or its name (``module:Class``): the driver imports it when it has to deploy it."""
    is_wanted: Callable[[Config], bool] = lambda cfg: True
    """Whether a job of these settings needs the role."""
    replicas: int = 1
    num_cpus: float = 0.25
    max_ongoing_requests: int = 8
