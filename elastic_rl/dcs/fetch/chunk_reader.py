"""Reading a few tensors of a large version, one after the other, without bringing all of it into the arena. Free of
torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.digests import matches
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.manifest import Manifest, TensorEntry
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, NodeUnavailable
from elastic_rl.etcd.records import Version

ROUNDS = 3
"""How often a node may drop a chunk that it has just fetched, or send other bytes, before the reading fails."""
_Connect = Callable[[], NodeConnection]


class ChunkReader:
    """Reads through this host's node or, where it has none, through any other one. The node fetches what it lacks.

    It pins nothing: who reads a version that may be released meanwhile reads the head again after ChunkMissing. Every
    method raises NodeUnavailable, ChunkMissing, ChunkCorrupt, AccessDenied and EtcdUnavailable. Thread-safe.
    """

    def __init__(self, client: DcsClient) -> None:
        self._client = client

    def manifest(self, version: Version) -> Manifest:
        return Manifest.decode(self._chunk(version.manifest))

    def tensor(self, entry: TensorEntry) -> bytes:
        """The tensor's bytes, each chunk verified."""
        found = []
        for digest, offset, nbytes in entry.slices:
            found.append(self._chunk(digest)[offset:offset + nbytes])
        return b"".join(found)

    def _chunk(self, digest: str) -> bytes:
        """The connection is that of others too: a hold of it would end with theirs, or theirs with it. So a garbage
        collection may come between the fetch and the reading; and the node's memory may have rotted since it has
        compared it. Then the node looks again, and gets another copy where it needs one."""
        connection = self._connection()
        for further in reversed(range(ROUNDS)):
            connection.fetch([digest])
            try:
                data = bytes(connection.get(digest, verify=further < ROUNDS - 1))
            except ChunkMissing:
                if not further:
                    raise
                continue
            if matches(data, digest):
                return data
        raise ChunkCorrupt(f"node {connection.node.id} sent other bytes than those of chunk {digest}")

    def _connection(self) -> NodeConnection:
        last = NodeUnavailable("no DCS node is registered", hint="is the cluster up? `elastic-rl status`")
        for connect in self._candidates():
            try:
                return connect()
            except NodeUnavailable as e:
                last = e
        raise last

    def _candidates(self) -> Iterator[_Connect]:
        yield self._client.local
        for node_id in sorted(self._client.registered(), key=self._client.is_unreachable):
            yield partial(self._client.connect, node_id)

    def close(self) -> None:
        self._client.close()
