"""Settings of a job that were made on another host of its cluster, as they hold on this one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from elastic_rl.config import Config
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd.heartbeat_folder import HeartbeatFolder
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import cluster_settings
from elastic_rl.host.address import host_address
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.host.processes import RUN_MARK


def settings_here(cfg: Config, run_dir: Path) -> Config:
    """The settings with the folder of the cluster on this host, and this host's address and certificates. Those of a
    job with a cluster of its own have another folder only. Raises ConfigError."""
    cfg = cfg.model_copy(update={"run_dir": run_dir})
    if not cfg.cluster:
        return cfg
    paths = ClusterPaths.of(cfg)
    cfg = cluster_settings.with_sections_of_cluster(paths.settings, cfg, {})
    return LocalHost.of(paths).settings_here(cfg, paths.tls)


def context_here(ctx: RunContext) -> RunContext:
    """The context of a run for a process of its compute plane, which Ray may have started on another host than the
    driver's. Raises ConfigError."""
    mark = os.environ.get(RUN_MARK)  # the job's private folder on this host
    if not mark or not ctx.config.cluster:
        return ctx
    cfg = settings_here(ctx.config, Path(mark).parent.parent)
    return ctx.model_copy(update={"config": cfg, "host": host_address(cfg),
                                  "etcd_endpoints": _endpoints_here(cfg, ctx.etcd_endpoints)})


def heartbeats_here(cfg: Config) -> HeartbeatFolder:
    """Where the processes of a job leave their heartbeats on this host. ``cfg``: as it holds here. Raises ConfigError.
    """
    paths = ClusterPaths.of(cfg)
    return HeartbeatFolder(paths.job_heartbeats(cfg.job), LocalHost.of(paths).name)


def _endpoints_here(cfg: Config, given: Sequence[str]) -> list[str]:
    """The members of the cluster's own etcd as the agent of this host knows them, and those that are ``given``: they
    may have gone since the run began."""
    if cfg.etcd.endpoints:
        return list(given)
    info = ClusterInfo.load(ClusterPaths.of(cfg).info)
    return [*dict.fromkeys([*(info.etcd_endpoints if info is not None else ()), *given])]
