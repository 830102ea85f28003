"""Every role that the driver can deploy, by name."""

from __future__ import annotations

from elastic_rl.roles.spec import RoleSpec

ROLES: dict[str, RoleSpec] = {
    spec.name: spec
    for spec in (
        RoleSpec("rollout", "elastic_rl.roles.rollout:RolloutRole", lambda cfg: cfg.uses_engines,
                 max_ongoing_requests=4128),
        RoleSpec("advantages", "elastic_rl.roles.advantages:AdvantagesRole", lambda cfg: cfg.makes_batches),
        RoleSpec("genrm", "elastic_rl.roles.genrm:GenRmRole",
                 lambda cfg: cfg.uses_engines and "genrm" in cfg.rollout.reward_names, max_ongoing_requests=64),
        RoleSpec("teacher", "elastic_rl.roles.teacher:TeacherRole",
                 lambda cfg: cfg.uses_engines and cfg.uses_trainer and cfg.algorithm.teacher is not None,
                 max_ongoing_requests=64),
        RoleSpec("actor", "elastic_rl.roles.actor:ActorRole", finishes_calls=False),
    )
}
