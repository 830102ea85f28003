"""When a role is deployed again, because it is gone or its hosts are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.schema import ApplicationStatus

from elastic_rl.driver.host_selection import Selection
from elastic_rl.driver.placement import hosts_of
from elastic_rl.host.ray_node import HOST_LABEL, label_of

FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.NOT_STARTED)
"""Serve has given up on it. Everything else it retries by itself."""


@dataclass(frozen=True)
class DeployedRole:
    """A role as Serve has it."""

    status: ApplicationStatus | None
    """None: Serve does not have it."""
    message: str = ""
    hosts: frozenset[str] = frozenset()
    """Labels of the hosts that its replicas may be on; empty where any may, or it was not looked at."""
    lacks_room: bool = False
    """Whether Serve has found no place for one of its replicas yet."""
    nodes: frozenset[str] = frozenset()
    """Ray's ids of the nodes that its replicas are on."""


ABSENT = DeployedRole(None)
_STOPPING = "STOPPING"
"""State of a replica that Serve ends. One that never had a place stays so until its time to finish calls is over."""


def deployed_role(name: str, details: Mapping[str, Any]) -> DeployedRole:
    """A role as the details of Serve's application have it."""
    deployment = details.get("deployments", {}).get(name, {})
    options = deployment.get("deployment_config", {}).get("ray_actor_options") or {}
    condition = str((options.get("label_selector") or {}).get(HOST_LABEL, ""))
    replicas = deployment.get("replicas", ())
    nodes = [replica.get("node_id") for replica in replicas]
    without_room = any(not replica.get("node_id") for replica in replicas if replica.get("state") != _STOPPING)
    return DeployedRole(ApplicationStatus(details["status"]), str(details.get("message", "")), hosts_of(condition),
                        lacks_room=without_room, nodes=frozenset(node for node in nodes if node))


def is_due(role: DeployedRole, selection: Selection | None, leaving: Collection[str]) -> bool:
    """Whether the role is to be deployed now. ``selection``: of its hosts; None: the one of the run, which leaves with
    the run. ``leaving``: Ray's ids of the nodes that are to be emptied.

    All its replicas would start again. So it is left alone, also while it starts, when other hosts might have it too,
    as they join. It moves when one of its hosts is to be emptied, unless it is on its way from there, when none of
    those that it may be on is fit any more, and when Serve finds no room on them and there are further ones.
    """
    if selection is not None and selection.waits_for:
        return False
    if role.status is None or role.status in FAILED:
        return True
    if selection is None or role.hosts == (wanted := frozenset(map(label_of, selection.among or ()))):
        return False
    if not role.hosts <= wanted and not role.nodes.isdisjoint(leaving):
        return True
    return role.status is not ApplicationStatus.RUNNING and (
        role.hosts.isdisjoint(wanted) or (role.lacks_room and not wanted <= role.hosts))
