"""What operators do with hosts: cordon, drain, take that back, and forget one that is gone.

Each change is one transaction on the condition that nothing of what it was decided by has changed. It needs no leader:
the leader follows what it finds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from elastic_rl.coordinator.etags import check_revision, etag, revision_of
from elastic_rl.coordinator.hosts.view import HostView, read_host
from elastic_rl.coordinator.problems import Kind, Problem, concurrent_modification
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.cluster_records import HostPhase, HostSpec
from elastic_rl.etcd.keys import ClusterKeys
from elastic_rl.etcd.transaction import Compare

log = logging.getLogger(__name__)

_TRIES = 8
_WANTED = ("cordoned", "drain")
"""What is wanted of a host; the other fields of its spec say who asked, when and why."""


def change(etcd: EtcdClient, keys: ClusterKeys, name: str, changes: dict[str, Any], *, by: str,
           if_revision: int | None = None, dry_run: bool = False, clock: Callable[[], float] = time.time) -> HostView:
    """Changes what is wanted of a host: ``cordoned`` or ``drain``, with the ``reason``. What is wanted already is not
    written again, but for a drain, whose deadline then restarts. ``if_revision``: the spec's revision that the
    change was made from, None for any. ``dry_run``: returns the host as it would be.

    Raises problems: 404; 409 for a spec that this release cannot read; 412 when it has changed. Raises EtcdUnavailable
    and OutcomeUnknown.
    """
    key = keys.host_spec(name)
    for _ in range(_TRIES):
        host, found, _ = read_host(etcd, keys, name)
        revision = revision_of(host.etag)
        check_revision(revision, if_revision, "host")
        if key in host.unreadable:
            raise Problem(409, Kind.CONFLICT, "What is wanted of the host cannot be read",
                          f"{host.unreadable[key]}: it may be of a later release; change it with that one")
        after = _changed(host.spec, changes, by, clock())
        if changes.get("drain") is None and all(getattr(after, field) == getattr(host.spec, field)
                                                for field in (*_WANTED, *({"reason"} & changes.keys()))):
            return host
        if dry_run:
            return host.model_copy(update={"spec": after})
        # One that is forgotten meanwhile would leave what is wanted of it behind.
        known = [Compare.exists(k) for k in (keys.host_state(name), keys.host_registration(name)) if found.get(k)]
        done = etcd.txn([Compare.mod(key, "==", revision), *known[:1]], [Op.put(key, after.encode())])
        if done.succeeded:
            log.info("host %s: %s", name, after.described(_described(after)))
            return host.model_copy(update={"spec": after, "etag": etag(done.revision)})
    raise concurrent_modification()


def _changed(spec: HostSpec, changes: dict[str, Any], by: str, at: float) -> HostSpec:
    """The spec with what a request changes. While a host is drained, who asked, when and why describe the drain: only
    another drain restarts its deadline."""
    if spec.drain is not None and "drain" not in changes:
        return spec.replace(cordoned=changes["cordoned"])
    return spec.replace(**{"reason": "", **changes}, by=by, at=at)


def _described(spec: HostSpec) -> str:
    if spec.drain is not None:
        return f"is to be drained within {spec.drain.within_s:g} s, asked"
    return f"is to be {'cordoned' if spec.cordoned else 'used'}, asked"


def forget(etcd: EtcdClient, keys: ClusterKeys, name: str, *, by: str, dry_run: bool = False) -> HostView:
    """Deletes what is recorded of a host that is lost or has left, or that ended before any leader had decided about
    it, and to which nothing is assigned; returns it as it was. One that comes back all the same registers as a new one.

    Raises problems: 404; 409 for any other host, and while assignments cannot be read. Raises EtcdUnavailable and
    OutcomeUnknown.
    """
    of_host = (keys.host(name), keys.host_registration(name), keys.host_state(name), keys.host_spec(name))
    for _ in range(_TRIES):
        host, found, unreadable = read_host(etcd, keys, name)
        decided = found.get(keys.host_state(name)) is not None
        if host.registered or decided and host.phase not in (HostPhase.LOST, HostPhase.LEFT):
            phase = host.phase or "in a phase that cannot be read"
            raise Problem(409, Kind.CONFLICT, "The host is not gone",
                          f"host {name} is {'registered' if host.registered else phase}: end its agent (`elastic-rl "
                          "down` on that host), and wait until the host is lost or, after a drain, has left")
        if unreadable:
            raise Problem(409, Kind.CONFLICT, "What the host holds is not known",
                          f"{', '.join(unreadable)} cannot be read, which a later release may have written: forget the "
                          "host with that one")
        if host.assignments:
            raise Problem(409, Kind.CONFLICT, "The host holds something",
                          f"{', '.join(host.assignments)} moves as soon as another host is fit")
        if dry_run:
            return host
        unchanged = [*map(found.unchanged, of_host),
                     Compare.none_changed_since(keys.assignments_prefix(), found.revision)]
        if etcd.txn(unchanged, [Op.delete(key) for key in of_host[1:]]).succeeded:
            log.info("host %s was forgotten, asked by %s", name, by)
            return host
    raise concurrent_modification()
