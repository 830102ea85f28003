"""Routes that change pools, engines and the run. Those that take their time begin an operation."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, FastAPI, Header, Request, Response

from elastic_rl.coordinator import pools
from elastic_rl.coordinator.api import route_docs
from elastic_rl.coordinator.api.context import Ctx, asker
from elastic_rl.coordinator.api.idempotent import OPERATIONS, DryRun, Key, Made, carry_out, hand_on
from elastic_rl.coordinator.api.models import Adopt, Drain, RestartOf, Scale
from elastic_rl.coordinator.api.read_routes import Name
from elastic_rl.coordinator.api.route_docs import described
from elastic_rl.coordinator.pools import PoolView
from elastic_rl.etcd.records import Operation
from elastic_rl.telemetry import traces

IfMatch = Annotated[str | None, Header(alias="If-Match", max_length=100, description="The pool's ETag, or *.")]


def install(app: FastAPI) -> None:
    """Adds the routes."""
    app.patch("/v1/pools/{name}", response_model=PoolView, **described(route_docs.PATCH_POOL))(patch_pool)
    app.post("/v1/pools/{name}/scale", response_model=Operation, **described(route_docs.SCALE))(scale_pool)
    app.post("/v1/engines", response_model=Operation, **described(route_docs.ADOPT))(adopt_engine)
    app.post("/v1/engines/{engine_id}/drain", response_model=Operation, **described(route_docs.DRAIN))(drain_engine)
    app.post("/v1/restarts", response_model=Operation, **described(route_docs.RESTART))(restart)
    app.delete("/v1/operations/{operation_id}", response_model=Operation, **described(route_docs.CANCEL))(cancel)


def patch_pool(request: Request, ctx: Ctx, name: Name, body: Annotated[Scale, Body()], dry_run: DryRun = False,
               if_match: IfMatch = None) -> Response:
    """What is wanted changes at once; engines follow. Nothing is begun that could be followed or cancelled."""
    revision = pools.parse_if_match(if_match)
    pools.check_desired(body.desired, ctx.cfg.coordinator.max_engines)
    if not ctx.election.is_leader:
        return hand_on(request, ctx)
    with traces.span("api.patch_pool", parent=traces.extract(request.headers), pool=name, desired=body.desired):
        view = pools.set_desired(ctx.etcd, ctx.keys, ctx.election, name, body.desired, by=asker(request),
                                 if_revision=revision, dry_run=dry_run)
    return Response(view.model_dump_json(), media_type="application/json", headers={"ETag": view.etag})


def scale_pool(request: Request, ctx: Ctx, name: Name, body: Annotated[Scale, Body()], dry_run: DryRun = False,
               if_match: IfMatch = None, idempotency_key: Key = None) -> Response:
    """Whatever the pool is now, unless ``If-Match`` is given. Engines that are too many finish their requests first."""
    revision = pools.parse_if_match(if_match) if (if_match or "").strip() else None
    return carry_out(request, ctx, body, idempotency_key, lambda once: _made(ctx.desk.scale(
        name, body.desired, by=asker(request), if_revision=revision, dry_run=dry_run, claim=once)), dry_run=dry_run)


def drain_engine(request: Request, ctx: Ctx, engine_id: Name, body: Annotated[Drain, Body()] = Drain(),
                 dry_run: DryRun = False, idempotency_key: Key = None) -> Response:
    """It gets no new requests, finishes those in flight, and leaves."""
    return carry_out(request, ctx, body, idempotency_key, lambda once: _made(ctx.desk.drain(
        engine_id, replace=body.replace, by=asker(request), dry_run=dry_run, claim=once)), dry_run=dry_run)


def adopt_engine(request: Request, ctx: Ctx, body: Annotated[Adopt, Body()], dry_run: DryRun = False,
                 idempotency_key: Key = None) -> Response:
    """It gets the newest version and, once that is verified, requests. Its server is never ended."""
    return carry_out(request, ctx, body, idempotency_key, lambda once: _made(ctx.desk.register(
        body.url, body.pool, by=asker(request), dry_run=dry_run, claim=once)), dry_run=dry_run)


def restart(request: Request, ctx: Ctx, body: Annotated[RestartOf, Body()], dry_run: DryRun = False,
            idempotency_key: Key = None) -> Response:
    """An engine, a role, the trainer, or the job (the whole compute plane, which resumes from what is committed)."""
    return carry_out(request, ctx, body, idempotency_key, lambda once: _made(ctx.desk.restart(
        body.target, reason=body.reason, by=asker(request), dry_run=dry_run, claim=once)), dry_run=dry_run)


def cancel(request: Request, ctx: Ctx, operation_id: Name, dry_run: DryRun = False) -> Response:
    """Takes back what it wants, as far as that is still possible (409 if not). One that has ended stays as it is."""
    return carry_out(request, ctx, None, None, lambda _: _made(ctx.desk.cancel(
        operation_id, by=asker(request), dry_run=dry_run)), dry_run=dry_run)


def _made(operation: Operation) -> Made:
    return Made(OPERATIONS + operation.id, operation.model_dump_json())
