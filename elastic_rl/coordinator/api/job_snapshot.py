"""The job as a whole, as of one revision: what a new reader of the changes begins with."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from elastic_rl.config import Stream
from elastic_rl.coordinator import job_view, pools
from elastic_rl.coordinator.api import pages
from elastic_rl.coordinator.api.context import Context
from elastic_rl.etcd.client import KeyValue
from elastic_rl.etcd.records import OperationState

VERSIONS, OPERATIONS, EVENTS, STEPS = 20, 20, 50, 500
_MOST = 5_000
"""Records of one kind that are read, at most."""


def thinned(kvs: Sequence[KeyValue], most: int) -> list[KeyValue]:
    """At most ``most`` of them, evenly spread, the last one always."""
    if len(kvs) <= most:
        return list(kvs)
    return [kvs[(n + 1) * len(kvs) // most - 1] for n in range(most)]


def take(ctx: Context) -> tuple[bytes, int]:
    """The snapshot as JSON, and its revision. Raises EtcdUnavailable; Compacted when the store was compacted while it
    was read."""
    keys, etcd = ctx.keys, ctx.etcd
    revision = etcd.page(keys.leader_prefix(), limit=1).revision

    def some(prefix: str, limit: int = _MOST, *, newest_first: bool = False) -> list[KeyValue]:
        return etcd.page(prefix, limit=limit, newest_first=newest_first, revision=revision).kvs

    def one(key: str) -> KeyValue | None:
        return next((kv for kv in some(key, 1) if kv.key == key), None)

    job = job_view.view(keys, ctx.election.replica, one(keys.job_status()), one(keys.epoch()),
                        some(keys.leader_prefix()))
    shown = [p.model_dump_json().encode() for p in pools.views(keys, some(keys.pools_prefix()))]
    versions = [kv.value for stream in Stream
                for kv in pages.newest_versions(etcd, keys, stream, VERSIONS, revision=revision)]
    versions.sort(key=lambda raw: float(orjson.loads(raw).get("created_at", 0.0)), reverse=True)
    operations = [kv.value for kv in some(keys.operations_prefix(), 10 * OPERATIONS, newest_first=True)]
    parts = {
        "pools": shown, "engines": _values(some(keys.engines_prefix())), "versions": versions[:VERSIONS],
        "operations": [raw for n, raw in enumerate(operations) if n < OPERATIONS or _active(raw)],
        "alerts": _values(some(keys.alerts_prefix())),
        "events": _values(pages.newest_events(etcd, keys, EVENTS, revision=revision).kvs),
        "members": _values(some(keys.members_prefix())),
        "steps": _values(thinned(some(keys.steps_prefix(), _MOST, newest_first=True)[::-1], STEPS)),
    }
    lists = b",".join(b'"' + name.encode() + b'":[' + b",".join(items) + b"]" for name, items in parts.items())
    return b'{"job":' + job.model_dump_json().encode() + b"," + lists + b"}", revision


def _values(kvs: Sequence[KeyValue]) -> list[bytes]:
    return [kv.value for kv in kvs]


def _active(raw: bytes) -> bool:
    return not OperationState(orjson.loads(raw)["state"]).ended
