"""Routes that change pools, engines and the run. A change that takes longer than a request begins an operation."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, FastAPI, Request, Response

from elastic_rl.coordinator import autoscalers, etags, pools
from elastic_rl.coordinator.api import pages, route_docs
from elastic_rl.coordinator.api.context import JobContext, JobCtx, caller_of
from elastic_rl.coordinator.api.idempotency import Claim
from elastic_rl.coordinator.api.idempotent import Created, DryRun, IfMatch, Key, carry_out, forward
from elastic_rl.coordinator.api.models import AutoscalerChange, EngineDrain, NewExternalEngine, NewRestart, Scale
from elastic_rl.coordinator.api.read_routes import Name
from elastic_rl.coordinator.api.route_docs import described
from elastic_rl.coordinator.api_paths import OF_JOB, job_path
from elastic_rl.coordinator.autoscalers import AutoscalerView
from elastic_rl.coordinator.pools import PoolView
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.records import Engine, Operation
from elastic_rl.telemetry import traces


def install(app: FastAPI) -> None:
    """Adds the routes."""
    app.patch(OF_JOB + "/pools/{name}", response_model=PoolView, **described(route_docs.PATCH_POOL))(patch_pool)
    app.post(OF_JOB + "/pools/{name}/scale", response_model=Operation, **described(route_docs.SCALE))(scale_pool)
    app.put(OF_JOB + "/pools/{name}/autoscaling", response_model=AutoscalerView, **described(
        route_docs.SET_AUTOSCALER))(set_autoscaling)
    app.delete(OF_JOB + "/pools/{name}/autoscaling", response_model=AutoscalerView, **described(
        route_docs.DISABLE_AUTOSCALER))(disable_autoscaling)
    app.post(OF_JOB + "/engines", response_model=Operation, **described(route_docs.REGISTER))(register_engine)
    app.delete(OF_JOB + "/engines/{engine_id}", response_model=Operation, **described(route_docs.DEREGISTER))(
        deregister_engine)
    app.post(OF_JOB + "/engines/{engine_id}/drain", response_model=Operation, **described(route_docs.DRAIN))(
        drain_engine)
    app.post(OF_JOB + "/restarts", response_model=Operation, **described(route_docs.RESTART))(restart)
    app.delete(OF_JOB + "/operations/{operation_id}", response_model=Operation, **described(route_docs.CANCEL))(cancel)


def patch_pool(request: Request, ctx: JobCtx, name: Name, body: Annotated[Scale, Body()], dry_run: DryRun = False,
               if_match: IfMatch = None) -> Response:
    """The desired number changes at once, and engines follow. No operation is created that could be followed or
    cancelled."""
    revision = etags.parse_if_match(if_match, "pool")
    pools.check_desired(body.desired, ctx.cfg.coordinator.max_engines)
    if not ctx.replica.election.is_leader:
        return forward(request, ctx)
    with traces.span("api.patch_pool", parent=traces.extract(request.headers), pool=name, desired=body.desired):
        view = pools.set_desired(ctx.replica.etcd, ctx.keys, ctx.cfg, ctx.replica.election, name, body.desired,
                                 by=caller_of(request).name, if_revision=revision, dry_run=dry_run)
    return Response(view.model_dump_json(), media_type=pages.JSON, headers={"ETag": view.etag})


def scale_pool(request: Request, ctx: JobCtx, name: Name, body: Annotated[Scale, Body()], dry_run: DryRun = False,
               if_match: IfMatch = None, idempotency_key: Key = None) -> Response:
    """Whatever the pool is now, unless ``If-Match`` is given. Engines that are removed finish their requests first."""
    revision = etags.parse_if_match(if_match, "pool") if (if_match or "").strip() else None
    return carry_out(request, ctx, body, idempotency_key, lambda claim: _created(ctx, ctx.operations.scale(
        name, body.desired, by=caller_of(request).name, if_revision=revision, dry_run=dry_run, claim=claim)),
        dry_run=dry_run)


def set_autoscaling(request: Request, ctx: JobCtx, name: Name, body: Annotated[AutoscalerChange, Body()],
                    dry_run: DryRun = False, if_match: IfMatch = None) -> Response:
    """It takes the place of the settings, also over a restart of the job. The leader follows with its next pass; what
    it does is in the pool's events. A number of engines beyond new bounds is brought within them."""
    return _autoscaling(request, ctx, name, body, etags.parse_if_match(if_match, "autoscaling of the pool"), dry_run)


def disable_autoscaling(request: Request, ctx: JobCtx, name: Name, dry_run: DryRun = False, if_match: IfMatch = None
                        ) -> Response:
    """The number of engines stays as it is, and so do the bounds and thresholds, for the next time."""
    revision = etags.parse_if_match(if_match, "autoscaling of the pool") if (if_match or "").strip() else None
    return _autoscaling(request, ctx, name, None, revision, dry_run)


def _autoscaling(request: Request, ctx: JobContext, pool: str, wanted: AutoscalerChange | None, revision: int | None,
                 dry_run: bool) -> Response:
    if not ctx.replica.election.is_leader:
        return forward(request, ctx)
    with traces.span("api.autoscaling", parent=traces.extract(request.headers), pool=pool):
        view = autoscalers.change(ctx.replica.etcd, ctx.keys, ctx.cfg, ctx.replica.election, pool, wanted,
                                  by=caller_of(request).name, if_revision=revision, dry_run=dry_run)
    return Response(view.model_dump_json(), media_type=pages.JSON, headers={"ETag": view.etag})


def drain_engine(request: Request, ctx: JobCtx, engine_id: Name, body: Annotated[EngineDrain, Body()] = EngineDrain(),
                 dry_run: DryRun = False, idempotency_key: Key = None) -> Response:
    """It gets no new requests, finishes those in flight, and leaves its pool."""
    return carry_out(request, ctx, body, idempotency_key, lambda claim: _created(ctx, ctx.operations.drain(
        engine_id, replace=body.replace, by=caller_of(request).name, dry_run=dry_run, claim=claim)), dry_run=dry_run)


def register_engine(request: Request, ctx: JobCtx, body: Annotated[NewExternalEngine, Body()], dry_run: DryRun = False,
                    idempotency_key: Key = None) -> Response:
    """It gets the newest version and, once that is verified, requests. Its server is never stopped."""
    return carry_out(request, ctx, body, idempotency_key, lambda claim: _created(ctx, ctx.operations.register(
        body.url, body.pool, host=body.via, by=caller_of(request).name, dry_run=dry_run, claim=claim)), dry_run=dry_run)


def deregister_engine(request: Request, ctx: JobCtx, engine_id: Name, dry_run: DryRun = False,
                      idempotency_key: Key = None) -> Response:
    """It is drained: it gets no new requests, finishes those in flight, and leaves its pool. Its server keeps running.
    409 for an engine of our own."""
    def change(claim: Claim | None) -> Created:
        found = readable_one(ctx.replica.etcd.get(ctx.keys.engine(engine_id)), Engine)
        if found is not None and not found.external:
            raise Problem(409, Kind.CONFLICT, "The engine is not external",
                          f"engine {engine_id} was started by its pool: drain it, or scale the pool")
        return _created(ctx, ctx.operations.drain(engine_id, by=caller_of(request).name, dry_run=dry_run, claim=claim))

    return carry_out(request, ctx, None, idempotency_key, change, dry_run=dry_run)


def restart(request: Request, ctx: JobCtx, body: Annotated[NewRestart, Body()], dry_run: DryRun = False,
            idempotency_key: Key = None) -> Response:
    """An engine, a role, a trainer group, or the job (the whole compute plane, which resumes from what is
    committed)."""
    return carry_out(request, ctx, body, idempotency_key, lambda claim: _created(ctx, ctx.operations.restart(
        body.target, reason=body.reason, by=caller_of(request).name, dry_run=dry_run, claim=claim)), dry_run=dry_run)


def cancel(request: Request, ctx: JobCtx, operation_id: Name, dry_run: DryRun = False) -> Response:
    """Undoes the request behind it as far as that is still possible (409 if not). One that has ended stays as it is."""
    return carry_out(request, ctx, None, None, lambda _: _created(ctx, ctx.operations.cancel(
        operation_id, by=caller_of(request).name, dry_run=dry_run)), dry_run=dry_run)


def _created(ctx: JobContext, operation: Operation) -> Created:
    return Created(job_path(ctx.keys.job, "operations", operation.id), operation.model_dump_json())
