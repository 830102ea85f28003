"""``elastic-rl hosts``: the hosts of a cluster, and what they do; commands that cordon, drain and forget one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import completion, tables, watch_loop
from elastic_rl.cli.changes import DryRun
from elastic_rl.cli.common import Output, Target, api_command, say
from elastic_rl.cli.listings import Watch
from elastic_rl.cli.tables import Format
from elastic_rl.cli.watch_loop import Reading
from elastic_rl.errors import ConfigError, Conflict, DeadlineExceeded, EtcdUnavailable

if TYPE_CHECKING:
    from elastic_rl.coordinator.client.admin_client import AdminClient

app = typer.Typer()

HostName = Annotated[str, typer.Argument(metavar="HOST", autocompletion=completion.hosts, help="Id of the host.")]
Reason = Annotated[str, typer.Option(help="Why, for the other operators.")]

_COLUMNS = ("host", "phase", "address", "cpus", "gpus", "memory", "services", "reason")
_WIDE = ("phase_age", "release", "incarnation", "shm", "labels", "assignments")
_SERVICE = ("service", "state", "pid", "generation", "restarts", "reason")
_ASSIGNMENT = ("assignment", "generation", "incarnation", "reason")
_POLL_S = 1.0
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
          host: Annotated[str, typer.Argument(
              metavar="HOST", show_default=False, autocompletion=completion.hosts, help=(
                  "One host, with its services; else all."))] = "",
          phase: Annotated[HostPhases | None, typer.Option(help="Only hosts in this phase.")] = None,
          watch: Watch = False, output: Output = Format.TABLE) -> None:
    """List the hosts of a cluster, also those that are lost or have left, and what runs on them."""
    if host and phase is not None:
        raise ConfigError("--phase is for the listing of all hosts", hint="leave out HOST or --phase")
    with cluster.api(see="elastic-rl hosts", of_job=False) as api:
        def read_all() -> Reading:
            found = api.hosts(phase.value if phase is not None else "")
            return Reading(found, tables.table([row(h) for h in found], _COLUMNS, output, wide=_WIDE))

        def read_one() -> Reading:
            found = api.host(host)
            return Reading(found, _shown(found, output))

        watch_loop.show(read_one if host else read_all, output, watch=watch)


@api_command(app)
def cordon(cluster: Target, host: HostName, reason: Reason = "", dry_run: DryRun = False,
           output: Output = Format.TABLE) -> None:
    """Give a host nothing more; it keeps what it holds."""
    with _api(cluster) as api:
        found = api.change_host(host, {"cordoned": True, **_because(reason)}, dry_run=dry_run)
    keeps = (f"it is still drained, which `elastic-rl uncordon {host}{cluster.as_options}` takes back"
             if found["spec"]["drain"] else f"it keeps {_held(found)}")
    _answer(found, output, dry_run, f"host {host} is given nothing more; {keeps}")


@api_command(app)
def uncordon(cluster: Target, host: HostName, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Give a host work again: takes back a cordon, and a drain."""
    with _api(cluster) as api:
        found = api.change_host(host, {"cordoned": False, "drain": None}, dry_run=dry_run)
    _answer(found, output, dry_run, f"host {host} is given work again")


@api_command(app)
def drain(cluster: Target, host: HostName, within: Annotated[float, typer.Option(
              min=0, metavar="SECONDS", help="Time after which what the host holds is moved."
          )] = 600.0, reason: Reason = "", wait: Annotated[bool, typer.Option(
              "--wait/--no-wait", help="Wait until the host holds nothing.")] = False,
          timeout: Annotated[float, typer.Option(min=0, metavar="SECONDS", help=(
              "Longest wait; 0: until it is done."))] = 0.0,
          dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Empty a host: what it holds moves to others, and it is given nothing more."""
    from elastic_rl.coordinator.hosts.times import LONGEST_DRAIN_S
    if not within <= LONGEST_DRAIN_S:
        raise ConfigError(f"--within={within:g} is too long", hint=f"give at most {LONGEST_DRAIN_S:g} seconds")
    with _api(cluster) as api:
        found = api.change_host(host, {"drain": {"within_s": within}, **_because(reason)}, dry_run=dry_run)
        if wait and not dry_run:
            found = _await_left(cluster, api, host, timeout)
            _answer(found, output, dry_run, f"host {host} holds no run any more; what else runs there, "
                    "such as etcd, coordinators and DCS nodes, `elastic-rl down` ends")
        else:
            _answer(found, output, dry_run, f"host {host} is emptied of {_held(found)} after "
                    f"{tables.duration(within)}, once another host is fit; " + _next_commands(cluster, host))


@api_command(app)
def forget(cluster: Target, host: HostName, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Forget a host that is lost or has left."""
    with _api(cluster) as api:
        found = api.forget_host(host, dry_run=dry_run)
    _answer(found, output, dry_run, f"host {host} is forgotten; an agent that has its name registers it as a new one")


def _api(cluster: Target) -> AbstractContextManager[AdminClient]:
    return cluster.api(see="elastic-rl hosts", of_job=False)


def _answer(host: Mapping[str, Any], output: Format, dry_run: bool, line: str) -> None:
    if output is Format.JSON:
        tables.write_json(host)
    else:
        say(f"{'would be done: ' if dry_run else ''}{line}")


def _because(reason: str) -> dict[str, str]:
    return {"reason": reason} if reason else {}


def _held(host: Mapping[str, Any]) -> str:
    return ", ".join(host["assignments"]) or "nothing"


def _next_commands(cluster: Target, host: str) -> str:
    name = host + cluster.as_options
    return f"follow it with `elastic-rl hosts {name} --watch`, take it back with `elastic-rl uncordon {name}`"


def _await_left(cluster: Target, api: AdminClient, name: str, timeout_s: float) -> dict[str, Any]:
    """Waits until a host holds nothing, and returns it. Prints each change on the way to stderr, and waits for replicas
    that do not answer meanwhile. Raises DeadlineExceeded and KeyboardInterrupt, after which the drain continues, with
    the commands that follow it or withdraw it; and Conflict where somebody has withdrawn it."""
    from elastic_rl.runtime.waiting import wait_until
    host, shown = dict[str, Any](), ""

    def left() -> dict[str, Any] | None:
        nonlocal host, shown
        try:
            host = api.host(name)
        except EtcdUnavailable:
            return None
        if host["spec"]["drain"] is None:
            raise Conflict(f"the drain of host {name} was taken back by {host['spec']['by']}",
                           hint=f"see `elastic-rl hosts {name}{cluster.as_options}`")
        if host["phase"] == "left" or host["phase"] == "lost" and not host["assignments"]:
            return host
        if shown != (shown := f"host {name}: {host['phase']}, holds {_held(host)}"):
            say(shown, to_err=True)
        return None

    try:
        return wait_until(left, timeout_s=timeout_s or math.inf, what=f"host {name}", poll_s=_POLL_S)
    except DeadlineExceeded as e:
        held = f"still holds {_held(host)}" if host else "was not heard of"
        raise DeadlineExceeded(f"host {name} {held} after {timeout_s:g} s",
                               hint="the drain continues; " + _next_commands(cluster, name)) from e
    except KeyboardInterrupt:
        say("the drain continues; " + _next_commands(cluster, name), to_err=True)
        raise


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
    if host["spec"]["drain"] is not None and phase not in ("draining", *_ABSENT):
        yield "is to be drained"
    elif host["spec"]["cordoned"] and phase not in ("cordoned", "draining", *_ABSENT):
        yield "is to be cordoned"
    if (notice := host["preemption"]) and notice["reason"] not in host["reason"]:
        waits = ", and is not drained: notices drain as many hosts as they may" if host["preemption_pending"] else ""
        yield f"is about to be taken back: {notice['reason']}{waits}"
    if host["preemption_problem"]:
        yield f"notices of preemption cannot be read: {host['preemption_problem']}"
    if host["unreadable"]:
        yield f"cannot be read: {', '.join(host['unreadable'])}"


def _shown(host: Mapping[str, Any], output: Format) -> Any:
    """One host as a table of its facts, its services and what is assigned to it."""
    from rich.console import Group
    facts = _facts(host)
    names = ("id", "phase", "phase_age", "reason", "registered", "cordoned", "drain", "asked", "preemption", "address",
             "cpus", "gpus", "memory", "shm", "labels", "release", "incarnation")
    spec = host["spec"]
    shown = {**host, **facts, "registered": _yes(host["registered"]), "cordoned": _yes(spec["cordoned"]),
             "drain": f"within {tables.duration(spec['drain']['within_s'])}" if spec["drain"] else "",
             "asked": _asked(spec), "preemption": _preemption(host["preemption"])}
    parts = [tables.facts({name: shown[name] for name in names})]
    for what, columns in (("service", _SERVICE), ("assignment", _ASSIGNMENT)):
        if rows := [{what: name, **each} for name, each in sorted(host[f"{what}s"].items())]:
            parts += ["", tables.table(rows, columns, output)]
    return Group(*parts)


def _asked(spec: Mapping[str, Any]) -> str:
    """Who asked last for something, when and why."""
    if not spec["at"]:
        return ""
    return f"{tables.moment(spec['at'])} by {spec['by']}" + (f": {spec['reason']}" if spec["reason"] else "")


def _preemption(notice: Mapping[str, Any] | None) -> str:
    """What the provider of a host has announced, and when the machine ends."""
    if notice is None:
        return ""
    at = notice["deadline_at"]
    return f"{notice['reason']}, at {tables.moment(at)}" if at else str(notice["reason"])


def _yes(value: bool) -> str:
    return "yes" if value else "no"
