"""The nodes that are registered in etcd, and guards on them.

A process that relies on a node's answer (that it holds some chunks) guards its own write with the *incarnation* that
gave it: a restarted node is another one, and may have lost what it held. A node that only registers again, because its
lease had ended in an outage of etcd, is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_rl.errors import CatalogMismatch, Conflict
from elastic_rl.etcd.client import Compare, EtcdClient, KeyValue
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import CatalogIdentity, DcsNode

RECOVER_HINT = "run `elastic-rl versions recover`; nothing is dropped before"


@dataclass(frozen=True)
class RegisteredNode:
    """A node's record."""

    node: DcsNode
    registration: int
    """Create revision of the record: when the node registered, in revisions of etcd."""

    def belongs_to(self, catalog: str) -> bool:
        """Whether it may hold chunks for this catalog: it knows this one, or none yet."""
        return self.node.catalog in ("", catalog)


def read_nodes(etcd: EtcdClient, keys: Keys) -> tuple[dict[str, RegisteredNode], int]:
    """Registered nodes by id, in the order of ids, and the revision of this reading. A record that cannot be decoded is
    left out, with a line in the log: its node counts as unreachable. Raises EtcdUnavailable."""
    kvs, revision = etcd.range(keys.dcs_nodes_prefix())
    found = (decoded(kv) for kv in kvs)
    return {n.node.id: n for n in found if n is not None}, revision


def read_node(etcd: EtcdClient, keys: Keys, node_id: str) -> RegisteredNode | None:
    kv = etcd.get(keys.dcs_node(node_id))
    return decoded(kv) if kv is not None else None


def decoded(kv: KeyValue) -> RegisteredNode | None:
    """The node of a record; None, with a line in the log, for a record that cannot be decoded."""
    node = readable_one(kv, DcsNode)
    return RegisteredNode(node, kv.create_revision) if node is not None else None


def registration_guards(etcd: EtcdClient, keys: Keys, acknowledged: Mapping[str, str],
                        identity: CatalogIdentity) -> tuple[list[Compare], int]:
    """Checks that each node is registered and still the process that acknowledged chunks, and returns the conditions
    under which that holds later too, and the revision of the check. ``acknowledged``: node id → incarnation;
    ``identity``: the identity of the catalog written to, as the caller last read it.

    The conditions are a single comparison (no node has registered since the check), so their number does not grow with
    that of the nodes. They do not notice a node whose record goes away after the check; that is the failure of one
    replica, as at any later time.

    Raises Conflict for a node that is gone or restarted. Raises CatalogMismatch for one that belongs to another
    catalog, and when any node has seen more commits of this one than etcd has: an etcd that was restored from an old
    backup would assign numbers of versions a second time.
    """
    if not acknowledged:
        return [], 0
    nodes, revision = read_nodes(etcd, keys)
    for node_id, incarnation in acknowledged.items():
        found = nodes.get(node_id)
        if found is None or found.node.incarnation != incarnation:
            raise Conflict(f"DCS node {node_id} was lost or restarted after it had stored chunks of the version")
        if not found.belongs_to(identity.id):
            raise CatalogMismatch(f"DCS node {node_id} holds versions of catalog {found.node.catalog}, and etcd has "
                                  f"catalog {identity.id}", hint=RECOVER_HINT)
    _require_newest(etcd, keys, identity, nodes)
    return [Compare.none_created_since(keys.dcs_nodes_prefix(), revision)], revision


def _require_newest(etcd: EtcdClient, keys: Keys, identity: CatalogIdentity, nodes: Mapping[str, RegisteredNode]
                    ) -> None:
    """Raises CatalogMismatch when one of the nodes has seen more commits than the catalog has now."""
    seen = {n.node.commits: n.node.id for n in nodes.values() if n.node.catalog == identity.id}
    most = max(seen, default=0)
    if most <= identity.commits:
        return
    # After the nodes: the caller may have missed commits they have seen. Its guard on this record reports an unreadable
    # one.
    now = readable_one(etcd.get(keys.dcs_catalog()), CatalogIdentity)
    if now is not None and now.id == identity.id and now.commits < most:
        raise CatalogMismatch(f"etcd has catalog {identity.id} after {now.commits} commits, and DCS node {seen[most]} "
                              f"has seen {most}: was etcd restored from an old backup?", hint=RECOVER_HINT)
