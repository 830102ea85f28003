"""Errors of the admin API as RFC 9457 problems. ``type`` is stable: programs may decide by it, texts may change."""

from __future__ import annotations

import json
import logging
from enum import StrEnum
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match

from elastic_rl.errors import Conflict, ElasticRLError, EtcdUnavailable, Fenced, OutcomeUnknown
from elastic_rl.net import problem_details
from elastic_rl.net.problem_details import MEDIA_TYPE

log = logging.getLogger(__name__)


class Kind(StrEnum):
    """The last part of a problem's ``type``. None is ever renamed or used for something else."""

    MALFORMED = problem_details.MALFORMED
    UNAUTHORIZED = "unauthorized"
    UNKNOWN_TOKEN = "unknown-token"
    UNKNOWN_SESSION = "unknown-session"
    UNKNOWN_LINK = "unknown-link"
    FORBIDDEN = "forbidden"
    CROSS_SITE = "cross-site"
    NOT_FOUND = "not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    REQUEST_TIMEOUT = "request-timeout"
    CONFLICT = "conflict"
    GONE = "gone"
    PRECONDITION_FAILED = "precondition-failed"
    BODY_TOO_LARGE = "body-too-large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported-media-type"
    UNKNOWN_HOST = "unknown-host"
    INVALID = "invalid"
    UNKNOWN_PARAMETER = "unknown-parameter"
    IDEMPOTENCY_KEY_REUSED = "idempotency-key-reused"
    PRECONDITION_REQUIRED = "precondition-required"
    HEADERS_TOO_LARGE = problem_details.HEADERS_TOO_LARGE
    HTTP = problem_details.OTHER
    INTERNAL = "internal"
    NO_LEADER = "no-leader"
    JOB_NOT_OPEN = "job-not-open"
    ETCD_UNAVAILABLE = "etcd-unavailable"
    STOPPING = "stopping"
    NOT_RECONCILING = "not-reconciling"
    TOKEN_TABLE = "token-table"
    OVERLOADED = "overloaded"
    TOO_MANY_STREAMS = "too-many-streams"
    OUTCOME_UNKNOWN = "outcome-unknown"


class Problem(Exception):
    """An error answer. ``kind`` is the last part of the problem's ``type``."""

    def __init__(self, status: int, kind: str, title: str, detail: str = "", *,
                 headers: dict[str, str] | None = None, **members: Any) -> None:
        super().__init__(f"{status} {kind}: {detail or title}")
        self.status, self.kind, self.title, self.detail = status, Kind(kind), title, detail
        self.headers, self.members = headers or {}, members

    def body(self, instance: str) -> dict[str, Any]:
        return problem_details.problem_details(self.kind, self.status, self.title, self.detail or self.title,
                                               instance=instance, **self.members)

    def response(self, instance: str) -> Response:
        """The answer. ASCII only: a client's own text, which may not even be valid Unicode, comes back in it."""
        return Response(json.dumps(self.body(instance)), self.status, self.headers, MEDIA_TYPE)


def not_found(what: str, name: str) -> Problem:
    return Problem(404, Kind.NOT_FOUND, "Not found", f"there is no {what} {name!r}")


def unreadable(what: str, name: str) -> Problem:
    """A listing leaves such a record out."""
    return Problem(404, Kind.NOT_FOUND, "Not found", f"the record of the {what} {name!r} cannot be read, which a later "
                   "release may have written; the alert record.unreadable says why")


def no_pool(name: str) -> Problem:
    return Problem(404, Kind.NOT_FOUND, "Not found",
                   f"there is no pool {name!r}; a job has its pools once a run of it has begun (`elastic-rl train`)")


def no_leader(detail: str) -> Problem:
    return Problem(503, Kind.NO_LEADER, "There is no leader at the moment", detail, headers={"Retry-After": "1"})


def concurrent_modification() -> Problem:
    return Problem(409, Kind.CONFLICT, "Concurrent modification",
                   "another writer keeps changing the same record; try again")


def is_json(headers: Headers) -> bool:
    """Whether a request says that its body is JSON."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def not_json() -> Problem:
    return Problem(415, Kind.UNSUPPORTED_MEDIA_TYPE, "Unsupported media type",
                   "send the request as Content-Type: application/json, also when it has no body")


def of_error(error: ElasticRLError) -> Problem:
    """The problem for one of the project's own errors."""
    match error:
        case OutcomeUnknown():
            return Problem(504, Kind.OUTCOME_UNKNOWN, "The outcome of the write is unknown", str(error))
        case EtcdUnavailable():
            return Problem(503, Kind.ETCD_UNAVAILABLE, "etcd does not answer", str(error),
                           headers={"Retry-After": "2"})
        case Fenced():
            return no_leader(str(error))
        case Conflict():
            return Problem(409, Kind.CONFLICT, "It was modified concurrently", str(error))
        case _:
            return Problem(500, Kind.INTERNAL, "Internal error", str(error))


def of_validation(error: RequestValidationError) -> Problem:
    """400 for a body that is not JSON; else 422, with a pointer to each error."""
    errors = [{"pointer": "/" + "/".join(str(p) for p in err["loc"][1:]), "detail": err["msg"]}
              for err in error.errors()]
    if any(err["type"] == "json_invalid" for err in error.errors()):
        return Problem(400, Kind.MALFORMED, "The body is not JSON", errors[0]["detail"])
    detail = "; ".join(f"{err['pointer']}: {err['detail']}" for err in errors)
    return Problem(422, Kind.INVALID, "The request is not valid", detail, errors=errors)


def allowed_methods(request: Request) -> list[str]:
    """Methods that the routes of this path take, in order; empty when there is no such path."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(dict(request.scope))[0] is not Match.NONE:
            methods |= set(getattr(route, "methods", None) or ())
    if not methods:
        return []
    return sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set()))


def install(app: FastAPI) -> None:
    """Turns every error of the app into a problem."""

    @app.exception_handler(Problem)
    async def _problem(request: Request, e: Problem) -> Response:
        return e.response(request.url.path)

    @app.exception_handler(ElasticRLError)
    async def _own(request: Request, e: ElasticRLError) -> Response:
        problem = of_error(e)
        log.log(logging.ERROR if problem.status == 500 else logging.WARNING, "%s %s: %s", request.method,
                request.url.path, e)
        return problem.response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, e: RequestValidationError) -> Response:
        return of_validation(e).response(request.url.path)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, e: HTTPException) -> Response:
        headers, path = dict(e.headers or {}), request.url.path
        match e.status_code:
            case 404:
                problem = Problem(404, Kind.NOT_FOUND, "Not found", f"there is nothing at {path}", headers=headers)
            case 405:
                allow = ", ".join(allowed_methods(request))
                if request.method == "OPTIONS":
                    return Response(status_code=204, headers={"Allow": allow})
                problem = Problem(405, Kind.METHOD_NOT_ALLOWED, "Method not allowed",
                                  f"{path} takes {allow}, not {request.method}", headers={"Allow": allow})
            case 400:
                problem = Problem(400, Kind.MALFORMED, "The body is not JSON", str(e.detail), headers=headers)
            case _:
                problem = Problem(e.status_code, Kind.HTTP, str(e.detail), headers=headers)
        return problem.response(path)

    @app.exception_handler(Exception)
    async def _bug(request: Request, e: Exception) -> Response:
        detail = "this is a bug; the traceback is in the replica's log"
        return Problem(500, Kind.INTERNAL, "Internal error", detail).response(request.url.path)
