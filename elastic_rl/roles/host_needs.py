"""What a replica of a role needs on its host, where that is another one than the run's."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.dcs import model_files
from elastic_rl.engine.host_model import HostModel
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.here import context_here


def role_context(ctx: RunContext, role: str) -> RunContext:
    """The context of a replica on this host. Raises ConfigError, which names what the host lacks: Serve shows it as the
    reason for which the role is not deployed."""
    if not ctx.config.role_settings(role).host_selector:
        return ctx
    ctx = context_here(ctx)
    for pool in _pools_read(ctx.config, role):
        folder = ctx.pool(pool).model_dir
        if not (Path(folder) / model_files.CONFIG).exists():
            raise ConfigError(f"host {ctx.host} lacks the model {folder} of pool {pool}, which the role {role} reads",
                              hint=f"copy it there, or change roles.{role}.host_selector")
    return ctx


def with_policy_model(ctx: RunContext, role: str, etcd: EtcdClient, on_wait: Callable[[], None]) -> RunContext:
    """The context with a folder on this host that has the files of the policy's model but for its weights. Where the
    checkpoint service has to bring them it waits for that, and calls ``on_wait`` again and again. Raises EngineFailed
    and Fenced."""
    if not ctx.config.role_settings(role).host_selector:
        return ctx

    def pause(seconds: float) -> bool:
        on_wait()
        time.sleep(seconds)
        return False

    model = HostModel(ctx, ctx.pool(ROLLOUT_POOL))
    model.bring(etcd, pause)
    return ctx.model_copy(update={"model_dir": str(model.folder)})


def _pools_read(cfg: Config, role: str) -> list[str]:
    """Pools of whose model the role reads the tokenizer or the configuration, but for the policy's."""
    return {"genrm": sorted(cfg.rollout.judges), "teacher": [cfg.algorithm.teacher or ""]}.get(role, [])
