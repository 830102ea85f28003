"""Routes of the cluster: probes, metrics, its hosts and what operators want of them, and the listing of its jobs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, FastAPI, Path, Query, Request, Response

from elastic_rl.coordinator import etags, job_view
from elastic_rl.coordinator.api import pages, route_docs
from elastic_rl.coordinator.api.context import ReplicaCtx, caller_of
from elastic_rl.coordinator.api.idempotent import DryRun, IfMatch
from elastic_rl.coordinator.api.models import HostChange, HostPage, JobPage, Readiness, ReplicaHealth
from elastic_rl.coordinator.api.pages import After, Limit
from elastic_rl.coordinator.api.route_docs import described
from elastic_rl.coordinator.api_paths import HOSTS
from elastic_rl.coordinator.hosts import changes
from elastic_rl.coordinator.hosts import view as hosts
from elastic_rl.coordinator.hosts.view import HostView
from elastic_rl.coordinator.metrics import scrape
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.etcd.cluster_records import HostPhase
from elastic_rl.etcd.keys import Keys
from elastic_rl.telemetry import metrics as registry
from elastic_rl.telemetry import traces

HostId = Annotated[str, Path(max_length=200, description="Id of the host")]

_SCANNED = pages.MAX_ITEMS
"""Hosts that a filtered listing reads for one page; the page may then be short, and still have a ``next``."""


def install(app: FastAPI) -> None:
    """Adds the routes."""
    app.get("/healthz", response_model=ReplicaHealth, **described(route_docs.HEALTH))(healthz)
    app.get("/readyz", response_model=Readiness, **described(route_docs.READY))(readyz)
    app.get("/metrics", response_model=None, response_class=_Text, **described(route_docs.METRICS))(prometheus)
    app.get("/v1/jobs", response_model=JobPage, **described(route_docs.JOBS))(list_jobs)
    app.get(HOSTS, response_model=HostPage, **described(route_docs.HOSTS))(list_hosts)
    app.get(HOSTS + "/{host}", response_model=HostView, **described(route_docs.HOST))(one_host)
    app.patch(HOSTS + "/{host}", response_model=HostView, **described(route_docs.CHANGE_HOST))(change_host)
    app.delete(HOSTS + "/{host}", response_model=HostView, **described(route_docs.FORGET_HOST))(forget_host)


class _Text(Response):
    media_type = "text/plain"


async def healthz(ctx: ReplicaCtx) -> ReplicaHealth:
    """Says that the replica is alive. Does not depend on etcd."""
    return ReplicaHealth(status="ok", replica=ctx.election.replica)


def readyz(ctx: ReplicaCtx) -> Readiness:
    """503 while etcd does not answer, the replica stops, or it leads and its reconcile passes over every job fail.
    Where those over some jobs fail, the ``health`` of these jobs says so."""
    if ctx.stopping.is_set():
        raise Problem(503, Kind.STOPPING, "The replica is stopping")
    if problem := ctx.election.health.problem():
        raise Problem(503, Kind.NOT_RECONCILING, "The leader's reconcile passes fail", problem)
    leader = ctx.election.current()
    return Readiness(status="ready", replica=ctx.election.replica, leader=leader.replica if leader else None)


def prometheus(ctx: ReplicaCtx) -> Response:
    """Metrics of the replica and of every job in the text format. While etcd is away those of the jobs are missing."""
    jobs = [(job.keys, job.cfg) for job in ctx.jobs.values()]
    failing = {name: ctx.jobs.problem(name) is not None for name in ctx.jobs.known()}
    return Response(scrape.scrape(ctx.etcd, jobs, failing, ctx.election), media_type=registry.CONTENT_TYPE)


def list_jobs(ctx: ReplicaCtx, limit: Limit = 100, after: After = "") -> Response:
    """The jobs, by name; those included that the replica has not taken up."""
    last = pages.place(after) if after else ""
    found = sorted(name for name in ctx.jobs.known() if name > last)
    shown = [job_view.read(ctx.etcd, Keys(name), ctx.election.replica, ctx.jobs.problem(name))
             for name in found[:limit]]
    return pages.page([view.model_dump_json().encode() for view in shown],
                      shown[-1].name if len(found) > limit else None)


def list_hosts(ctx: ReplicaCtx, limit: Limit = 100, after: After = "", phase: Annotated[
        HostPhase | None, Query(description="Only hosts in this phase.")] = None) -> Response:
    """The hosts, by id; with ``phase`` a page may be short and still have a ``next``."""
    pages.require_known("phase", phase)
    last = pages.place(after) if after else ""
    found, more = hosts.page(ctx.etcd, ctx.keys, limit if phase is None else _SCANNED, last)
    shown = [host for host in found if phase is None or host.phase is phase]
    rest = shown[limit - 1] if len(shown) > limit else found[-1] if more else None
    return pages.page([host.model_dump_json().encode() for host in shown[:limit]], rest.id if rest else None)


def one_host(ctx: ReplicaCtx, host: HostId) -> Response:
    """The host with its services, what is assigned to it and what operators want of it, as of one revision of etcd."""
    return _host(hosts.get_host(ctx.etcd, ctx.keys, host))


def change_host(request: Request, ctx: ReplicaCtx, host: HostId, body: Annotated[HostChange, Body()],
                dry_run: DryRun = False, if_match: IfMatch = None) -> Response:
    """The leader follows within seconds: a host that is cordoned is given nothing more, one that is drained is emptied
    as well. No operation is created: ``phase`` and ``reason`` of the host say how it goes."""
    revision = etags.parse_if_match(if_match, "host")
    with traces.span("api.change_host", parent=traces.extract(request.headers), host=host):
        return _host(changes.change(ctx.etcd, ctx.keys, host, body.changes, by=caller_of(request).name,
                                    if_revision=revision, dry_run=dry_run))


def forget_host(request: Request, ctx: ReplicaCtx, host: HostId, dry_run: DryRun = False) -> Response:
    """Answers with the host as it was. 409 unless it is lost or has left, and holds nothing."""
    with traces.span("api.forget_host", parent=traces.extract(request.headers), host=host):
        return _host(changes.forget(ctx.etcd, ctx.keys, host, by=caller_of(request).name, dry_run=dry_run))


def _host(found: HostView) -> Response:
    return Response(found.model_dump_json(), media_type=pages.JSON, headers={"ETag": found.etag})
