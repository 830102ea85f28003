"""Requests that may be sent twice and count once: what each Idempotency-Key led to.

The record of a key is written in the transaction that carries its request out, on the condition that it was not there.
So a client whose answer was lost sends the request again, to whichever replica leads by then, and is told what the
first one has begun. Records are kept for a day; the leader trims them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from elastic_rl.coordinator.problems import Problem
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Record
from elastic_rl.etcd.transaction import batches

KEPT_S = 24 * 3600.0
MOST = 10_000
"""Records kept at most; beyond that the oldest go early."""
LONGEST = 200
_PAGE = 500
PATTERN = rf"^[!-~]{{1,{LONGEST}}}$"
"""Of a key: printable ASCII without spaces."""


class Done(Record):
    """What a request has led to. ``at`` is in unix seconds."""

    request: str
    """Digest of the request, so that the key is not taken for another one."""
    location: str
    """Path of what it created."""
    at: float


@dataclass(frozen=True)
class Claim:
    """One use of a key. Its conditions and writes belong into the transaction that carries the request out."""

    key: str
    request: str
    at: float

    @property
    def compares(self) -> list[Compare]:
        """That no request with this key was carried out yet."""
        return [Compare.absent(self.key)]

    def ops(self, location: str) -> list[Op]:
        return [Op.put(self.key, Done(request=self.request, location=location, at=self.at).encode())]


def digest(*parts: str) -> str:
    """Of several texts; where one ends and the next begins counts."""
    return hashlib.sha256(b"".join(len(p.encode()).to_bytes(8, "big") + p.encode() for p in parts)).hexdigest()


def claim(keys: Keys, token: str, header: str, request: str, now: float) -> Claim:
    """The claim of a key by the owner of a token; ``request`` is the request's digest. Keys of two owners are two keys.

    Raises a 422 problem for a key that is empty, too long, or not of printable ASCII.
    """
    if not re.fullmatch(PATTERN, header):
        raise Problem(422, "invalid", "The request is not valid",
                      f"Idempotency-Key must be 1 to {LONGEST} printable ASCII characters without spaces",
                      errors=[{"pointer": "/Idempotency-Key", "detail": "1 to 200 printable ASCII characters"}])
    return Claim(keys.idempotency(digest(token, header)), request, now)


def found(etcd: EtcdClient, wanted: Claim) -> Done | None:
    """What the key has led to already. Raises a 422 problem when that was another request."""
    kv = etcd.get(wanted.key)
    if kv is None:
        return None
    done = Done.decode(kv.value)
    if done.request != wanted.request:
        raise Problem(422, "idempotency-key-reused", "The Idempotency-Key belongs to another request",
                      f"it was used for the request that led to {done.location}; take a new key for a new request")
    return done


def outdated(kvs: Sequence[tuple[str, float]], now: float) -> list[str]:
    """Keys whose records need not be kept any longer: ``kvs`` is of (key, time written). Pure."""
    newest = sorted(kvs, key=lambda entry: entry[1], reverse=True)
    return [key for n, (key, at) in enumerate(newest) if n >= MOST or at < now - KEPT_S]


def _written_at(raw: bytes) -> float:
    """Unix seconds; 0 for what is no record of ours, so that it goes."""
    try:
        return Done.decode(raw).at
    except ValidationError:
        return 0.0


def trim(etcd: EtcdClient, keys: Keys, now: float, commit: Callable[[Sequence[Compare], Sequence[Op]], bool]) -> int:
    """Deletes the outdated records through ``commit``, the leader's guarded transaction, and returns how many."""
    entries: list[tuple[str, float]] = []
    more = True
    while more:
        page = etcd.page(keys.idempotency_prefix(), limit=_PAGE, after=entries[-1][0] if entries else "")
        entries += [(kv.key, _written_at(kv.value)) for kv in page.kvs]
        more = page.more
    gone = outdated(entries, now)
    for batch in batches([Op.delete(key) for key in gone]):
        commit([], batch)
    return len(gone)
