"""``elastic-rl hosts``: the hosts of a cluster, and what they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from elastic_rl.cli import completion, tables, watch_loop
from elastic_rl.cli.common import Output, Target, api_command, argument
from elastic_rl.cli.listings import Watch
from elastic_rl.cli.tables import Format
from elastic_rl.cli.watch_loop import Reading
from elastic_rl.errors import ConfigError

app = typer.Typer()

_COLUMNS = ("host", "phase", "address", "cpus", "gpus", "memory", "services", "reason")
_WIDE = ("phase_age", "release", "incarnation", "shm", "labels", "assignments")
_SERVICE = ("service", "state", "pid", "generation", "restarts", "reason")
_ASSIGNMENT = ("assignment", "generation", "incarnation", "reason")
_SHOWN = 4
"""Services in a cell."""
_ABSENT = ("suspected", "lost", "left")
"""Phases of which nobody expects that the host's agent is there."""


class HostPhases(StrEnum):
    """Values of ``--phase``. Not ``HostPhase`` itself: a command's help must not wait for pydantic."""

    JOINING = "joining"
    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    LEFT = "left"
    SUSPECTED = "suspected"
    LOST = "lost"


@api_command(app)
def hosts(cluster: Target,
          host: Annotated[list[str] | None, typer.Argument(
              metavar="HOST", show_default=False, autocompletion=completion.hosts, help=(
                  "One host, with its services; else all."))] = None,
          phase: Annotated[HostPhases | None, typer.Option(help="Only hosts in this phase.")] = None,
          watch: Watch = False, output: Output = Format.TABLE) -> None:
    """List the hosts of a cluster, also those that are lost or have left, and what runs on them."""
    name = argument(cluster.ctx, host, "host")
    if name and phase is not None:
        raise ConfigError("--phase is for the listing of all hosts", hint="leave out HOST or --phase")
    with cluster.api(see="elastic-rl hosts", of_job=False) as api:
        def read_all() -> Reading:
            found = api.hosts(phase.value if phase is not None else "")
            return Reading(found, tables.table([row(h) for h in found], _COLUMNS, output, wide=_WIDE))

        def read_one() -> Reading:
            found = api.host(name)
            return Reading(found, _shown(found, output))

        watch_loop.show(read_one if name else read_all, output, watch=watch)


def row(host: Mapping[str, Any]) -> dict[str, Any]:
    """A host of the API for a table."""
    return {**host, **_facts(host), "host": host["id"], "services": services(host["services"]),
            "assignments": ", ".join(f"{name} ({held['generation']})" for name, held in host["assignments"].items())}


def services(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The services of a host in a cell: first those that have ended, each with its state, then those that run."""
    names = [f"{name} ({service['state']})" if service["state"] != "running" else name
             for name, service in sorted(found.items(), key=lambda s: (s[1]["state"] != "ended", s[0]))]
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _facts(host: Mapping[str, Any]) -> dict[str, Any]:
    age_s = host["phase_age_s"]
    sizes = {name: host[f"{name}_bytes"] for name in ("memory", "shm")}
    return {**{name: tables.size(nbytes) if nbytes is not None else "" for name, nbytes in sizes.items()},
            "labels": ", ".join(f"{name}={value}" for name, value in host["labels"].items()),
            "phase_age": tables.duration(age_s) if age_s is not None else "",
            "reason": "; ".join(dict.fromkeys(_reasons(host)))}


def _reasons(host: Mapping[str, Any]) -> Iterator[str]:
    """Why a host is as it is: what the leader and its agent say, and what has no consequence yet."""
    phase = host["phase"]
    yield from filter(None, (host["reason"], host["not_ready"]))
    if not host["registered"] and phase not in _ABSENT:
        yield "its agent is not registered"
    if host["drain"] is not None and phase not in ("draining", *_ABSENT):
        yield "is to be drained"
    elif host["cordoned"] and phase not in ("cordoned", "draining", *_ABSENT):
        yield "is to be cordoned"
    if host["unreadable"]:
        yield f"cannot be read: {', '.join(host['unreadable'])}"


def _shown(host: Mapping[str, Any], output: Format) -> Any:
    """One host as a table of its facts, its services and what is assigned to it."""
    from rich.console import Group
    facts = _facts(host)
    names = ("id", "phase", "phase_age", "reason", "registered", "cordoned", "drain", "address", "cpus", "gpus",
             "memory", "shm", "labels", "release", "incarnation")
    shown = {**host, **facts, "registered": _yes(host["registered"]), "cordoned": _yes(host["cordoned"]),
             "drain": _drain(host["drain"])}
    parts = [tables.facts({name: shown[name] for name in names})]
    for what, columns in (("service", _SERVICE), ("assignment", _ASSIGNMENT)):
        if rows := [{what: name, **each} for name, each in sorted(host[f"{what}s"].items())]:
            parts += ["", tables.table(rows, columns, output)]
    return Group(*parts)


def _drain(drain: Mapping[str, Any] | None) -> str:
    if drain is None:
        return ""
    return f"within {tables.duration(drain['timeout_s'])}" + (f": {drain['reason']}" if drain["reason"] else "")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
