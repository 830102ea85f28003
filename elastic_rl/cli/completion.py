"""Shell completion. Names come from the running cluster, if it answers at once; otherwise there are silently none."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from elastic_rl.cli.common import Target

if TYPE_CHECKING:
    from elastic_rl.coordinator.client.admin_client import AdminClient

COMPLETE_VAR = "_ELASTIC_RL_COMPLETE"
"""Set by the shell when it asks for completions."""
PROGRAM = "elastic-rl"
_LIMIT_S = 0.7
"""Limit for the cluster's answer, so that a completion takes about a second with the start of Python."""
_MAX_NAMES = 200
TRAINER_GROUPS = ("trainer", "critic", "actor_fwd", "reference")
"""The groups of ``config.groups``, which are not read there: a command's help must not wait for pydantic."""
_NO_ROLES = {*TRAINER_GROUPS, "engine", "driver", "dcs", "coordinator"}
"""Members whose role is not a Ray Serve deployment."""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def script(shell: Shell) -> str:
    """The script that the shell has to source."""
    from typer.completion import get_completion_script
    return get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE_VAR, shell=shell.value)


def pools(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda api: [p["name"] for p in api.items("pools", limit=_MAX_NAMES)])


def engines(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda api: [e["id"] for e in api.items("engines", limit=_MAX_NAMES)])


def external_engines(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda api: [e["id"] for e in api.items("engines") if e.get("external")])


def operations(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda api: [o["id"] for o in api.items("operations", limit=_MAX_NAMES)])


def hosts(ctx: typer.Context, incomplete: str) -> list[str]:
    return _names(ctx, incomplete, lambda api: [h["id"] for h in api.hosts(limit=_MAX_NAMES)], of_job=False)


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Jobs below the run_dir of the command line so far."""
    from elastic_rl.cli import common
    from elastic_rl.host import paths
    return _local_names(ctx, incomplete, lambda file: paths.jobs_of_user(common.location(ctx, file).run_dir))


def logs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Parts that have a log, of the cluster and job of the command line so far."""
    from elastic_rl.cli import common
    return _local_names(ctx, incomplete, lambda file: [*common.logs_of(common.find_cluster(ctx, file, stored=False))])


def targets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Targets of a restart."""
    return _starting([*TRAINER_GROUPS, "driver", "job"], incomplete) + _names(ctx, incomplete, _parts)


def _parts(api: AdminClient) -> list[str]:
    roles = sorted({m["role"] for m in api.items("members")} - _NO_ROLES)
    return [f"roles/{r}" for r in roles] + [f"engines/{e['id']}" for e in api.items("engines", limit=_MAX_NAMES)]


def _starting(names: list[str], incomplete: str) -> list[str]:
    return [n for n in names if n.startswith(incomplete)]


def _local_names(ctx: typer.Context, incomplete: str, read: Callable[[Path | None], list[str]]) -> list[str]:
    """Names from this machine's files. ``read`` gets the file of settings of the command line so far."""
    _drop_unfinished(ctx)
    try:
        return _starting(read(ctx.params.get("file")), incomplete)
    except Exception:  # as in _names
        return []


def _drop_unfinished(ctx: typer.Context) -> None:
    """Leaves the complete settings of a command line that is being typed."""
    ctx.args[:] = [word for word in ctx.args if word.startswith("--") and "=" in word]


def _names(ctx: typer.Context, incomplete: str, read: Callable[[AdminClient], list[str]], *, of_job: bool = True
           ) -> list[str]:
    """Names from the cluster of the command line so far; none when it does not answer in time. ``of_job``: as of
    ``Target.api``."""
    import elastic_rl.coordinator.client.admin_client  # noqa: F401  before the limit counts: it is for what may hang
    from elastic_rl.runtime.abandonable import AbandonableCalls

    def fetch() -> list[str]:
        _drop_unfinished(ctx)
        given: dict[str, Any] = {n: ctx.params[n] for n in ("file", "url", "token_file", "ca") if ctx.params.get(n)}
        with Target(ctx, **given).api(patience_s=0.0, of_job=of_job) as api:
            return read(api)

    try:
        found = AbandonableCalls("completion", 1).begin(fetch).result(every_s=_LIMIT_S, limit_s=_LIMIT_S)
    except Exception:  # an error message in the middle of a command line does not help
        return []
    return _starting(found, incomplete)
