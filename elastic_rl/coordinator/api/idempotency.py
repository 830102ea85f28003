"""Requests that may be sent twice and count once: the record of each Idempotency-Key.

The record is written in the transaction that carries its request out, on the condition that there was none. A client
whose answer was lost sends the request again, to whichever replica leads by then, and gets what the first one created.
Records are kept for a day; the leader trims them.
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
MAX_RECORDS = 10_000
"""Records kept at most; beyond that the oldest are deleted early."""
MAX_KEY_LENGTH = 200
_RULE = f"1 to {MAX_KEY_LENGTH} printable ASCII characters"
_PAGE = 500
PATTERN = rf"^[!-~]{{1,{MAX_KEY_LENGTH}}}$"
"""Regular expression for a key: printable ASCII without spaces."""


class Done(Record):
    """The outcome of a request. ``at`` is in unix seconds."""

    request: str
    """Digest of the request, so that the key is not used for another one."""
    location: str
    """Path of what it created."""
    at: float


@dataclass(frozen=True)
class Claim:
    """One use of a key. Its conditions and writes belong in the transaction that carries the request out."""

    key: str
    request: str
    at: float

    @property
    def compares(self) -> list[Compare]:
        """Hold while no request with this key has been carried out."""
        return [Compare.absent(self.key)]

    def ops(self, location: str) -> list[Op]:
        return [Op.put(self.key, Done(request=self.request, location=location, at=self.at).encode())]


def digest(*parts: str) -> str:
    """SHA-256 of several texts; it depends on where one ends and the next begins."""
    return hashlib.sha256(b"".join(len(p.encode()).to_bytes(8, "big") + p.encode() for p in parts)).hexdigest()


def claim(keys: Keys, caller: str, header: str, request: str, now: float) -> Claim:
    """The claim of a key by a caller; ``request`` is the request's digest. The same key of two callers is two keys.

    Raises a 422 problem for a key that is empty, too long, or not of printable ASCII.
    """
    if not re.fullmatch(PATTERN, header):
        raise Problem(422, "invalid", "The request is not valid",
                      f"Idempotency-Key must be {_RULE} without spaces",
                      errors=[{"pointer": "/Idempotency-Key", "detail": _RULE}])
    return Claim(keys.idempotency(digest(caller, header)), request, now)


def found(etcd: EtcdClient, claim: Claim) -> Done | None:
    """The record of a key, if there is one. Raises a 422 problem when it is of another request."""
    kv = etcd.get(claim.key)
    if kv is None:
        return None
    done = Done.decode(kv.value)
    if done.request != claim.request:
        raise Problem(422, "idempotency-key-reused", "The Idempotency-Key belongs to another request",
                      f"it was used for the request that created {done.location}; use a new key for a new request")
    return done


def outdated(kvs: Sequence[tuple[str, float]], now: float) -> list[str]:
    """Keys whose records need not be kept any longer; ``kvs``: (key, unix seconds at which it was written). Pure."""
    newest = sorted(kvs, key=lambda entry: entry[1], reverse=True)
    return [key for n, (key, at) in enumerate(newest) if n >= MAX_RECORDS or at < now - KEPT_S]


def _written_at(raw: bytes) -> float:
    """Unix seconds; 0 for what is not a record of ours, so that it is deleted."""
    try:
        return Done.decode(raw).at
    except ValidationError:
        return 0.0


def trim(etcd: EtcdClient, keys: Keys, now: float, commit: Callable[[Sequence[Compare], Sequence[Op]], bool]) -> int:
    """Deletes outdated records through ``commit``, the leader's guarded transaction, and returns how many."""
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
