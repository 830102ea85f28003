"""What each rank of a publisher contributes to a version, and how these become one manifest. Pure.

Every rank writes some of the tensors to its own host's node and reports what it wrote as a ``Part``. The parts of all
ranks together are the version; what the ranks of one host wrote is one part of its manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastic_rl.dcs.manifest import Manifest, Slice, TensorEntry, uncollected
from elastic_rl.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """Tensors that one rank wrote to one node, where every chunk of them is held until the publish ends."""

    node: str
    """Id of the node."""
    incarnation: str
    """Incarnation of that node: the commit holds only for this very process."""
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
        return {"node": self.node, "incarnation": self.incarnation,
                "chunks": [[d, n] for d, n in self.chunks.items()],
                "tensors": [[place, t.name, t.dtype, list(t.shape), [[index[s.digest], s.offset, s.nbytes]
                                                                     for s in t.slices]] for place, t in self.tensors]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Part:
        """Reads the value of ``to_json``. Raises ConfigError when it is malformed."""
        try:
            chunks = [(str(d), int(n)) for d, n in value["chunks"]]
            return cls(str(value["node"]), str(value["incarnation"]), tuple(
                (int(place), TensorEntry(str(name), str(dtype), tuple(int(n) for n in shape), tuple(
                    Slice(chunks[i][0], int(offset), int(nbytes)) for i, offset, nbytes in slices)))
                for place, name, dtype, shape, slices in value["tensors"]), dict(chunks))
        except (KeyError, TypeError, ValueError, IndexError) as e:
            raise ConfigError(f"a part of a version cannot be decoded: {e!r}") from e


@uncollected()
def merge(parts: Sequence[Part]) -> tuple[Manifest, list[str]]:
    """One manifest of all parts, with the tensors in the order of publication and each chunk once, and for each part of
    the manifest the node that wrote it. A chunk that several nodes wrote belongs to the part of the first.

    Raises ConfigError when two parts hold a tensor of one name or claim one place, and what ``Manifest.check`` raises.
    """
    tensors = sorted((item for part in parts for item in part.tensors), key=lambda item: item[0])
    _require_distinct((place for place, _ in tensors), "place")
    _require_distinct((entry.name for _, entry in tensors), "tensor name")
    by_node: dict[str, list[Part]] = {}
    for part in parts:
        by_node.setdefault(part.node, []).append(part)
    chunks: dict[str, int] = {}
    counts: dict[str, int] = {}
    for node, written in by_node.items():
        before = len(chunks)
        for part in written:
            for digest, nbytes in part.chunks.items():
                if chunks.setdefault(digest, nbytes) != nbytes:
                    raise ConfigError(f"parts of one version disagree on the bytes of chunk {digest}")
        if len(chunks) > before:
            counts[node] = len(chunks) - before
    sizes = tuple(counts.values())
    manifest = Manifest(tuple(entry for _, entry in tensors), chunks, sizes if len(sizes) > 1 else ())
    manifest.check()
    return manifest, list(counts) or list(by_node)[:1]


def in_order(parts: Sequence[Part]) -> list[Part]:
    """The parts, each with its tensors after all tensors of the parts before it: for ranks that have numbered their own
    tensors and do not know how many the others have."""
    out, before = list[Part](), 0
    for part in parts:
        ranked = sorted(part.tensors, key=lambda item: item[0])
        out.append(replace(part, tensors=tuple((before + i, entry) for i, (_, entry) in enumerate(ranked))))
        before += len(ranked)
    return out


def _require_distinct(values: Iterable[int | str], what: str) -> None:
    seen: set[int | str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"two parts of one version have the {what} {value!r}")
        seen.add(value)
