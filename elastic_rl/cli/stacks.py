"""The command stacks: what the processes of a job do now, on all hosts of its cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import EXTRA, File, Output, find_cluster, logs_of_hosts, say
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError, HostUnavailable, PreflightFailed

if TYPE_CHECKING:
    from elastic_rl.host.cluster_logs import ClusterLogs
    from elastic_rl.host.local_cluster import Cluster
    from elastic_rl.host.stacks import ProcessStacks

app = typer.Typer()
_Part = Annotated[str, typer.Argument(metavar="PART", show_default=False, help=(
    "Only processes whose name begins so, such as trainer, engine/ID or coordinator; else all."))]
_Host = Annotated[str, typer.Option("--host", metavar="HOST", help="Only the processes of this host; else of all.")]


@app.command("stacks", **EXTRA)
def stacks(ctx: typer.Context, part: _Part = "", host: _Host = "", file: File = None,
           output: Output = Format.TABLE) -> None:
    """Show what every thread of a job's processes does now: ranks, engines, role replicas, Ray, and the services of
    its hosts. Neither stops nor changes them."""
    cluster = find_cluster(ctx, file, stored=False)
    with logs_of_hosts(cluster, required=bool(host)) as far:
        found, away = _of_hosts(cluster, far, host)
    if host and host in away:
        raise HostUnavailable(away[host])
    for why in away.values():
        say(why, to_err=True)
    chosen = {at: _chosen(of_host, part) for at, of_host in found.items()}
    if not any(chosen.values()):
        names = sorted({process.name for of_host in found.values() for process in of_host if process.name})
        raise ConfigError(f"no process {f'has a name that begins with {part!r}' if part else 'of the job runs'}",
                          hint=f"there are: {', '.join(names[:20])}" if names else "`elastic-rl jobs` lists the jobs")
    if output is Format.JSON:
        tables.write_json([{"host": at, **process.model_dump()} for at, of_host in chosen.items()
                           for process in of_host])
    else:
        for text in _texts(chosen):
            sys.stdout.write(tables.printable(text) + "\n")
    _require_permission(chosen)


def _of_hosts(cluster: Cluster, far: ClusterLogs | None, host: str
              ) -> tuple[dict[str, list[ProcessStacks]], dict[str, str]]:
    """The stacks of each host, and why those of others cannot be had. This host is not asked: it is looked at here."""
    from elastic_rl.host import stacks as of_host
    here, job = (far.here if far is not None else ""), cluster.cfg.job
    found: dict[str, list[ProcessStacks]] = {}
    away: dict[str, str] = {}
    if host in ("", here):
        found[here] = of_host.read_all(of_host.of_job(cluster.cfg, job))
    if far is not None and host != here:
        hosts = far.hosts()
        if host and host not in hosts:
            raise ConfigError(f"there is no host {host!r}", hint=f"hosts: {', '.join(sorted(hosts)[:20])}")
        others, away = far.stacks([hosts[host]] if host else [h for h in hosts.values() if h.name != here])
        found |= others
    return found, away


def _chosen(found: Sequence[ProcessStacks], part: str) -> list[ProcessStacks]:
    return [process for process in found if (process.name or process.program).startswith(part)]


def _texts(chosen: Mapping[str, Sequence[ProcessStacks]]) -> Iterator[str]:
    from elastic_rl.host.stacks import shown
    for at, of_host in chosen.items():
        yield from (shown(process, at) for process in of_host)


def _require_permission(chosen: Mapping[str, Sequence[ProcessStacks]]) -> None:
    """Says what to do where py-spy may not read. Raises PreflightFailed where it could read nothing."""
    from elastic_rl.host.stacks import HOW_TO_PERMIT, NOT_PERMITTED
    read = [process for of_host in chosen.values() for process in of_host]
    denied = [process for process in read if process.is_denied]
    if denied and not any(process.text for process in read):
        raise PreflightFailed(NOT_PERMITTED, hint=HOW_TO_PERMIT)
    if denied:
        say(f"{len(denied)} processes were not read: {NOT_PERMITTED}; {HOW_TO_PERMIT}", to_err=True)
