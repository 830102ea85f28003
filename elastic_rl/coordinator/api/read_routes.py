"""Routes that read the state of a job."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from fastapi import FastAPI, Path, Query, Response

from elastic_rl.config import Stream
from elastic_rl.coordinator import autoscalers, job_view, pools, problems
from elastic_rl.coordinator.api import pages, route_docs
from elastic_rl.coordinator.api.context import JobContext, JobCtx
from elastic_rl.coordinator.api.models import (
    AlertPage,
    AutoscalerPage,
    EnginePage,
    MemberPage,
    OperationPage,
    PoolPage,
    StepPage,
    VersionPage,
)
from elastic_rl.coordinator.api.pages import After, Limit
from elastic_rl.coordinator.api.route_docs import described
from elastic_rl.coordinator.api_paths import OF_JOB
from elastic_rl.coordinator.autoscalers import AutoscalerView
from elastic_rl.coordinator.job_view import JobView
from elastic_rl.coordinator.pools import PoolView
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.etcd.client import KeyValue
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.records import Engine, Member, Operation, OperationState

Name = Annotated[str, Path(max_length=200)]
_SCANNED = 2_000
"""Records that a filtered listing reads for one page; the page may then be short, and still have a ``next``."""


def install(app: FastAPI) -> None:
    """Adds the routes."""
    for path, answer, handler, route in (
            ("", JobView, job, route_docs.JOB),
            ("/pools", PoolPage, list_pools, route_docs.POOLS),
            ("/pools/{name}", PoolView, one_pool, route_docs.POOL),
            ("/pools/{name}/autoscaling", AutoscalerView, one_autoscaler, route_docs.AUTOSCALER),
            ("/autoscaling", AutoscalerPage, list_autoscalers, route_docs.AUTOSCALERS),
            ("/engines", EnginePage, list_engines, route_docs.ENGINES),
            ("/engines/{engine_id}", Engine, one_engine, route_docs.ENGINE),
            ("/operations", OperationPage, list_operations, route_docs.OPERATIONS),
            ("/operations/{operation_id}", Operation, one_operation, route_docs.OPERATION),
            ("/versions", VersionPage, list_versions, route_docs.VERSIONS),
            ("/members", MemberPage, list_members, route_docs.MEMBERS),
            ("/alerts", AlertPage, list_alerts, route_docs.ALERTS),
            ("/steps", StepPage, list_steps, route_docs.STEPS)):
        app.get(OF_JOB + path, response_model=answer, **described(route))(handler)


def job(ctx: JobCtx) -> Response:
    """The job as of one revision of etcd."""
    replica, problem = ctx.replica, ctx.replica.jobs.problem(ctx.keys.job)
    return _json(job_view.read(replica.etcd, ctx.keys, replica.election.replica, problem).model_dump_json().encode())


def list_pools(ctx: JobCtx, limit: Limit = 100, after: After = "") -> Response:
    """The pools, by name."""
    found, more = pools.page(ctx.replica.etcd, ctx.keys, limit, pages.place(after) if after else "")
    return pages.page([p.model_dump_json().encode() for p in found], found[-1].name if more and found else None)


def one_pool(ctx: JobCtx, name: Name) -> Response:
    """The pool with its ETag, which differs after each change of the desired number, and of nothing else."""
    found = pools.get_pool(ctx.replica.etcd, ctx.keys, name)
    return _json(found.model_dump_json().encode(), {"ETag": found.etag})


def one_autoscaler(ctx: JobCtx, name: Name) -> Response:
    """As the job's settings have it (``source``), until it is set. ``message`` says what the leader goes by, at most 15
    s ago."""
    found = autoscalers.get(ctx.replica.etcd, ctx.keys, ctx.cfg, name)
    return _json(found.model_dump_json().encode(), {"ETag": found.etag})


def list_autoscalers(ctx: JobCtx, limit: Limit = 100, after: After = "") -> Response:
    """By pool; pools whose autoscaling is disabled are listed too."""
    found, more = pools.page(ctx.replica.etcd, ctx.keys, limit, pages.place(after) if after else "")
    shown = autoscalers.page(ctx.replica.etcd, ctx.keys, ctx.cfg, [pool.name for pool in found])
    return pages.page([a.model_dump_json().encode() for a in shown], found[-1].name if more and found else None)


def list_engines(ctx: JobCtx, limit: Limit = 100, after: After = "") -> Response:
    """The engines, by id."""
    return pages.stored(ctx.replica.etcd, ctx.keys.engines_prefix(), limit, after)


def one_engine(ctx: JobCtx, engine_id: Name) -> Response:
    """The engine's record."""
    return _record(ctx, ctx.keys.engine(engine_id), "engine", engine_id)


def list_operations(ctx: JobCtx, limit: Limit = 100, after: After = "", state: Annotated[
        OperationState | None, Query(description="Only operations in this state.")] = None) -> Response:
    """The newest first; with ``state`` a page may be short and still have a ``next``."""
    prefix = ctx.keys.operations_prefix()
    pages.require_known("state", state)
    if state is None:
        return pages.stored(ctx.replica.etcd, prefix, limit, after, newest_first=True)
    found = ctx.replica.etcd.page(prefix, limit=_SCANNED, before=prefix + pages.place(after) if after else "",
                          newest_first=True)
    items: list[bytes] = []
    last = ""
    for kv in found.kvs:
        if len(items) == limit:
            return pages.page(items, last)
        last = kv.key.removeprefix(prefix)
        if pages.fields(kv).get("state") == state:
            items.append(kv.value)
    return pages.page(items, last if found.more else None)


def one_operation(ctx: JobCtx, operation_id: Name) -> Response:
    """The operation's state, phase, progress, and its error if it failed."""
    return _record(ctx, ctx.keys.operation(operation_id), "operation", operation_id)


def list_versions(ctx: JobCtx, limit: Limit = 100, after: After = "", stream: Annotated[
        str | None, Query(max_length=100, description="Only of this stream.")] = None) -> Response:
    """The newest first, of one stream or of all."""
    places = _places(after) if after else {}
    heads = []
    for name in Stream if stream is None else (stream,):
        if places.get(name) != 1:
            found = pages.newest_versions(ctx.replica.etcd, ctx.keys, name, limit + 1, below=places.get(name, 0))
            heads.append([_Head(pages.created_at(kv), name,
                                int(kv.key.rpartition("/")[2]), kv) for kv in found])
    merged = _merge(heads)
    for head in merged[:limit]:
        places[head.stream] = head.number
    rest = ",".join(f"{name}:{number}" for name, number in sorted(places.items()))
    return pages.page(pages.readable(head.kv for head in merged[:limit]), rest if len(merged) > limit else None)


def list_members(ctx: JobCtx, role: Annotated[str, Query(max_length=100, description=(
        "Only of this role; the nodes of the checkpoint service are there with `dcs` alone."))] = "",
                 limit: Limit = 100, after: After = "", suspected: Annotated[bool, Query(
                     description="Only members that are no longer registered and may be slow or dead.")] = False
                 ) -> Response:
    """The members, by role and id. With ``suspected`` a page may be short and still have a ``next``."""
    if not suspected:
        return pages.members(ctx.replica.etcd, ctx.keys, role, limit, after)
    prefix = ctx.keys.registry_entry(role, "") if role else ctx.keys.registry_prefix()
    found = ctx.replica.etcd.page(prefix, limit=_SCANNED, after=prefix + pages.place(after) if after else "")
    items: list[bytes] = []
    last = ""
    for kv in found.kvs:
        if len(items) == limit:
            return pages.page(items, last)
        last = kv.key.removeprefix(prefix)
        entry = readable_one(kv, LastSeen)
        if entry is not None and entry.suspected:
            items.append(Member(role=entry.role, id=entry.id, pid=entry.pid, host=entry.host, epoch=entry.epoch,
                                incarnation=entry.incarnation, phase="suspected", machine=entry.machine).encode())
    return pages.page(items, last if found.more else None)


def list_alerts(ctx: JobCtx, limit: Limit = 100, after: After = "") -> Response:
    """The alerts, by kind and subject."""
    return pages.stored(ctx.replica.etcd, ctx.keys.alerts_prefix(), limit, after)


def list_steps(ctx: JobCtx, limit: Limit = 100, after: After = "") -> Response:
    """One point a step; old ones are downsampled."""
    return pages.stored(ctx.replica.etcd, ctx.keys.steps_prefix(), limit, after, newest_first=True)


# -- helpers -----------------------------------------------------------------------------------------------------------
class _Head(NamedTuple):
    """A version in a listing of several streams."""

    created_at: float
    stream: str
    number: int
    kv: KeyValue


def _merge(streams: list[list[_Head]]) -> list[_Head]:
    """Merges streams by age, the newest first; those of one stream stay in their order."""
    merged: list[_Head] = []
    while left := [s for s in streams if s]:
        merged.append(max(left, key=lambda s: s[0].created_at).pop(0))
    return merged


def _places(after: str) -> dict[str, int]:
    """The last number returned of each stream. Raises a 422 problem for what is not a cursor of this listing."""
    places = dict(part.rpartition(":")[::2] for part in pages.place(after).split(","))
    if not all(n.isascii() and n.isdecimal() and 0 < len(n) < 13 and int(n) for n in places.values()):
        raise pages.bad_cursor(after)
    return {name: int(number) for name, number in places.items()}


def _record(ctx: JobContext, key: str, what: str, name: str) -> Response:
    found = ctx.replica.etcd.get(key)
    if found is None:
        raise problems.not_found(what, name)
    if not pages.fields(found):
        raise problems.unreadable(what, name)
    return _json(found.value)


def _json(content: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(content, headers=headers, media_type=pages.JSON)
