"""Routes that change something. A follower hands them on to the leader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

from fastapi import Body, FastAPI, Header, Query, Request, Response
from pydantic import BaseModel

from elastic_rl.coordinator import idempotency, pools
from elastic_rl.coordinator.api import describe
from elastic_rl.coordinator.api.context import Context, Ctx, asker, token_of
from elastic_rl.coordinator.api.describe import described
from elastic_rl.coordinator.api.models import Drain, RestartOf, Scale
from elastic_rl.coordinator.api.reads import Name
from elastic_rl.coordinator.idempotency import Claim
from elastic_rl.coordinator.pools import PoolView
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.coordinator.records import Operation
from elastic_rl.errors import OutcomeUnknown
from elastic_rl.telemetry import traces

REPLAYED = "Idempotency-Replayed"

DryRun = Annotated[bool, Query(description="Only say what would be done, and change nothing.")]
IfMatch = Annotated[str | None, Header(alias="If-Match", max_length=100, description="The pool's ETag, or *.")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", pattern=idempotency.PATTERN, description=(
    "Chosen by the client, at most 200 printable characters. The same request with the same key counts once, for a "
    "day: it gets the operation of the first one again."))]
_Begin = Callable[[Claim | None], Operation]


def install(app: FastAPI) -> None:
    """Adds the routes."""
    app.patch("/v1/pools/{name}", response_model=PoolView, **described(describe.PATCH_POOL))(patch_pool)
    app.post("/v1/pools/{name}/scale", response_model=Operation, **described(describe.SCALE))(scale_pool)
    app.post("/v1/engines/{engine_id}/drain", response_model=Operation, **described(describe.DRAIN))(drain_engine)
    app.post("/v1/restarts", response_model=Operation, **described(describe.RESTART))(restart)
    app.delete("/v1/operations/{operation_id}", response_model=Operation, **described(describe.CANCEL))(cancel)


def patch_pool(request: Request, ctx: Ctx, name: Name, body: Annotated[Scale, Body()], dry_run: DryRun = False,
               if_match: IfMatch = None) -> Response:
    """What is wanted changes at once; engines follow. Nothing is begun that could be followed or cancelled."""
    revision = pools.parse_if_match(if_match)
    pools.check_desired(body.desired, ctx.cfg.coordinator.max_engines)
    if not ctx.election.is_leader:
        return _hand_on(request, ctx)
    with traces.span("api.patch_pool", parent=traces.extract(request.headers), pool=name, desired=body.desired):
        view = pools.set_desired(ctx.store, ctx.keys, ctx.election, name, body.desired, by=asker(request),
                                 if_revision=revision, dry_run=dry_run)
    return Response(view.model_dump_json(), media_type="application/json", headers={"ETag": view.etag})


def scale_pool(request: Request, ctx: Ctx, name: Name, body: Annotated[Scale, Body()], dry_run: DryRun = False,
               if_match: IfMatch = None, idempotency_key: Key = None) -> Response:
    """Whatever the pool is now, unless ``If-Match`` is given. Engines that are too many finish their requests first."""
    revision = pools.parse_if_match(if_match) if (if_match or "").strip() else None
    return _begin(request, ctx, body, dry_run, idempotency_key, lambda once: ctx.desk.scale(
        name, body.desired, by=asker(request), if_revision=revision, dry_run=dry_run, once=once))


def drain_engine(request: Request, ctx: Ctx, engine_id: Name, body: Annotated[Drain, Body()] = Drain(),
                 dry_run: DryRun = False, idempotency_key: Key = None) -> Response:
    """It gets no new requests, finishes those in flight, and leaves."""
    return _begin(request, ctx, body, dry_run, idempotency_key, lambda once: ctx.desk.drain(
        engine_id, replace=body.replace, by=asker(request), dry_run=dry_run, once=once))


def restart(request: Request, ctx: Ctx, body: Annotated[RestartOf, Body()], dry_run: DryRun = False,
            idempotency_key: Key = None) -> Response:
    """An engine, a role, the trainer, or the job (the whole compute plane, which resumes from what is committed)."""
    return _begin(request, ctx, body, dry_run, idempotency_key, lambda once: ctx.desk.restart(
        body.target, reason=body.reason, by=asker(request), dry_run=dry_run, once=once))


def cancel(request: Request, ctx: Ctx, operation_id: Name, dry_run: DryRun = False) -> Response:
    """Takes back what it wants, as far as that is still possible (409 if not). One that has ended stays as it is."""
    if not ctx.election.is_leader:
        return _hand_on(request, ctx)
    with traces.span("api.cancel", parent=traces.extract(request.headers), operation=operation_id):
        return _accepted(ctx.desk.cancel(operation_id, by=asker(request), dry_run=dry_run), dry_run)


# -- helpers -----------------------------------------------------------------------------------------------------------
def _hand_on(request: Request, ctx: Context) -> Response:
    return ctx.forwarder.send(request, request.state.body, ctx.election.current())


def _begin(request: Request, ctx: Context, body: BaseModel, dry_run: bool, key: str | None, begin: _Begin) -> Response:
    """Begins an operation, once a key."""
    if not ctx.election.is_leader:
        return _hand_on(request, ctx)
    with traces.span("api.begin", parent=traces.extract(request.headers), path=request.url.path):
        once = _claim(request, ctx, body, key) if key is not None else None
        if once is None or dry_run:
            return _accepted(begin(None), dry_run)
        if (again := _again(ctx, once)) is not None:
            return again
        try:
            return _accepted(begin(once), dry_run)
        except (Problem, OutcomeUnknown):
            # The same request may have come twice at the same time; or it was applied, and the answer was lost.
            if (again := _again(ctx, once)) is not None:
                return again
            raise


def _claim(request: Request, ctx: Context, body: BaseModel, key: str) -> Claim:
    token = token_of(request)
    asked = idempotency.digest(request.method, request.url.path, request.url.query,
                               request.headers.get("if-match", ""), body.model_dump_json())
    return idempotency.claim(ctx.keys, token.name if token else "", key, asked, time.time())


def _again(ctx: Context, once: Claim) -> Response | None:
    """The answer to a request that was carried out before."""
    done = idempotency.found(ctx.store, once)
    if done is None:
        return None
    kv = ctx.store.get(ctx.keys.operation(done.location.rpartition("/")[2]))
    if kv is None:
        raise Problem(410, Kind.GONE, "The operation is no longer kept",
                      f"the request was carried out, as {done.location}")
    return Response(kv.value, 202, {"Location": done.location, REPLAYED: "true"}, "application/json")


def _accepted(operation: Operation, dry_run: bool) -> Response:
    headers = {} if dry_run else {"Location": f"/v1/operations/{operation.id}"}
    return Response(operation.model_dump_json(), 200 if dry_run else 202, headers, "application/json")
