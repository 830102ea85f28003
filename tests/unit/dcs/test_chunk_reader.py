"""A chunk that a node drops as soon as it has fetched it is fetched again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.fetch.chunk_reader import ChunkReader
from elastic_rl.dcs.manifest import Slice, TensorEntry
from elastic_rl.errors import ChunkCorrupt, ChunkMissing

DATA = b"weights " * 8
ENTRY = TensorEntry("w", "uint8", (len(DATA),), (Slice(digest_of(DATA), 0, len(DATA)),))


class Node:
    """A node whose garbage collector comes ``drops`` times between a fetch and what follows it."""

    def __init__(self, drops: int, data: bytes = DATA, verified: bytes = DATA) -> None:
        self.node, self.drops, self.data, self.verified = SimpleNamespace(id="n"), drops, data, verified
        self.fetched = 0

    def fetch(self, digests: list[str]) -> None:
        self.fetched += 1

    def get(self, digest: str, *, verify: bool = False) -> memoryview:
        if self.fetched <= self.drops:
            raise ChunkMissing(f"this node has no chunk {digest}")
        return memoryview(self.verified if verify else self.data)


def reader(node: Node) -> ChunkReader:
    return ChunkReader(cast(DcsClient, SimpleNamespace(local=lambda: cast(Any, node))))


@pytest.mark.parametrize("drops", [0, 1, 2])
def test_chunk_that_is_dropped_between_fetch_and_read_is_fetched_again(drops: int) -> None:
    node = Node(drops)
    assert reader(node).tensor(ENTRY) == DATA and node.fetched == drops + 1


def test_chunk_that_is_dropped_each_time_is_missing() -> None:
    node = Node(100)
    with pytest.raises(ChunkMissing):
        reader(node).tensor(ENTRY)
    assert node.fetched == 3


def test_other_bytes_are_refused_once_the_node_has_compared_its_own() -> None:
    assert reader(Node(0, DATA[::-1])).tensor(ENTRY) == DATA, "its memory has rotted, and its disk not"
    with pytest.raises(ChunkCorrupt):
        reader(Node(0, DATA[::-1], DATA[::-1])).tensor(ENTRY)
