"""Routes by which a browser gets a session, and gives it back."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, FastAPI, Request, Response

from elastic_rl.coordinator import problems
from elastic_rl.coordinator.api import pages, route_docs
from elastic_rl.coordinator.api.auth import Role
from elastic_rl.coordinator.api.authentication import Caller
from elastic_rl.coordinator.api.context import ReplicaCtx, caller_of
from elastic_rl.coordinator.api.models import NewSession, NewSessionLink, SessionLink, SessionView
from elastic_rl.coordinator.api.route_docs import described
from elastic_rl.coordinator.problems import Kind, Problem


def install(app: FastAPI) -> None:
    """Adds the routes."""
    app.post("/v1/session-links", response_model=SessionLink, **described(route_docs.SESSION_LINK))(create_link)
    app.post("/v1/session", response_model=SessionView, **described(route_docs.OPEN_SESSION))(open_session)
    app.get("/v1/session", response_model=SessionView, **described(route_docs.SESSION))(session)
    app.delete("/v1/session", response_model=SessionView, **described(route_docs.END_SESSION))(end_session)


def create_link(request: Request, ctx: ReplicaCtx, body: Annotated[NewSessionLink, Body()] = NewSessionLink()
                ) -> Response:
    """Any page of the dashboard opens a session with it, once, until ``expires_at``: append ``#link=<link>`` to the
    page's address. It takes a token: a session makes no further ones."""
    caller = caller_of(request)
    if caller.token is None:
        raise Problem(403, Kind.FORBIDDEN, "A session may not do this", "this needs a token")
    role = body.role or caller.role
    if not caller.role.may(role):
        raise Problem(403, Kind.FORBIDDEN, "The token may not do this", f"{caller.name!r} is a {caller.role}")
    link, grant = ctx.sessions.create_link(caller.token, role)
    return _json(SessionLink(link=link, name=grant.name, role=grant.role, expires_at=grant.expires_at), 201)


def open_session(request: Request, ctx: ReplicaCtx, body: Annotated[NewSession, Body()] = NewSession()) -> Response:
    """Opens a session with a link in the body, or with a token in the header. The session is in the cookie of the
    answer, which no script can read and which is sent with requests of the dashboard's own page only."""
    caller: Caller | None = request.state.caller
    if body.link:
        opened = ctx.sessions.redeem(body.link)
        if opened is None:
            raise Problem(401, Kind.UNKNOWN_LINK, "The link opens nothing", "it was used already, or has expired; run "
                          "`elastic-rl dashboard` for another one", headers={"WWW-Authenticate": "Bearer"})
    elif caller is None or caller.token is None:
        raise Problem(401, Kind.UNAUTHORIZED, "A link or a token is required", "send {\"link\": …} or a token",
                      headers={"WWW-Authenticate": "Bearer"})
    else:
        opened = ctx.sessions.open(caller.token)
    if replaced := ctx.authenticator.session_of(request.headers):
        ctx.sessions.end(replaced)
    secret, grant = opened
    answer = _json(SessionView(name=grant.name, role=grant.role, expires_at=grant.expires_at))
    answer.set_cookie(ctx.authenticator.cookie, secret, max_age=ctx.cfg.coordinator.session_ttl_s, path="/",
                      secure=request.url.scheme == "https", httponly=True, samesite="strict")
    return answer


def session(request: Request) -> Response:
    """Who the caller is, and until when."""
    return _json(_view(caller_of(request)))


def end_session(request: Request, ctx: ReplicaCtx) -> Response:
    """Ends the caller's own session, on every replica."""
    caller = caller_of(request)
    if not caller.session:
        raise problems.not_found("session of", caller.name)
    ctx.sessions.end(caller.session)
    answer = _json(_view(caller))
    answer.delete_cookie(ctx.authenticator.cookie, path="/", httponly=True, samesite="strict")
    return answer


def _view(caller: Caller) -> SessionView:
    return SessionView(name=caller.name, role=Role(caller.role), expires_at=caller.expires_at)


def _json(body: SessionLink | SessionView, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type=pages.JSON)
