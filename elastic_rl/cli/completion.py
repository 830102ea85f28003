"""Completion for the shell: names come from the running cluster, if it answers at once, and silently not at all
otherwise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from elastic_rl.cli.common import Target

if TYPE_CHECKING:
    from elastic_rl.coordinator.client.admin_client import AdminClient

COMPLETE_VAR = "_ELASTIC_RL_COMPLETE"
"""Set by the shell when it asks for completions."""
PROGRAM = "elastic-rl"
_LIMIT_S = 0.7
"""For the cluster's answer; the rest of the second is our own start."""
_MOST = 200
_NO_ROLES = {"trainer", "engine", "driver", "dcs", "coordinator"}
"""Members that are not of a role that Ray Serve deploys."""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def script(shell: Shell) -> str:
    """What the shell has to read."""
    from typer.completion import get_completion_script
    return get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE_VAR, shell=shell.value)


def pools(ctx: typer.Context, incomplete: str) -> list[str]:
    return _ask(ctx, incomplete, lambda api: [p["name"] for p in api.items("/v1/pools", most=_MOST)])


def engines(ctx: typer.Context, incomplete: str) -> list[str]:
    return _ask(ctx, incomplete, lambda api: [e["id"] for e in api.items("/v1/engines", most=_MOST)])


def operations(ctx: typer.Context, incomplete: str) -> list[str]:
    return _ask(ctx, incomplete, lambda api: [o["id"] for o in api.items("/v1/operations", most=_MOST)])


def targets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of a restart."""
    return _starting(["trainer", "job"], incomplete) + _ask(ctx, incomplete, _parts)


def _parts(api: AdminClient) -> list[str]:
    roles = sorted({m["role"] for m in api.items("/v1/members")} - _NO_ROLES)
    return [f"roles/{r}" for r in roles] + [f"engines/{e['id']}" for e in api.items("/v1/engines", most=_MOST)]


def _starting(names: list[str], incomplete: str) -> list[str]:
    return [n for n in names if n.startswith(incomplete)]


def _ask(ctx: typer.Context, incomplete: str, names: Callable[[AdminClient], list[str]]) -> list[str]:
    """Names that the cluster of the command line so far has; none when it does not answer in time."""
    import elastic_rl.admin_client  # noqa: F401  before the clock starts: the limit is for what may hang
    found: list[str] = []

    def ask() -> None:
        try:
            # What is typed is not finished: only whole settings count.
            ctx.args[:] = [a for a in ctx.args if a.startswith("--") and "=" in a]
            given: dict[str, Any] = {n: ctx.params[n] for n in ("file", "url", "token_file", "ca") if ctx.params.get(n)}
            with Target(ctx, **given).api(patience_s=0.0) as api:
                found.extend(names(api))
        except Exception:  # a person who types must never see why
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_LIMIT_S)
    return _starting(list(found), incomplete)
