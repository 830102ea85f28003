"""The admin API. Every replica answers reads from etcd; writes go through the leader's fencing token."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Body, Depends, FastAPI, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, StrictInt
from starlette.concurrency import run_in_threadpool

import elastic_rl
from elastic_rl.config import Config
from elastic_rl.coordinator import auth, events, metrics, pools, problems
from elastic_rl.coordinator.alerts import Alert
from elastic_rl.coordinator.auth import Role, Token, TokenTable
from elastic_rl.coordinator.election import Election
from elastic_rl.coordinator.forward import Forwarder
from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.membership import members
from elastic_rl.coordinator.problems import Problem
from elastic_rl.coordinator.records import Engine, Epoch, JobStatus, Version
from elastic_rl.coordinator.store import Store
from elastic_rl.coordinator.stream import EventStreams
from elastic_rl.errors import ConfigError, StoreUnavailable
from elastic_rl.telemetry import metrics as registry
from elastic_rl.telemetry import traces

STREAMS = ("policy", "trainer_state")


class Scale(BaseModel):
    """Body of a pool's change."""

    model_config = ConfigDict(extra="forbid")

    desired: StrictInt


@dataclass(frozen=True)
class Context:
    """What the handlers need. ``store`` has a short retry budget: a client must not wait for an etcd that is away."""

    cfg: Config
    keys: Keys
    store: Store
    election: Election
    tokens: TokenTable
    stopping: threading.Event
    forwarder: Forwarder


def make_app(ctx: Context) -> FastAPI:
    """The ASGI application of one replica."""
    app = FastAPI(title="elastic-rl", version=elastic_rl.__version__, docs_url=None, redoc_url=None,
                  description="Admin API of an elastic-rl job. Errors are RFC 9457 problems.")
    problems.install(app)
    _measure(app)
    _probes(app, ctx)
    viewer = _require(ctx, Role.VIEWER)
    _reads(app, ctx, viewer)
    _events(app, ctx, viewer)
    _writes(app, ctx, _require(ctx, Role.OPERATOR))
    return app


def _require(ctx: Context, needed: Role) -> Callable[[Request], Token | None]:
    required = auth.tokens_required(ctx.cfg.coordinator)

    def check(request: Request) -> Token | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if not token:
            if not required:
                return None
            raise Problem(401, "unauthorized", "A token is required", "send Authorization: Bearer <token>",
                          headers={"WWW-Authenticate": "Bearer"})
        try:
            found = ctx.tokens.find(token.strip()) if scheme.lower() == "bearer" else None
        except ConfigError as e:
            raise Problem(503, "token-table", "The token table cannot be read", e.message) from e
        if found is None:
            raise Problem(401, "unknown-token", "The token is not known", "it is misspelt, or was withdrawn",
                          headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})
        if not found.role.may(needed):
            raise Problem(403, "forbidden", "The token may not do this",
                          f"token {found.name!r} is a {found.role}; this needs an {needed}")
        return found

    return check


def _probes(app: FastAPI, ctx: Context) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the process answers; says nothing about etcd."""
        return {"status": "ok", "replica": ctx.election.replica}

    @app.get("/readyz")
    def readyz() -> dict[str, Any]:
        """Whether requests can be served: 503 while etcd does not answer or the replica stops."""
        if ctx.stopping.is_set():
            raise Problem(503, "stopping", "The replica is stopping")
        try:
            leader = ctx.election.current()
        except StoreUnavailable as e:
            raise problems.of_error(e) from e
        return {"status": "ready", "replica": ctx.election.replica, "leader": leader.replica if leader else None}


def _reads(app: FastAPI, ctx: Context, viewer: Callable[..., Token | None]) -> None:
    store, keys = ctx.store, ctx.keys
    may_read = [Depends(viewer)]

    @app.get("/metrics", dependencies=may_read)
    def prometheus() -> Response:
        return Response(metrics.scrape(store, keys, ctx.election), media_type=registry.CONTENT_TYPE)

    @app.get("/v1/job", dependencies=may_read)
    def job() -> dict[str, Any]:
        status, epoch, leader = store.get(keys.job_status()), store.get(keys.epoch()), ctx.election.current()
        return {"job": keys.job,
                "status": JobStatus.decode(status.value).model_dump(mode="json") if status else None,
                "epoch": Epoch.decode(epoch.value).number if epoch else 0,
                "leader": leader.model_dump(mode="json") if leader else None, "replica": ctx.election.replica,
                "pools": [p.model_dump(mode="json") for p in pools.all_pools(store, keys)]}

    @app.get("/v1/pools", dependencies=may_read)
    def list_pools() -> list[pools.PoolView]:
        return pools.all_pools(store, keys)

    @app.get("/v1/pools/{name}", dependencies=may_read)
    def one_pool(name: str, response: Response) -> pools.PoolView:
        found = pools.get_pool(store, keys, name)
        response.headers["ETag"] = found.etag
        return found

    @app.get("/v1/engines", dependencies=may_read)
    def list_engines() -> list[Engine]:
        return [Engine.decode(kv.value) for kv in store.range(keys.engines_prefix())[0]]

    @app.get("/v1/engines/{engine_id}", dependencies=may_read)
    def one_engine(engine_id: str) -> Engine:
        found = store.get(keys.engine(engine_id))
        if found is None:
            raise problems.not_found("engine", engine_id)
        return Engine.decode(found.value)

    @app.get("/v1/versions", dependencies=may_read)
    def list_versions(stream: str | None = None, limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> list[Version]:
        """The newest versions, oldest first."""
        found = [Version.decode(kv.value) for name in ([stream] if stream else STREAMS)
                 for kv in store.range(keys.versions_prefix(name), limit=limit, newest_first=True)[0]]
        return sorted(found, key=lambda v: (v.created_at, v.number))[-limit:]

    @app.get("/v1/members", dependencies=may_read)
    def list_members(role: str = "") -> list[dict[str, Any]]:
        return [m.model_dump(mode="json") for m in members(store, keys, role)]

    @app.get("/v1/alerts", dependencies=may_read)
    def list_alerts() -> list[Alert]:
        """Alerts that are open, and those whose end was not told to every receiver yet."""
        return [Alert.decode(kv.value) for kv in store.range(keys.alerts_prefix())[0]]


def _events(app: FastAPI, ctx: Context, viewer: Callable[..., Token | None]) -> None:
    streams = EventStreams(ctx.store, ctx.keys, ctx.stopping)

    @app.get("/v1/events", dependencies=[Depends(viewer)], response_model=None)
    async def list_events(request: Request, limit: Annotated[int, Query(ge=0, le=10_000)] = 100,
                          after: Annotated[int | None, Query(ge=0)] = None) -> Any:
        """The newest events as a list, oldest first; or, with ``Accept: text/event-stream``, these and then every new
        one. A stream resumes after the revision in ``Last-Event-ID`` (or ``after``)."""
        if "text/event-stream" not in request.headers.get("accept", ""):
            found = await run_in_threadpool(events.recent, ctx.store, ctx.keys, max(1, limit))
            return [e.model_dump(mode="json") for e in found]
        last = request.headers.get("last-event-id", "")
        if last and not last.isdecimal():
            raise Problem(422, "invalid", "The request is not valid", f"Last-Event-ID {last!r} is not a revision")
        frames = await streams.follow(int(last) if last else after, limit)
        return StreamingResponse(frames, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _writes(app: FastAPI, ctx: Context, operator: Callable[..., Token | None]) -> None:
    def change(request: Request, name: str, body: Scale, token: Token | None, if_revision: int | None) -> Response:
        desired = pools.check_desired(body.desired, ctx.cfg.coordinator.max_engines)
        with traces.span("api.scale", parent=traces.extract(request.headers), pool=name, desired=desired):
            if not ctx.election.is_leader:
                return ctx.forwarder.send(request, body.model_dump_json().encode(), ctx.election.current())
            by = token.name if token else "operator"
            view = pools.set_desired(ctx.store, ctx.keys, ctx.election, name, desired, by=by, if_revision=if_revision)
        return Response(view.model_dump_json(), media_type="application/json", headers={"ETag": view.etag})

    @app.patch("/v1/pools/{name}", response_model=pools.PoolView)
    def patch_pool(request: Request, name: str, body: Annotated[Scale, Body()],
                   token: Token | None = Depends(operator)) -> Response:
        """Changes a pool if it is still the one that ``If-Match`` names."""
        return change(request, name, body, token, pools.parse_if_match(request.headers.get("if-match")))

    @app.post("/v1/pools/{name}/scale", response_model=pools.PoolView)
    def scale_pool(request: Request, name: str, body: Annotated[Scale, Body()],
                   token: Token | None = Depends(operator)) -> Response:
        """Changes a pool whatever it is now."""
        return change(request, name, body, token, None)


def _measure(app: FastAPI) -> None:
    @app.middleware("http")
    async def measure(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        started = time.monotonic()
        response = await call_next(request)
        route = getattr(request.scope.get("route"), "path", "unknown")
        metrics.REQUESTS.labels(request.method, route, response.status_code).inc()
        metrics.REQUEST_S.labels(request.method, route).observe(time.monotonic() - started)
        return response
