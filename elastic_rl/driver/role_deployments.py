"""Keeps the roles deployed on Ray Serve, each as an application of its own, so that one can be replaced alone.

Serve's calls block while its controller starts or is slow, so they are made in a thread of their own.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE  # nor for its controller
from ray.serve.context import _get_global_client  # Serve has no public name for where replicas are
from ray.serve.schema import ApplicationStatus

from elastic_rl.config import RoleConfig
from elastic_rl.driver.host_selection import Selection, beyond_every_host, select
from elastic_rl.driver.hosts_of_ray import RayHosts
from elastic_rl.driver.placement import among_hosts
from elastic_rl.driver.plan import StartBudget
from elastic_rl.driver.role_hosts import ABSENT, FAILED, DeployedRole, deployed_role, is_due
from elastic_rl.errors import Fenced
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.ray_node import HOST_LABEL, RUN_HOST
from elastic_rl.roles.spec import RoleSpec
from elastic_rl.runtime.imports import class_of

log = logging.getLogger(__name__)

_AGAIN_S = 5.0
"""Pause before a role is deployed again at the earliest: Serve lists one a moment after it was deployed."""
_INTERVAL_S = 1.0
_QUIET_INTERVAL_S = 10.0
"""Interval between looks at Serve while every role runs: Serve's answer has all of its state, and is not cheap."""
_JOIN_TIMEOUT_S = 5.0
_END_S = 5.0
"""Time for a replica without calls to finish to end."""


class RoleDeployments:
    """Level-triggered: a role whose application is absent, or which Serve has given up on, is deployed again, with
    backoff and without end."""

    def __init__(self, ctx: RunContext, specs: Mapping[str, RoleSpec], require: Callable[[], None] = lambda: None,
                 hosts: Callable[[], RayHosts] = RayHosts, *, run_host: str = "") -> None:
        """``require``: called before roles are deployed; raises Fenced once a newer driver has begun. ``hosts``: those
        of the cluster as they were read last. ``run_host``: name of the driver's."""
        self._run_host = run_host
        self._ctx, self._specs, self._require, self._hosts = ctx, specs, require, hosts
        self._spread = frozenset(name for name, spec in specs.items() if spec.settings.host_selector)
        """Roles that are not on the host of the run."""
        self._nodes: frozenset[str] = frozenset()
        self._budgets = {name: StartBudget(base_s=_AGAIN_S) for name in specs}
        self._faults: dict[str, str] = {}
        self._waiting: dict[str, str] = {name: "it is to be deployed" for name in specs}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="role-deployments", daemon=True)

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    @property
    def fault(self) -> str:
        """Why roles cannot be deployed; empty when none has failed."""
        with self._lock:
            return "; ".join(f"{name}: {fault}" for name, fault in sorted(self._faults.items()))

    @property
    def waiting(self) -> str:
        """What the roles wait for; empty when all of them run."""
        with self._lock:
            return "; ".join(f"{name}: {state}" for name, state in sorted(self._waiting.items()))

    @property
    def nodes(self) -> frozenset[str]:
        """Ray's ids of the nodes with replicas of roles that are not on the host of the run."""
        with self._lock:
            return self._nodes

    @property
    def is_calling(self) -> bool:
        """Whether the thread is there, and may be in a call of Serve's. A call of Ray's by any thread after
        ``ray.shutdown`` ends the process at once, or connects it again."""
        return self._thread.is_alive()

    def leave(self) -> None:
        """Ends the thread, and no role. A call of Serve's that takes longer than that waits goes on (``is_calling``).
        """
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_TIMEOUT_S)

    def close(self) -> None:
        """Ends the roles. A Serve that does not answer is killed, with which a call of the thread's ends, too."""
        self.leave()
        if ray.is_initialized() and not self._end_serve():
            self._kill_serve()
            self.leave()

    def _end_serve(self) -> bool:
        """Has Serve end the roles; returns whether it does. The replicas that finish their calls are killed: nobody
        waits for those, and Serve would. It is told first that it ends, since it would start others in their place."""
        if self.is_calling:
            return False
        try:
            controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
            ray.get(controller.graceful_shutdown.remote(False), timeout=_JOIN_TIMEOUT_S)
        except ValueError:  # there is none
            return True
        except RayError as e:
            log.warning("Serve does not end the roles, and is killed: %s", e)
            return False
        for name, spec in self._specs.items():
            if spec.finishes_calls:
                kill_replicas(name)
        serve.shutdown()
        return True

    def _kill_serve(self) -> None:
        with contextlib.suppress(ValueError, RayError):  # it has ended
            ray.kill(ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE))
        for name in self._specs:
            kill_replicas(name)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._pass()
            except Fenced:  # the driver's passes find it too, and end it
                log.warning("a newer driver deploys the roles")
                return
            except Exception as e:  # Serve raises what its controller's failure happens to be
                log.warning("roles could not be deployed: %s", e, exc_info=e)
                self._set(dict.fromkeys(self._specs, f"{type(e).__name__}: {e}"[:200]), {})
            self._stopping.wait(_INTERVAL_S if self.waiting or self.fault else _QUIET_INTERVAL_S)

    def _pass(self) -> None:
        found, hosts = self._look(), self._hosts()
        selections = {name: select(self._specs[name].settings.host_selector, hosts) for name in self._spread}
        roles = {name: found.get(name, ABSENT) for name in self._specs}
        faults = {name: f"Serve could not deploy it: {role.message}"[:200]
                  for name, role in roles.items() if role.status in FAILED}
        waiting = {name: str(role.status.value) if role.status else "it is to be deployed"
                   for name, role in roles.items() if role.status is not ApplicationStatus.RUNNING
                   and name not in faults}
        for name in waiting:
            among = selections[name].among if name in selections else {self._run_host}
            waiting[name] = beyond_every_host(_request(self._specs[name].settings), hosts, among) or waiting[name]
        waiting |= {name: selection.waits_for for name, selection in selections.items() if selection.waits_for
                    and roles[name].status is not ApplicationStatus.RUNNING}
        with self._lock:
            self._nodes = frozenset(node for name in self._spread for node in roles[name].nodes)
        self._set(faults, waiting)
        now = time.monotonic()
        due = [name for name, role in roles.items() if self._budgets[name].open(now)
               and is_due(role, selections.get(name), hosts.leaving.keys())]
        if due and not self._stopping.is_set():  # the thread ends after the call that it is in
            self._deploy({name: selections.get(name) for name in due})
            for name in due:
                self._budgets[name] = self._budgets[name].after_failure(now, jitter=random.random())

    def _look(self) -> dict[str, DeployedRole]:
        """The roles as Serve has them. Where they are it says in an answer that is larger."""
        if not self._spread:
            return {name: DeployedRole(app.status, app.message) for name, app in serve.status().applications.items()}
        client = _get_global_client(raise_if_no_controller_running=False)
        return {} if client is None else {name: deployed_role(name, app) for name, app in client.get_serve_details()[
            "applications"].items()}

    def _deploy(self, roles: Mapping[str, Selection | None]) -> None:
        """Starts Serve too if it does not run. All of them at once: Serve knows them before the first replica starts,
        so a role may look up the others."""
        self._require()
        serve.start(proxy_location="Disabled")  # roles are called through handles; nothing listens for HTTP
        targets = [serve.RunTarget(self._application(self._specs[name], selection), name=name, route_prefix=None)
                   for name, selection in roles.items()]
        if not self._stopping.is_set():
            serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    def _application(self, spec: RoleSpec, selection: Selection | None) -> serve.Application:
        """``selection``: of the hosts that it may be on; None: the one of the run."""
        settings = spec.settings
        options: dict[str, Any] = {"num_cpus": settings.cpus, "resources": {RUN_HOST: 1.0}}
        if selection is not None:
            options |= {"resources": {}, "label_selector": {HOST_LABEL: among_hosts(selection.among or ())}}
        if settings.gpus:
            options["num_gpus"] = settings.gpus
        if settings.memory_bytes:
            options["memory"] = settings.memory_bytes
        return serve.deployment(class_of(spec.cls)).options(
            name=spec.name, num_replicas=settings.replicas, max_ongoing_requests=spec.max_ongoing_requests,
            health_check_period_s=1.0, health_check_timeout_s=10.0,
            graceful_shutdown_timeout_s=self._finish_s(spec), ray_actor_options=options).bind(self._ctx)

    def _finish_s(self, spec: RoleSpec) -> float:
        """Seconds for which a replica that moves finishes the calls that it has, while others get those that come. One
        that is cut then is called again by the actor."""
        return self._ctx.config.engine.request_timeout_s if spec.finishes_calls else _END_S

    def _set(self, faults: dict[str, str], waiting: dict[str, str]) -> None:
        with self._lock:
            self._faults, self._waiting = faults, waiting


def _request(settings: RoleConfig) -> dict[str, float]:
    """What a replica asks for of Ray's resources."""
    asked = {"CPU": settings.cpus, "GPU": settings.gpus, "memory": float(settings.memory_bytes)}
    return {name: amount for name, amount in asked.items() if amount}


def kill_replicas(name: str) -> None:
    """Kills every replica of a role; Serve starts new ones, and handles that others hold stay valid."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith(f"SERVE_REPLICA::{name}#"):
            with contextlib.suppress(ValueError):  # the replica has ended meanwhile
                ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
