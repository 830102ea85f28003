"""What the commands of ``elastic-rl`` share: settings from the command line, the cluster that is meant, consoles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from elastic_rl import config as configuration
from elastic_rl.config import Config
from elastic_rl.errors import ConfigError
from elastic_rl.listing import Format

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that takes any setting as ``--key.sub=value``."""
out = Console()
err = Console(stderr=True)

File = Annotated[Path | None, typer.Option("-c", "--config", help="YAML file of settings.")]
Output = Annotated[Format, typer.Option("-o", "--output", help="table, wide or json.")]


def overrides(args: Sequence[str]) -> list[str]:
    """Settings of a command line: ``--key.sub=value`` and ``--key.sub value``. Raises ConfigError for anything else."""
    found, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            raise ConfigError(f"unexpected argument {arg!r}", hint="settings are given as --key.sub=value")
        if "=" not in arg:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{arg} has no value", hint=f"write {arg}=VALUE")
            arg += "=" + rest.pop(0)
        found.append(arg)
    return found


def load(ctx: typer.Context, file: Path | None) -> Config:
    """The configuration that a command line asks for. Raises ConfigError."""
    return configuration.load(file, overrides(ctx.args))


def find_cluster(ctx: typer.Context, file: Path | None) -> Any:
    """The cluster of the job; where no job was named and exactly one is up under run_dir, that one."""
    from elastic_rl.cluster import Cluster, ClusterInfo
    cluster = Cluster(load(ctx, file))
    named = file is not None or any(a.startswith("--job") for a in ctx.args)
    if not named and ClusterInfo.load(cluster.dir) is None:
        up = [p.parent.parent.name for p in cluster.cfg.run_dir.glob("*/cluster/cluster.json")]
        if len(up) == 1:
            return Cluster(cluster.cfg.model_copy(update={"job": up[0]}))
        if up:
            raise ConfigError(f"several clusters are up: {', '.join(sorted(up))}", hint="name one with --job=NAME")
    return cluster
