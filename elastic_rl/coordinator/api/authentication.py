"""Who sends a request: the owner of a token, or a browser with a session."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import cookie_parser

from elastic_rl.coordinator.api.auth import Role, Token, TokenTable
from elastic_rl.coordinator.api.sessions import SessionStore
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.errors import ConfigError

BEARER, SESSION = "bearer", "session"
"""Schemes of the Authorization header. The second is how a follower passes a browser's session on to the leader."""


@dataclass(frozen=True)
class Caller:
    """Who was let in, and as what."""

    name: str
    """Name of the token, for events and records."""
    role: Role
    token: Token | None = None
    """The token of the caller; None for a session."""
    session: str = ""
    """The session's secret; empty for a token."""
    expires_at: float | None = None
    """Unix seconds; None: does not expire."""


@dataclass(frozen=True)
class Credentials:
    """What a request shows; not checked yet."""

    scheme: str
    """``bearer``, ``session``, another word that the client chose, or "" for nothing."""
    secret: str
    cookie: bool = False
    """Whether a browser sent it by itself."""


class Authenticator:
    """Identifies callers by their tokens and sessions."""

    def __init__(self, cluster: str, tokens: TokenTable, sessions: SessionStore) -> None:
        self._tokens, self._sessions = tokens, sessions
        self.cookie = f"elastic-rl-{hashlib.blake2s(cluster.encode(), digest_size=4).hexdigest()}"
        """Name of the session's cookie. Cookies of a host are shared by all its ports, and so by its clusters."""

    def credentials(self, headers: Headers) -> Credentials:
        """The credentials of a request's headers; a header outdoes a cookie."""
        if given := headers.get("authorization", ""):
            scheme, _, secret = given.partition(" ")
            return Credentials(scheme.lower(), secret.strip())
        secret = self.session_of(headers)
        return Credentials(SESSION, secret, cookie=True) if secret else Credentials("", "")

    def session_of(self, headers: Headers) -> str:
        """The secret in the session's cookie; "" without one."""
        return cookie_parser(headers.get("cookie", "")).get(self.cookie, "")

    def identify(self, credentials: Credentials) -> Caller:
        """Who that is; reads etcd for a session. Raises 401 problems, a 503 problem when the token table cannot be
        read, and EtcdUnavailable."""
        if not credentials.scheme:
            raise Problem(401, Kind.UNAUTHORIZED, "A token or a session is required",
                          "send Authorization: Bearer <token>; for the dashboard run `elastic-rl dashboard`",
                          headers={"WWW-Authenticate": "Bearer"})
        try:
            if credentials.scheme == SESSION:
                return self._by_session(credentials.secret)
            token = self._tokens.find(credentials.secret) if credentials.scheme == BEARER else None
        except ConfigError as e:
            raise Problem(503, Kind.TOKEN_TABLE, "The token table cannot be read", e.message) from e
        if token is None:
            raise Problem(401, Kind.UNKNOWN_TOKEN, "The token is not known", "it is misspelt, or was withdrawn",
                          headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})
        return Caller(token.name, token.role, token)

    def _by_session(self, secret: str) -> Caller:
        grant = self._sessions.find(secret)
        if grant is None:
            raise Problem(401, Kind.UNKNOWN_SESSION, "The session has ended",
                          "it has expired, was ended, or its token was withdrawn; run `elastic-rl dashboard` for "
                          "another one", headers={"WWW-Authenticate": "Bearer"})
        return Caller(grant.name, grant.role, session=secret, expires_at=grant.expires_at)
