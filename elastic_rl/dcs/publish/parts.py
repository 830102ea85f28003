"""What each rank of a publisher contributes to a version, and how the parts become one manifest. Pure.

Every rank writes a share of the tensors to its own host's node and tells what it wrote in a ``Part``, which is small
and JSON-able. The parts of all ranks together are the version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.dcs.manifest import Manifest, Slice, TensorEntry, uncollected
from elastic_rl.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """Tensors that one rank wrote to one node, where every chunk of them is held until the publish is over."""

    node: str
    """Id of the node."""
    registered: int
    """Create revision of the node's record: the commit holds only for this very process."""
    tensors: tuple[tuple[int, TensorEntry], ...]
    """Each with its place in the version: tensors are published in ascending order of these."""
    chunks: Mapping[str, int]
    """Digest → bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes that were written, padding included."""
        return sum(self.chunks.values())

    def to_json(self) -> dict[str, Any]:
        index = {digest: i for i, digest in enumerate(self.chunks)}
        return {"node": self.node, "registered": self.registered, "chunks": [[d, n] for d, n in self.chunks.items()],
                "tensors": [[at, t.name, t.dtype, list(t.shape), [[index[s.digest], s.offset, s.nbytes]
                                                                  for s in t.slices]] for at, t in self.tensors]}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Part:
        """From ``to_json``'s value. Raises ConfigError when it is none."""
        try:
            chunks = [(str(d), int(n)) for d, n in value["chunks"]]
            return cls(str(value["node"]), int(value["registered"]), tuple(
                (int(at), TensorEntry(str(name), str(dtype), tuple(int(n) for n in shape), tuple(
                    Slice(chunks[i][0], int(offset), int(nbytes)) for i, offset, nbytes in slices)))
                for at, name, dtype, shape, slices in value["tensors"]), dict(chunks))
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise ConfigError(f"a part of a version cannot be read: {e!r}") from e


@uncollected()
def merge(parts: Sequence[Part]) -> Manifest:
    """One manifest of all parts: tensors in the order of publication, each chunk once.

    Raises ConfigError when two parts hold a tensor of one name or claim one place, and what ``Manifest.check`` raises.
    """
    placed = sorted((item for part in parts for item in part.tensors), key=lambda item: item[0])
    _require_distinct((at for at, _ in placed), "place")
    _require_distinct((entry.name for _, entry in placed), "tensor name")
    chunks: dict[str, int] = {}
    for part in parts:
        for digest, nbytes in part.chunks.items():
            if chunks.setdefault(digest, nbytes) != nbytes:
                raise ConfigError(f"parts of one version disagree on the bytes of chunk {digest}")
    manifest = Manifest(tuple(entry for _, entry in placed), chunks)
    manifest.check()
    return manifest


def _require_distinct(values: Iterable[int | str], what: str) -> None:
    seen: set[int | str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"two parts of one version have the {what} {value!r}")
        seen.add(value)
