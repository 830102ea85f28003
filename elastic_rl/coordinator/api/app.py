"""The ASGI application of one replica."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from starlette.types import ASGIApp

import elastic_rl
from elastic_rl.coordinator import dashboard, problems
from elastic_rl.coordinator.api import (
    alert_routes,
    change_routes,
    cluster_routes,
    openapi,
    read_routes,
    sample_routes,
    session_routes,
    stream_routes,
)
from elastic_rl.coordinator.api.context import ReplicaContext
from elastic_rl.coordinator.api.middleware import RequestMiddleware
from elastic_rl.coordinator.problems import Kind, Problem

_ABOUT = """Admin API of an elastic-rl cluster and its jobs. Every replica answers reads; the leader applies changes.

Every request needs a token (or a browser session) but for the probes. POST, PATCH and PUT need `Content-Type:
application/json`, also without a body. Listings are paged: `{"items": […], "next": "…"}`, with `limit` and `after`.
Errors are RFC 9457 problems with a stable `type`. Query parameters that a route does not have are refused."""


def _routes() -> FastAPI:
    app = FastAPI(title="elastic-rl", version=elastic_rl.__version__, docs_url=None, redoc_url=None,
                  description=_ABOUT, separate_input_output_schemas=False, redirect_slashes=False,
                  dependencies=[Depends(_require_json), Depends(_reject_unknown_parameters)])
    problems.install(app)
    cluster_routes.install(app)
    read_routes.install(app)
    sample_routes.install(app)
    stream_routes.install(app)
    change_routes.install(app)
    alert_routes.install(app)
    session_routes.install(app)
    openapi.install(app)
    dashboard.install(app)
    return app


def make_app(context: ReplicaContext) -> ASGIApp:
    """The application of a replica, for a server."""
    return RequestMiddleware(APP, context)


async def _require_json(request: Request) -> None:
    """Refuses changes without a JSON content type, also those without a body: a form of another site cannot have it."""
    if request.method in ("POST", "PATCH", "PUT") and not problems.is_json(request.headers):
        raise problems.not_json()


async def _reject_unknown_parameters(request: Request) -> None:
    """Refuses query parameters that the route does not have: a misspelt one must not be taken for its default."""
    route = request.scope["route"]
    if not route.path.startswith("/v1/"):
        return
    known = frozenset(query_parameters(route.dependant))
    for name in request.query_params:
        if name not in known:
            raise Problem(422, Kind.UNKNOWN_PARAMETER, "There is no such parameter",
                          f"{request.method} {route.path} has " + (", ".join(sorted(known)) or "no parameters"),
                          errors=[{"pointer": f"/{name}", "detail": "unknown"}])


def query_parameters(dependant: Dependant) -> Iterator[str]:
    """Names of the query parameters of a route. They are in the OpenAPI document too, but to build that takes 0.3 s."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for needed in dependant.dependencies:
        yield from query_parameters(needed)


APP = _routes()
"""The application, built once a process, which takes 0.2 s. It belongs to no replica: each request brings the context
of its replica (``RequestMiddleware``)."""
