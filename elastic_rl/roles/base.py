"""What every role has: a name, a connection to etcd, and a membership with progress."""

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
    """How the driver deploys a role: its class, its replicas and the resources of one replica."""

    name: str
    cls: type[Role]
    samples: bool = True
    """Whether the role works on samples, so that a job without engines needs none of it."""
    trains: bool = False
    """Whether the role works on what is trained on, so that a job without a trainer needs none of it."""
    replicas: int = 1
    num_cpus: float = 0.25
    max_ongoing_requests: int = 8


class Role:
    """Base of a role's replica. It registers as a member from inside its own process, so that the leader sees its
    progress: a replica that hangs differs from one that is dead.

    Ray Serve calls ``check_health``, where a subclass defines it, and replaces a replica that raises.
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

    def close(self) -> None:
        """Signs the replica off."""
        self.member.close()
        self.etcd.close()

    def __del__(self) -> None:
        # Called by Serve's graceful shutdown; after kill -9 the entry expires with its lease.
        if hasattr(self, "member"):
            self.close()
