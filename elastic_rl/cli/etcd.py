"""``elastic-rl etcd``: the members of a cluster's etcd, and the command that removes one whose host is gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import EXTRA, File, Output, find_cluster_alone, out, say
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError

if TYPE_CHECKING:
    from elastic_rl.etcd.client import ClusterMember, EtcdClient, MemberStatus

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="Members of a cluster's etcd. `elastic-rl node --join=FILE --etcd` adds one.")

_COLUMNS = ("member", "state", "endpoint", "database")
_WIDE = ("id", "peers", "version", "quota")


@app.command("ls", **EXTRA)
def ls(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """List the members, and whether each answers."""
    with _client(ctx, file) as etcd:
        rows = rows_of(etcd.members(), etcd.statuses())
    if output is not Format.JSON:
        sizes = ("database", "quota")
        rows = [{**row, **{name: tables.size(row[name]) if row[name] else "" for name in sizes}} for row in rows]
    tables.show(out, rows, _COLUMNS, output, wide=_WIDE)


@app.command("remove", **EXTRA)
def remove(ctx: typer.Context, member: Annotated[str, typer.Argument(metavar="MEMBER", help=(
               "Its name or its id, as `elastic-rl etcd ls` lists them."))], file: File = None) -> None:
    """Remove a member for good, such as one whose machine is gone. The others go on; its data are of no use any more.
    """
    with _client(ctx, file, own=True) as etcd:
        members = etcd.members()
        found = to_remove(member, members, etcd.statuses())
        etcd.remove_member(found.id)
    left = len(members) - 1
    say(f"etcd's member {_called(found)} is removed; {left} {'is' if left == 1 else 'are'} left. Where its host still "
        "runs, it ends there, and its data are set aside")


@contextmanager
def _client(ctx: typer.Context, file: Path | None, *, own: bool = False) -> Iterator[EtcdClient]:
    """``own``: only of an etcd that the cluster runs itself. Raises ConfigError, EtcdUnavailable."""
    from elastic_rl.host import cluster_settings
    cluster = find_cluster_alone(ctx, file)
    if own and cluster_settings.external_endpoints(cluster.paths.settings):
        raise ConfigError("this cluster's etcd is run by someone else (etcd.endpoints)",
                          hint="use `etcdctl member`")
    with cluster.etcd(cluster.connect()) as etcd:
        yield etcd


def rows_of(members: Sequence[ClusterMember], statuses: Sequence[MemberStatus]) -> list[dict[str, Any]]:
    """The members for a table, by name."""
    return [_row(member, _status(member, statuses)) for member in sorted(members, key=_called)]


def _row(member: ClusterMember, status: MemberStatus | None) -> dict[str, Any]:
    return {"member": _called(member), "id": f"{member.id:x}", "state": _state(member, status),
            "endpoint": ", ".join(member.client_urls), "peers": ", ".join(member.peer_urls),
            "version": status.version if status is not None else "",
            "database": status.db_bytes if status is not None else 0,
            "quota": status.quota_bytes if status is not None else 0}


def _state(member: ClusterMember, status: MemberStatus | None) -> str:
    if not member.name:
        return "has never started"
    if member.is_learner:
        return "learner: catches up"
    if status is None or status.error:
        return f"away: {status.error}" if status is not None else "away"
    return f"{'leads' if status.is_leader else 'follows'}{''.join(f', alarm {alarm}' for alarm in status.alarms)}"


def to_remove(wanted: str, members: Sequence[ClusterMember], statuses: Sequence[MemberStatus]) -> ClusterMember:
    """The member with this name or id. Raises ConfigError where there is none, and where etcd would not go on without
    it."""
    found = next((member for member in members if wanted in (member.name, f"{member.id:x}")), None)
    if found is None:
        raise ConfigError(f"etcd has no member {wanted}", hint=f"it has {', '.join(map(_called, members))}")
    others = [member for member in members if member.id != found.id and not member.is_learner]
    answer = sum(_works(_status(member, statuses)) for member in others)
    if not others or 2 * answer <= len(others):
        raise ConfigError(f"without {_called(found)}, {answer} of {len(others)} members answer, which is no majority",
                          hint="start the others first" if others else "it is the only one")
    return found


def _works(status: MemberStatus | None) -> bool:
    return status is not None and not status.error


def _status(member: ClusterMember, statuses: Sequence[MemberStatus]) -> MemberStatus | None:
    return next((s for s in statuses if any(url.endswith(f"//{s.endpoint}") for url in member.client_urls)), None)


def _called(member: ClusterMember) -> str:
    return member.name or f"{member.id:x}"
