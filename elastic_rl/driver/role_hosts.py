"""When a role is deployed again, because it is gone or its hosts are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ray.serve.schema import ApplicationStatus

from elastic_rl.driver.host_selection import Selection
from elastic_rl.driver.placement import among_hosts
from elastic_rl.host.ray_node import HOST_LABEL

FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.NOT_STARTED)
"""Serve has given up on it. Everything else it retries by itself."""


@dataclass(frozen=True)
class DeployedRole:
    """A role as Serve has it."""

    status: ApplicationStatus | None
    """None: Serve does not have it."""
    message: str = ""
    hosts: str = ""
    """The condition on its replicas' hosts; empty where it has none, or it was not looked at."""
    nodes: frozenset[str] = frozenset()
    """Ray's ids of the nodes that its replicas are on."""


ABSENT = DeployedRole(None)


def deployed_role(name: str, details: Mapping[str, Any]) -> DeployedRole:
    """A role as the details of Serve's application have it."""
    deployment = details.get("deployments", {}).get(name, {})
    options = deployment.get("deployment_config", {}).get("ray_actor_options") or {}
    return DeployedRole(ApplicationStatus(details["status"]), str(details.get("message", "")),
                        str((options.get("label_selector") or {}).get(HOST_LABEL, "")),
                        frozenset(replica["node_id"] for replica in deployment.get("replicas", ())
                                  if replica.get("node_id")))


def is_due(role: DeployedRole, selection: Selection | None, leaving: Collection[str]) -> bool:
    """Whether the role is to be deployed now. ``selection``: of its hosts; None: the one of the run, which leaves with
    the run. ``leaving``: Ray's ids of the nodes that are to be emptied.

    One that runs is left alone when other hosts might have it too: all its replicas would start again. It moves when
    one of its hosts is to be emptied, and when Serve cannot run it where it was to be.
    """
    if selection is not None and selection.waits_for:
        return False
    if role.status is None or role.status in FAILED:
        return True
    if selection is None or role.hosts == among_hosts(selection.among or ()):
        return False
    return role.status is not ApplicationStatus.RUNNING or not role.nodes.isdisjoint(leaving)
