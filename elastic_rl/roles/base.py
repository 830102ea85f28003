"""What every role has: a name, a connection to etcd, and a membership with progress."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import ClassVar

from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.paths import JobPaths
from elastic_rl.roles.actor_requests import ActorRequests
from elastic_rl.roles.host_needs import role_context
from elastic_rl.telemetry import logs, traces
from elastic_rl.telemetry.log_files import redirect_output


class Role:
    """Base of a role's replica. It registers as a member from inside its own process, so that the leader sees its
    progress: a replica that hangs differs from one that is dead.

    Ray Serve calls ``check_health``, where a subclass defines it, and replaces a replica that raises.
    """

    name: ClassVar[str]

    def __init__(self, ctx: RunContext) -> None:
        """``ctx``: as the driver has it. Raises ConfigError where this host lacks something."""
        self.ctx = ctx = role_context(ctx, self.name)
        cfg = ctx.config
        redirect_output(JobPaths.of(cfg).log(self.name))  # its plug-in processes write there too
        logs.setup(f"role.{self.name}", cfg.telemetry.log_level)
        traces.setup(cfg.telemetry.otlp_endpoint, f"elastic-rl.{self.name}")
        self.etcd: EtcdClient = ctx.connect()
        self.member = Membership(self.etcd, ctx.keys, self.name, f"{self.name}-{uuid.uuid4().hex[:6]}",
                                 ttl_s=cfg.coordinator.lease_ttl_s, epoch=ctx.epoch,
                                 info={"pid": os.getpid()}, heartbeats=heartbeats_here(cfg)).start()

    def close(self) -> None:
        """Signs the replica off."""
        self.member.close()
        self.etcd.close()

    def __del__(self) -> None:
        # Called by Serve's graceful shutdown; after kill -9 the entry expires with its lease.
        if hasattr(self, "member"):
            self.close()


class EngineRole(Role):
    """Base of roles that have engines do the work: what these take is no fault of the role. Each request says in which
    term of the actor it was sent, and ends with that (``requests``)."""

    def __init__(self, ctx: RunContext) -> None:
        super().__init__(ctx)
        self._done = self._in_flight = 0
        self.requests = ActorRequests(lambda: fencing.current_term(self.etcd, ctx.keys))

    def close(self) -> None:
        self.requests.close()
        super().close()

    @contextlib.contextmanager
    def working(self, count: int = 1) -> Iterator[None]:
        """Inside, so many things are in flight; they count as done where nothing is raised."""
        self._in_flight += count
        self._report()
        try:
            yield
            self._done += count
        finally:
            self._in_flight -= count
            self._report()

    def _report(self) -> None:
        # Neither phase counts as hung: engines that do not answer are no fault of this role, and each wait is bounded.
        phase = "waiting for the engines" if self._in_flight else "idle"
        self.member.progress(self._done, phase, in_flight=self._in_flight)
