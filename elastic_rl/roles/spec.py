"""How the driver deploys a role. Light: a driver that takes over deploys none, and must not import what they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_rl.config import Config, RoleConfig


@dataclass(frozen=True)
class RoleSpec:
    """How the driver deploys a role."""

    name: str
    cls: type | str
    """Class of a replica, or its name (``module:Class``): the driver imports it when it has to deploy it."""
    is_wanted: Callable[[Config], bool] = lambda cfg: True
    """Whether a job of these settings needs the role."""
    max_ongoing_requests: int = 8
    """Requests that one replica has at once, at most."""
    finishes_calls: bool = True
    """Whether a replica that ends finishes the calls that it has first. The actor has none that does not go on where
    another replica takes the job over."""
    settings: RoleConfig = RoleConfig()
    """Its replicas, and the resources and hosts of each."""

    def of(self, cfg: Config) -> RoleSpec:
        """The role as a job of these settings has it."""
        return replace(self, settings=cfg.role_settings(self.name))
