"""Which tensors of a version can be read while its chunks still come, and how another process is told. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elastic_rl.dcs.connection import Located
from elastic_rl.dcs.fetch.mapping import FORMAT
from elastic_rl.dcs.manifest import Manifest, TensorEntry
from elastic_rl.etcd.records import Version


def reference(version: Version, manifest: Manifest, arena_path: str, at: Mapping[str, int],
              tensors: Iterable[TensorEntry], digests: Iterable[str]) -> dict[str, Any]:
    """What ``mapping.load_tensors`` takes, for these tensors and chunks. ``at``: offsets of chunks in the arena."""
    return {
        "format": FORMAT, "path": arena_path, "stream": version.stream, "version": version.number,
        "chunks": [[d, at[d], manifest.chunks[d]] for d in digests],
        "tensors": [[t.name, t.dtype, list(t.shape), [[at[s.digest] + s.offset, s.nbytes] for s in t.slices]]
                    for t in tensors]}


class Assembly:
    """Takes the chunks of a version where they lie in the arena of this host, and gives each tensor once, as soon as
    all its chunks are there."""

    def __init__(self, version: Version, manifest: Manifest, arena_path: str) -> None:
        self._version, self._manifest, self._arena_path = version, manifest, arena_path
        self._at: dict[str, int] = {}
        self._lacking = [len({s.digest for s in t.slices}) for t in manifest.tensors]
        self._users: dict[str, list[int]] = {digest: [] for digest in manifest.chunks}
        for i, tensor in enumerate(manifest.tensors):
            for digest in {s.digest for s in tensor.slices}:
                self._users[digest].append(i)
        self._ready = [i for i, lacking in enumerate(self._lacking) if not lacking]
        self._told: set[str] = set()

    def add(self, chunks: Iterable[Located]) -> None:
        """Chunks that are here; those that were added before do nothing."""
        for digest, offset, _ in chunks:
            if digest in self._at or digest not in self._users:
                continue
            self._at[digest] = offset
            for i in self._users[digest]:
                self._lacking[i] -= 1
                if not self._lacking[i]:
                    self._ready.append(i)

    def part(self) -> dict[str, Any] | None:
        """A reference (``mapping``) to the tensors that were completed since the last part, with those of their chunks
        that were in no part yet; None when there are none."""
        if not self._ready:
            return None
        ready, self._ready = sorted(self._ready), []
        digests = dict.fromkeys(s.digest for i in ready for s in self._manifest.tensors[i].slices)
        new = [d for d in digests if d not in self._told]
        self._told.update(new)
        tensors = [self._manifest.tensors[i] for i in ready]
        return reference(self._version, self._manifest, self._arena_path, self._at, tensors, new)
