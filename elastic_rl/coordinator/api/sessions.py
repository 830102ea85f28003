"""Browser sessions: a link that works once becomes a cookie.

A browser must not be handed a token that is good for ever. So a token makes a link, the link opens one session, and
the session is a random secret in a cookie that no script can read. etcd holds digests of links and sessions, each under
a lease of its own: every replica accepts them, and what has expired is gone. A session may do no more
than the token behind it, and ends when that token is withdrawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pydantic import ValidationError

from elastic_rl.config import CoordinatorConfig
from elastic_rl.coordinator.api.auth import Role, Token, TokenTable, digest, new_token
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.records import Record

MAX_GRANTS = 32
"""Links, and sessions, that one token has at once; a further one ends the oldest."""


class Grant(Record):
    """What a link or a session allows. Times are unix seconds."""

    token: str
    """SHA-256 digest of the token behind it."""
    name: str
    """Name of that token."""
    role: Role
    created_at: float
    expires_at: float


class SessionStore:
    """Links and sessions of one cluster. Every method raises EtcdUnavailable when etcd does not answer, and those that
    check the token behind a grant raise ConfigError when the token table cannot be read."""

    def __init__(self, etcd: EtcdClient, keys: ClusterKeys, tokens: TokenTable, cfg: CoordinatorConfig, *,
                 clock: Callable[[], float] = time.time) -> None:
        self._etcd, self._keys, self._tokens, self._cfg, self._clock = etcd, keys, tokens, cfg, clock

    def create_link(self, token: Token, role: Role) -> tuple[str, Grant]:
        """A code that opens one session of this role, once, within ``coordinator.link_ttl_s``."""
        return self._create(self._keys.session_links_prefix(), token, role, self._cfg.link_ttl_s)

    def open(self, token: Token) -> tuple[str, Grant]:
        """A session of a token's own role: the secret for the cookie, and what it allows."""
        return self._create(self._keys.sessions_prefix(), token, token.role, self._cfg.session_ttl_s)

    def redeem(self, code: str) -> tuple[str, Grant] | None:
        """The session that a link opens; None for one that was used, has expired, or never was."""
        found = self._etcd.get(self._keys.session_links_prefix() + digest(code))
        link = self._valid(found.value) if found else None
        if found is None or link is None:
            return None
        prefix = self._keys.sessions_prefix()
        self._make_room(prefix, link.token)
        secret, grant = new_token(), self._expiring(link, self._cfg.session_ttl_s)
        opened = self._etcd.txn([Compare.mod(found.key, "==", found.mod_revision)], [
            Op.delete(found.key), self._put(prefix, secret, grant, self._cfg.session_ttl_s)])
        return (secret, grant) if opened.succeeded else None

    def find(self, secret: str) -> Grant | None:
        """What a session allows now; None when it has ended."""
        found = self._etcd.get(self._keys.sessions_prefix() + digest(secret))
        return self._valid(found.value) if found else None

    def end(self, secret: str) -> None:
        self._etcd.delete(self._keys.sessions_prefix() + digest(secret))

    def _create(self, prefix: str, token: Token, role: Role, ttl_s: int) -> tuple[str, Grant]:
        self._make_room(prefix, token.sha256)
        secret = new_token()
        grant = self._expiring(Grant(token=token.sha256, name=token.name, role=role, created_at=0, expires_at=0), ttl_s)
        self._etcd.txn([], [self._put(prefix, secret, grant, ttl_s)])
        return secret, grant

    def _expiring(self, grant: Grant, ttl_s: int) -> Grant:
        now = self._clock()
        return grant.replace(created_at=now, expires_at=now + ttl_s)

    def _put(self, prefix: str, secret: str, grant: Grant, ttl_s: int) -> Op:
        # The lease is not renewed: etcd deletes the key when it ends.
        return Op.put(prefix + digest(secret), grant.encode(), self._etcd.grant(ttl_s))

    def _valid(self, raw: bytes) -> Grant | None:
        """A grant as far as the token behind it still goes; None when it has ended."""
        grant = _decode(raw)
        if grant is None or grant.expires_at < self._clock():  # etcd prolongs leases when its own leader changes
            return None
        token = self._tokens.find_digest(grant.token)
        if token is None:
            return None
        return grant if token.role.may(grant.role) else grant.replace(role=token.role)

    def _make_room(self, prefix: str, token: str) -> None:
        """Deletes the oldest grants of a token, so that one more is at most MAX_GRANTS."""
        kvs, _ = self._etcd.range(prefix)
        mine = sorted((kv.create_revision, kv.key) for kv in kvs
                      if (grant := _decode(kv.value)) is not None and grant.token == token)
        if gone := mine[:max(0, len(mine) - MAX_GRANTS + 1)]:
            self._etcd.txn([], [Op.delete(key) for _, key in gone])


def _decode(raw: bytes) -> Grant | None:
    """None for a record that this release cannot read."""
    try:
        return Grant.decode(raw)
    except ValidationError:
        return None
