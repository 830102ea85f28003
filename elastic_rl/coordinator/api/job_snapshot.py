"""The job as a whole as of one revision: the first frame of a change stream."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.config import Stream
from elastic_rl.coordinator import job_view, pools
from elastic_rl.coordinator.api import pages
from elastic_rl.coordinator.api.context import JobContext
from elastic_rl.etcd import heartbeats
from elastic_rl.etcd.client import KeyValue
from elastic_rl.etcd.records import OperationState

VERSIONS, OPERATIONS, EVENTS, STEPS = 20, 20, 50, 500
_MAX_ITEMS = 5_000
"""Records of one kind that are read, at limit."""
_ENDED = {state.value for state in OperationState if state.ended}


def downsample(kvs: Sequence[KeyValue], limit: int) -> list[KeyValue]:
    """At most ``limit`` of the records, evenly spread, the last one always."""
    if len(kvs) <= limit:
        return list(kvs)
    return [kvs[(n + 1) * len(kvs) // limit - 1] for n in range(limit)]


def take(ctx: JobContext) -> tuple[bytes, int]:
    """The snapshot as JSON, and its revision.

    Raises EtcdUnavailable, and Compacted when etcd was compacted while it was read.
    """
    keys, etcd = ctx.keys, ctx.replica.etcd
    revision = etcd.page(keys.job_status(), limit=1).revision

    def read(prefix: str, limit: int = _MAX_ITEMS, *, newest_first: bool = False) -> list[KeyValue]:
        return etcd.page(prefix, limit=limit, newest_first=newest_first, revision=revision).kvs

    job = job_view.view(keys, ctx.replica.election.replica,
                        (kv for key in job_view.keys_of(keys) for kv in read(key, 1)))
    operations = read(keys.operations_prefix(), 10 * OPERATIONS, newest_first=True)
    parts = {
        "pools": [p.model_dump_json().encode() for p in pools.views(keys, read(keys.pools_prefix()))],
        "engines": pages.readable(read(keys.engines_prefix())),
        "versions": _newest_versions(ctx, revision),
        "operations": pages.readable(kv for n, kv in enumerate(operations) if n < OPERATIONS or _is_active(kv)),
        "alerts": pages.readable(read(keys.alerts_prefix())),
        "events": pages.readable(pages.newest_events(etcd, keys, EVENTS, revision=revision).kvs),
        "members": heartbeats.merge_stored(pages.readable(read(keys.members_prefix())),
                                           lambda _: heartbeats.index(keys, read(keys.heartbeats_prefix()))),
        "steps": pages.readable(downsample(read(keys.steps_prefix(), _MAX_ITEMS, newest_first=True)[::-1], STEPS)),
    }
    lists = b",".join(b'"' + name.encode() + b'":[' + b",".join(items) + b"]" for name, items in parts.items())
    return b'{"job":' + job.model_dump_json().encode() + b"," + lists + b"}", revision


def _newest_versions(ctx: JobContext, revision: int) -> list[bytes]:
    """The newest versions over all streams."""
    kvs = [kv for stream in Stream
           for kv in pages.newest_versions(ctx.replica.etcd, ctx.keys, stream, VERSIONS, revision=revision)]
    kvs.sort(key=pages.created_at, reverse=True)
    return pages.readable(kvs[:VERSIONS])


def _is_active(kv: KeyValue) -> bool:
    """Whether the operation has not ended, also in a state that only a newer release knows."""
    return pages.fields(kv).get("state") not in _ENDED
