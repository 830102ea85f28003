"""Finding nodes by their records in etcd, and keeping a connection to each."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.registered_nodes import RegisteredNode, read_node, read_nodes
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.storage.arena import is_owned
from elastic_rl.errors import NodeUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode
from elastic_rl.runtime.backoff import backoff_s

_UNREACHABLE_S = (5.0, 300.0)
"""How long a node that could not be connected to is not tried again: at first, and at most; doubled each time, with
jitter. A node that registers again is tried at once."""


@dataclass
class _Kept:
    """The connection to one node. ``lock`` is held while it is opened, so that one that cannot be opened delays only
    those who want this node."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: NodeConnection | None = None
    error: NodeUnavailable | None = None
    """Why it could not be opened the last time."""
    failures: int = 0
    registration: int = 0
    """Registration of the node that could not be connected to."""
    retry_at: float = 0.0


class DcsClient:
    """The nodes of a job. One connection to each that was needed is kept; ``open`` and ``open_local`` give further
    ones. Thread-safe."""

    def __init__(self, etcd: EtcdClient, keys: Keys, *, io_timeout_s: float, local_host: str = "", node: str = "",
                 security: Security | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """``node``: id of the node to take as local. Otherwise it is the one whose arena is on this host; of several,
        first one at ``local_host``, then by id."""
        self._etcd, self._keys, self._clock = etcd, keys, clock
        self._io_timeout_s, self._security = io_timeout_s, security
        self._local_host, self._node = local_host, node
        self._lock = threading.Lock()  # guards the two below; never held while a node is called
        self._kept: dict[str, _Kept] = {}
        self._local_id = ""

    # -- who there is ------------------------------------------------------------------------------------------------
    def nodes(self) -> list[DcsNode]:
        """Registered nodes, by id."""
        return [n.node for n in self.registered().values()]

    def registered(self) -> dict[str, RegisteredNode]:
        """Registered nodes by id. Connections to nodes that are gone are closed."""
        found, _ = read_nodes(self._etcd, self._keys)
        with self._lock:
            gone = [(i, k.connection) for i, k in self._kept.items() if i not in found]
        for node_id, connection in gone:
            if connection is not None and connection.stale():
                connection.close()
                self._forget(node_id)
        return found

    def is_unreachable(self, node_id: str) -> bool:
        """Whether the last try to connect to the node failed; no I/O."""
        with self._lock:
            kept = self._kept.get(node_id)
        return kept is not None and kept.error is not None

    # -- connections -------------------------------------------------------------------------------------------------
    def open(self, node: DcsNode, *, as_node: str = "") -> NodeConnection:
        """A new connection, which the caller closes. Raises NodeUnavailable and AccessDenied."""
        return NodeConnection(node, self._keys.job, io_timeout_s=self._io_timeout_s, security=self._security,
                              as_node=as_node)

    def open_local(self) -> NodeConnection:
        """A new connection to this host's node, which the caller closes. Raises NodeUnavailable and AccessDenied."""
        return self._first_local(lambda n: self.open(n.node))

    def local(self) -> NodeConnection:
        """The kept connection to this host's node. Raises NodeUnavailable and AccessDenied."""
        with self._lock:
            node_id = self._local_id
        if node_id:
            kept = self._slot(node_id).connection
            if kept is not None and not kept.stale():
                return kept
        connection = self._first_local(lambda n: self.connect(n.node.id))
        with self._lock:
            self._local_id = connection.node.id
        return connection

    def connect(self, node_id: str) -> NodeConnection:
        """The kept connection to the node of that id. Raises NodeUnavailable and AccessDenied.

        A node that could not be connected to is not tried again for a while (``_UNREACHABLE_S``), unless it has
        registered again: meanwhile the same error is raised at once.
        """
        slot = self._slot(node_id)
        with slot.lock:
            if slot.connection is not None:
                if not slot.connection.stale():
                    return slot.connection
                slot.connection.close()
                slot.connection = None
            found = read_node(self._etcd, self._keys, node_id)
            if found is None:
                self._forget(node_id)
                raise NodeUnavailable(f"DCS node {node_id} is not registered (job {self._keys.job})",
                                      hint="is it running? see its log")
            if (slot.error is not None and slot.registration == found.registration
                    and self._clock() < slot.retry_at):
                raise NodeUnavailable(slot.error.message, hint=slot.error.hint)
            try:
                slot.connection = self.open(found.node)
            except NodeUnavailable as e:
                slot.failures = slot.failures + 1 if slot.registration == found.registration else 1
                slot.error, slot.registration = e, found.registration
                slot.retry_at = self._clock() + backoff_s(slot.failures, *_UNREACHABLE_S)
                raise
            slot.error, slot.failures = None, 0
            with self._lock:
                if self._kept.get(node_id) is not slot:  # ``close`` was called meanwhile and did not see it
                    slot.connection.close()
            return slot.connection

    def _slot(self, node_id: str) -> _Kept:
        with self._lock:
            return self._kept.setdefault(node_id, _Kept())

    def _forget(self, node_id: str) -> None:
        with self._lock:
            self._kept.pop(node_id, None)

    def _first_local(self, connect: Callable[[RegisteredNode], NodeConnection]) -> NodeConnection:
        """A connection to the first node of this host that answers."""
        found = [n for n in self.registered().values() if self._is_local(n.node)]
        found.sort(key=lambda n: (n.node.host != self._local_host, n.node.id))
        last = NodeUnavailable(f"this host has no running DCS node (job {self._keys.job})",
                               hint="start one: `elastic-rl up`, see its log")
        for node in found:
            try:
                return connect(node)
            except NodeUnavailable as e:
                last = e
        raise last

    def _is_local(self, node: DcsNode) -> bool:
        is_it = node.id == self._node if self._node else is_owned(Path(node.arena_path))
        return is_it and os.access(node.arena_path, os.R_OK | os.W_OK)

    def close(self) -> None:
        """Closes every kept connection; a later call opens new ones."""
        with self._lock:
            kept, self._kept = self._kept, {}
        for slot in kept.values():
            if (connection := slot.connection) is not None:
                connection.close()
