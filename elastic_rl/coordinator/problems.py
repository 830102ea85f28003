"""Errors of the admin API as RFC 9457 problems. ``type`` is stable: programs may decide by it, texts may change."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from elastic_rl.errors import Conflict, ElasticRLError, Fenced, OutcomeUnknown, StoreUnavailable

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:elastic-rl:problem:"


class Problem(Exception):
    """An answer that is an error. ``kind`` is the last part of the problem's ``type``."""

    def __init__(self, status: int, kind: str, title: str, detail: str = "", *,
                 headers: dict[str, str] | None = None, **members: Any) -> None:
        super().__init__(f"{status} {kind}: {detail or title}")
        self.status, self.kind, self.title, self.detail = status, kind, title, detail
        self.headers, self.members = headers or {}, members

    def body(self, instance: str) -> dict[str, Any]:
        return {"type": TYPE_PREFIX + self.kind, "title": self.title, "status": self.status,
                "detail": self.detail or self.title, "instance": instance, **self.members}


def not_found(what: str, name: str) -> Problem:
    return Problem(404, "not-found", "Not found", f"there is no {what} {name!r}")


def no_leader(detail: str) -> Problem:
    return Problem(503, "no-leader", "No leader takes writes at the moment", detail, headers={"Retry-After": "1"})


def of_error(error: ElasticRLError) -> Problem:
    """The problem that tells a client of one of the project's own errors."""
    match error:
        case OutcomeUnknown():
            return Problem(504, "outcome-unknown", "The outcome of the write is unknown", str(error))
        case StoreUnavailable():
            return Problem(503, "store-unavailable", "The store does not answer", str(error),
                           headers={"Retry-After": "2"})
        case Fenced():
            return no_leader(str(error))
        case Conflict():
            return Problem(409, "conflict", "Somebody else changed it at the same time", str(error))
        case _:
            return Problem(500, "internal", "Internal error", str(error))


def install(app: FastAPI) -> None:
    """Makes every error of the app a problem."""

    def answer(request: Request, problem: Problem) -> JSONResponse:
        return JSONResponse(problem.body(request.url.path), problem.status, problem.headers, MEDIA_TYPE)

    @app.exception_handler(Problem)
    async def _problem(request: Request, e: Problem) -> JSONResponse:
        return answer(request, e)

    @app.exception_handler(ElasticRLError)
    async def _own(request: Request, e: ElasticRLError) -> JSONResponse:
        problem = of_error(e)
        log.log(logging.ERROR if problem.status == 500 else logging.WARNING, "%s %s: %s", request.method,
                request.url.path, e)
        return answer(request, problem)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, e: RequestValidationError) -> JSONResponse:
        errors = [{"pointer": "/" + "/".join(str(p) for p in err["loc"][1:]), "detail": err["msg"]}
                  for err in e.errors()]
        if any(err["type"] == "json_invalid" for err in e.errors()):
            return answer(request, Problem(400, "malformed", "The body is not JSON", errors[0]["detail"]))
        detail = "; ".join(f"{err['pointer']}: {err['detail']}" for err in errors)
        return answer(request, Problem(422, "invalid", "The request is not valid", detail, errors=errors))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, e: HTTPException) -> JSONResponse:
        kinds = {404: "not-found", 405: "method-not-allowed"}
        return answer(request, Problem(e.status_code, kinds.get(e.status_code, "http"), str(e.detail),
                                       headers=dict(e.headers or {})))
