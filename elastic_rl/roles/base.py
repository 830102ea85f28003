"""What every role keeps, whatever it does: a name, a membership with progress, health that means something."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from typing import ClassVar

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.telemetry import logs, traces


@dataclass(frozen=True)
class RoleSpec:
    """How the driver deploys a role: the class, its replicas and what one replica reserves of a machine."""

    name: str
    cls: type[Role]
    replicas: int = 1
    num_cpus: float = 0.25
    max_ongoing_requests: int = 8


class Role:
    """Base of a role's replica.

    The replica registers as a member from inside its own process, so that a hung one is told from a dead one, and Ray
    Serve's ``check_health`` fails when the member's lease is lost for good: a replica that the control plane cannot
    see is replaced rather than trusted.
    """

    name: ClassVar[str]

    def __init__(self, ctx: RunContext) -> None:
        self.ctx = ctx
        cfg = ctx.config
        logs.setup(f"role.{self.name}", cfg.telemetry.log_level)
        traces.setup(cfg.telemetry.otlp_endpoint, f"elastic-rl.{self.name}")
        self.etcd: EtcdClient = ctx.connect()
        self.member = Membership(self.etcd, ctx.keys, self.name, f"{self.name}-{uuid.uuid4().hex[:6]}",
                                 ttl_s=cfg.coordinator.lease_ttl_s, epoch=ctx.epoch,
                                 info={"pid": os.getpid()}).start()

    def check_health(self) -> None:
        """Called by Ray Serve; raising makes it replace the replica."""

    def close(self) -> None:
        self.member.close()
        self.etcd.close()

    def __del__(self) -> None:
        # Serve's graceful shutdown calls this; after kill -9 the lease's end does the same work.
        if hasattr(self, "member"):
            self.close()
