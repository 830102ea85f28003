"""A stream that only grows: each version lists the tensors of the one before, and more. What was published is not
published again: versions share its chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.digests import kind_of
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.dcs.fetch.chunk_reader import ChunkReader
from elastic_rl.dcs.manifest import Manifest, Slice, TensorEntry
from elastic_rl.dcs.publish.kept_chunks import KeptChunks
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ChunkCorrupt, ChunkMissing
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version, VersionState


@dataclass(frozen=True)
class StreamHead:
    """The newest version of the stream, and what it consists of."""

    version: Version
    manifest: Manifest

    def kept(self, tensors: Sequence[TensorEntry]) -> KeptChunks:
        """The chunks of some of its tensors."""
        digests = dict.fromkeys(s.digest for t in tensors for s in t.slices)
        return KeptChunks(self.version.manifest, {d: self.manifest.chunks[d] for d in digests})


@dataclass(frozen=True)
class NewTensor:
    """Bytes that the next version has for the first time, or in the place of others."""

    name: str
    data: bytes


class GrowingStream:
    """Reads and publishes. For one thread, and for one publisher of the stream at a time, which ``token`` ensures."""

    def __init__(self, etcd: EtcdClient, keys: Keys, stream: str, dcs: DcsConfig, *, epoch: int, token: FencedWriter,
                 owner: str, security: Security | None) -> None:
        self._etcd, self._keys, self._stream, self._dcs = etcd, keys, stream, dcs
        self._epoch, self._token, self._owner, self._security = epoch, token, owner, security
        self._client = DcsClient(etcd, keys, io_timeout_s=dcs.io_timeout_s, security=security)
        self._reader = ChunkReader(self._client)
        self._head: StreamHead | None = None

    def require(self) -> None:
        """Raises Fenced when the token no longer holds, and EtcdUnavailable."""
        self._token.require()

    def head(self) -> StreamHead | None:
        """The newest version of the stream; None where nothing was published. Raises as ``ChunkReader``."""
        version = reads.head(self._etcd, self._keys, self._stream)
        if version is None:
            return None
        if self._head is None or self._head.version.manifest != version.manifest:
            self._head = StreamHead(version, self._reader.manifest(version))
        return StreamHead(version, self._head.manifest)

    def before_head(self) -> Iterator[StreamHead]:
        """The versions before the newest one that are still there, and whose manifests can be had, newest first. One
        may be released while the stream is continued from it: what is lacking then is found by the next ``lacking``.
        Raises as ``head``, but not for a manifest that no node has."""
        versions = [v for v in reads.list_versions(self._etcd, self._keys, self._stream)
                    if v.state is VersionState.COMMITTED]
        for version in reversed(versions[:-1]):
            with contextlib.suppress(ChunkMissing, ChunkCorrupt):
                yield StreamHead(version, self._reader.manifest(version))

    def read(self, tensor: TensorEntry) -> bytes:
        """The bytes of a tensor. Raises as ``ChunkReader``."""
        return self._reader.tensor(tensor)

    def lacking(self, head: StreamHead, tensors: Sequence[TensorEntry]) -> set[str]:
        """Names of those tensors of the head of which this host's node lacks chunks. The others can be published again.
        Raises as ``ChunkReader``."""
        local = self._client.local()
        head.kept(()).bring(local)
        missing = set(local.has(list(head.kept(tensors).chunks)))
        return {t.name for t in tensors if any(s.digest in missing for s in t.slices)}

    def bring(self, head: StreamHead, tensor: TensorEntry) -> None:
        """Has this host's node fetch what it lacks of a tensor of the head. Raises as ``ChunkReader``."""
        head.kept([tensor]).bring(self._client.local())

    def restore(self, tensor: TensorEntry, data: bytes) -> None:
        """Gives this host's node the bytes of a tensor of the head, whose manifest it has. Raises as ``ChunkReader``,
        ArenaFull and DiskFull."""
        local, at = self._client.local(), 0
        for digest, _, nbytes in tensor.slices:
            local.put(memoryview(data)[at:at + nbytes], digest=kind_of(digest))
            at += nbytes
        local.release_holds()

    def publish(self, head: StreamHead | None, tensors: Sequence[TensorEntry | NewTensor], *, meta: Mapping[str, Any],
                also: Sequence[Op] = ()) -> Version:
        """Publishes a version of these tensors, in this order: those that are entries are of ``head``, which is the
        newest version or one before it, and their chunks are on this host's node (``lacking``). ``also`` are writes of
        the same transaction. Raises as ``Publisher.publish``."""
        dcs = self._dcs
        old = [t for t in tensors if isinstance(t, TensorEntry)]
        kept = head.kept(old) if head is not None else None
        with Publisher(self._etcd, self._keys, self._stream, epoch=self._epoch, owner=self._owner,
                       chunk_bytes=dcs.chunk_bytes, replicas=dcs.replicas, digest=dcs.digest,
                       staging_ttl_s=dcs.staging_ttl_s, io_timeout_s=dcs.io_timeout_s, security=self._security,
                       token=self._token) as publisher:
            def write() -> Part:
                local, chunks = publisher.local(), dict(kept.chunks) if kept is not None else {}
                entries = [t if isinstance(t, TensorEntry) else self._put(local, t, chunks) for t in tensors]
                return Part(local.node.id, local.node.incarnation, tuple(enumerate(entries)), chunks)

            return publisher.publish_part(write, meta=meta, also=also, kept=kept)

    def _put(self, local: NodeConnection, tensor: NewTensor, chunks: dict[str, int]) -> TensorEntry:
        slices, data = [], memoryview(tensor.data)
        for start in range(0, len(data), self._dcs.chunk_bytes):
            piece = data[start:start + self._dcs.chunk_bytes]
            digest = local.put(piece, digest=self._dcs.digest)
            chunks[digest] = len(piece)
            slices.append(Slice(digest, 0, len(piece)))
        return TensorEntry(tensor.name, "uint8", (len(tensor.data),), tuple(slices))

    def close(self) -> None:
        self._client.close()
