"""Every role that the driver can deploy, by name."""

from __future__ import annotations

from elastic_rl.roles.actor import ActorRole
from elastic_rl.roles.advantages import AdvantagesRole
from elastic_rl.roles.base import RoleSpec
from elastic_rl.roles.rollout import RolloutRole

ROLES: dict[str, RoleSpec] = {
    spec.name: spec
    for spec in (
        RoleSpec("rollout", RolloutRole, max_ongoing_requests=64),
        RoleSpec("advantages", AdvantagesRole, trains=True),
        RoleSpec("actor", ActorRole, samples=False),
    )
}
