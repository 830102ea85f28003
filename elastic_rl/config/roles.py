"""Replicas of the roles, and the resources and hosts of each."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.host_selector import HostSelector
from elastic_rl.config.section import Positive, Section

RoleName = Literal["rollout", "advantages", "genrm", "teacher"]
"""Roles of which any replica may answer; of the actor there is one."""


class RoleConfig(Section):
    """How a role is deployed."""

    replicas: Positive = 1
    """Number of replicas. With several, the calls of the actor are shared between them, and the loss of one costs the
    calls that it had."""
    cpus: Annotated[float, Field(gt=0)] = 0.1
    """CPUs that Ray sets aside for a replica, of those that its host has. It places replicas by that and limits none:
    by default they mostly wait. Set what code of your own needs."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of a replica, for code of your own in it; a share of one GPU may be set. Its engines have their own."""
    memory_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory that Ray sets aside for a replica; a replica that takes more is not ended for that. 0: none."""
    host_selector: HostSelector = {}
    """Labels that a host must have, all of them with these values, for a replica to be on it (``elastic-rl node
    --label``), in a cluster with a name. Such a host has what the role imports and reads: your own functions, and for
    ``genrm`` and ``teacher`` the folder of their pool's model. Empty: replicas are on the host of the run."""
