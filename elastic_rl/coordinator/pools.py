"""Pools: how many engines the operator wants, and how many exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pydantic import BaseModel

from elastic_rl.config import Config
from elastic_rl.coordinator import autoscalers
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.etags import check_revision, etag
from elastic_rl.coordinator.leader_transaction import LeaderTransaction
from elastic_rl.coordinator.problems import Problem, concurrent_modification, no_pool, unreadable
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue, Op
from elastic_rl.etcd.decoding import decode, decode_all, readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import PoolSpec, PoolStatus
from elastic_rl.runtime.words import counted


class PoolView(BaseModel):
    """A pool as the API shows it. ``etag`` goes into If-Match of a change."""

    name: str
    desired: int
    ready: int = 0
    starting: int = 0
    draining: int = 0
    external: int = 0
    pending: int = 0
    """Engines that wait for room in the cluster."""
    released: int = 0
    """Engines that wait for the trainer's phase to end."""
    behind: int = 0
    """Engines that get no requests until they have caught up with the others."""
    message: str = ""
    """What the pool waits for."""
    model: str = ""
    """Folder of its engines' model."""
    stream: str = ""
    """Stream whose versions its engines serve; empty for the weights of the folder, which never change."""
    router_url: str = ""
    """Base URL of its router."""
    revision: int
    etag: str


def check_desired(desired: int, max_engines: int) -> int:
    """Raises a 422 problem unless ``desired`` is within 1 and ``max_engines``."""
    if not 1 <= desired <= max_engines:
        why = "a run without engines generates no samples" if desired == 0 else "the setting coordinator.max_engines"
        raise Problem(422, "invalid", "The request is not valid",
                      f"desired must be between 1 and {max_engines}, not {desired}"
                      + ("" if desired < 0 else f" ({why})"),
                      errors=[{"pointer": "/desired", "detail": f"between 1 and {max_engines}"}])
    return desired


def view(spec: KeyValue, status: KeyValue | None) -> PoolView:
    """Raises ValidationError for a spec that cannot be read."""
    desired = PoolSpec.decode(spec.value)
    actual = decode(status, PoolStatus, {}) if status else None
    counts = actual.model_dump(exclude={"name"}) if actual else {}
    return PoolView(name=desired.name, desired=desired.desired, model=desired.model, stream=desired.stream,
                    revision=spec.mod_revision, etag=etag(spec.mod_revision), **counts)


def views(keys: Keys, kvs: Iterable[KeyValue]) -> list[PoolView]:
    """The pools that these keys belong to, in key order; a pool without a spec that can be read is left out."""
    found = {kv.key: kv for kv in kvs}
    specs = decode_all((kv for k, kv in found.items() if k.endswith("/spec")), PoolSpec, {})
    names = [kv.key.removeprefix(keys.pools_prefix()).removesuffix("/spec") for _, kv in specs]
    return [view(found[keys.pool_spec(n)], found.get(keys.pool_status(n))) for n in names]


def page(etcd: EtcdClient, keys: Keys, limit: int, after: str = "") -> tuple[list[PoolView], bool]:
    """At most ``limit`` pools after the one named ``after``, in key order, and whether there are more."""
    prefix = keys.pools_prefix()
    # A pool has two keys, so these hold one pool more than requested, if there is one.
    found = etcd.page(prefix, limit=2 * limit + 2, after=f"{prefix}{after}/\x7f" if after else "")
    shown = views(keys, found.kvs)
    return shown[:limit], len(shown) > limit or found.more


def get_pool(etcd: EtcdClient, keys: Keys, name: str) -> PoolView:
    """Raises a 404 problem."""
    spec, _ = _require(etcd, keys, name)
    return view(spec, etcd.get(keys.pool_status(name)))


def _require(etcd: EtcdClient, keys: Keys, name: str) -> tuple[KeyValue, PoolSpec]:
    """The spec of a pool, as stored and decoded. Raises a 404 problem for one that does not exist or cannot be read."""
    found = etcd.get(keys.pool_spec(name))
    if found is None:
        raise no_pool(name)
    if (spec := readable_one(found, PoolSpec)) is None:
        raise unreadable("pool", name)
    return found, spec


def set_desired(etcd: EtcdClient, keys: Keys, cfg: Config, election: Election, name: str, desired: int, *, by: str,
                if_revision: int | None = None, dry_run: bool = False) -> PoolView:
    """Changes the desired number together with its event, in one transaction under the leader's fencing token.
    ``if_revision``: the spec's revision that the change was made from. ``dry_run``: returns the pool as it would be.

    Raises problems: 404; 409 for a number beyond the bounds of its autoscaling; 412 when the pool has changed; 503 when
    this replica lost the leadership meanwhile; 504 when the outcome is unknown.
    """
    key = keys.pool_spec(name)
    for _ in range(8):
        spec, old = _require(etcd, keys, name)
        check_revision(spec.mod_revision, if_revision, "pool")
        within = autoscalers.require_within(etcd, keys, cfg, name, desired)
        if old.desired == desired:
            return view(spec, etcd.get(keys.pool_status(name)))
        if dry_run:
            return view(replace(spec, value=old.replace(desired=desired).encode()), etcd.get(keys.pool_status(name)))
        event = events.build(event_kinds.POOL_SCALED, name,
                             f"{name}: {old.desired} → {counted(desired, 'engine')}, by {by}",
                             previous=old.desired, desired=desired, by=by, replica=election.replica)
        new = old.replace(desired=desired)
        change = LeaderTransaction.with_event(keys, event, [Compare.mod(key, "==", spec.mod_revision), within],
                                              [Op.put(key, new.encode())])
        if revision := change.commit(etcd, election.writer):
            status = etcd.get(keys.pool_status(name))
            return view(replace(spec, value=new.encode(), mod_revision=revision), status)
    raise concurrent_modification()
