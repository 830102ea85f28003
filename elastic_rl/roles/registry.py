"""Every role that the driver can deploy, by name."""

from __future__ import annotations

from elastic_rl.roles.actor import ActorRole
from elastic_rl.roles.advantages import AdvantagesRole
from elastic_rl.roles.base import RoleSpec
from elastic_rl.roles.genrm import GenRmRole
from elastic_rl.roles.rollout import RolloutRole
from elastic_rl.roles.teacher import TeacherRole

ROLES: dict[str, RoleSpec] = {
    spec.name: spec
    for spec in (
        RoleSpec("rollout", RolloutRole, max_ongoing_requests=96),
        RoleSpec("advantages", AdvantagesRole),
        RoleSpec("genrm", GenRmRole, max_ongoing_requests=64),
        RoleSpec("teacher", TeacherRole, max_ongoing_requests=64),
        RoleSpec("actor", ActorRole),
    )
}
