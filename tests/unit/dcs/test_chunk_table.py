"""The table of chunks in memory: sealing, holding, dropping, locating."""

from __future__ import annotations

import pytest
from support.clock import Clock

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.manifest import ALIGN, Packer, aligned
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.errors import ArenaFull, ChunkCorrupt, ChunkMissing, ConfigError


def table(size: int = 1 << 16, grace_s: float = 10.0) -> tuple[ChunkTable, Clock]:
    clock = Clock()
    return ChunkTable(memoryview(bytearray(size)), orphan_grace_s=grace_s, clock=clock), clock


def write(chunks: ChunkTable, conn: int, data: bytes) -> str:
    offset = chunks.alloc(conn, len(data) + 500)
    chunks.view[offset:offset + len(data)] = data
    return chunks.seal(conn, offset, len(data)).digest


def manifest_of(chunks: ChunkTable, conn: int, digest: str, nbytes: int) -> str:
    packer = Packer(1 << 16)
    packer.add("t", "uint8", (nbytes,))
    return write(chunks, conn, packer.manifest([digest]).encode())


def test_seal_stores_equal_bytes_once() -> None:
    chunks, _ = table()
    digest = write(chunks, 1, b"x" * 1000)
    used = chunks.stat()["used_bytes"]
    assert write(chunks, 2, b"x" * 1000) == digest == digest_of(b"x" * 1000)
    assert chunks.stat()["used_bytes"] == used == aligned(1000)
    with chunks.reading(digest) as data:
        assert bytes(data) == b"x" * 1000


def test_seal_rejects_region_of_another_connection() -> None:
    chunks, _ = table()
    offset = chunks.alloc(1, 100)
    for conn, at, nbytes in ((2, offset, 100), (1, offset + ALIGN, 10), (1, offset, 101), (1, offset, 0)):
        with pytest.raises(ConfigError):
            chunks.seal(conn, at, nbytes)
    with pytest.raises(ChunkCorrupt):
        chunks.seal(1, offset, 100, expect="0" * 32)
    assert chunks.stat()["pending"] == chunks.stat()["used_bytes"] == 0


def test_close_frees_open_regions_at_once_and_chunks_after_the_grace() -> None:
    chunks, clock = table(grace_s=10)
    digest = write(chunks, 1, b"a" * 100)
    chunks.alloc(1, 5000)
    assert chunks.drop(set(), chunks.mark()) == (0, 0), "a held chunk was dropped"
    chunks.close(1)
    assert chunks.stat()["pending"] == 0
    assert chunks.drop(set(), chunks.mark()) == (0, 0), "the commit may still be in progress"
    clock.now = 10.1
    assert chunks.drop(set(), chunks.mark()) == (1, 100)
    assert not chunks.has(digest) and chunks.stat()["used_bytes"] == 0


def test_drop_keeps_chunks_of_live_manifests() -> None:
    chunks, _ = table()
    digest = write(chunks, 1, b"a" * 100)
    manifest = manifest_of(chunks, 1, digest, 100)
    loose = write(chunks, 1, b"b" * 100)
    chunks.release_holds(1)
    assert chunks.drop({manifest}, chunks.mark())[0] == 1
    assert chunks.has(digest) and chunks.has(manifest) and not chunks.has(loose)
    assert chunks.drop(set(), chunks.mark())[0] == 2


def test_drop_keeps_chunk_committed_between_mark_and_drop() -> None:
    """Order: seal, mark and catalog read of the garbage collector, commit, release of the holds, drop."""
    chunks, _ = table()
    write(chunks, 1, b"a" * 100)
    mark = chunks.mark()
    chunks.release_holds(1)
    assert chunks.drop(set(), mark) == (0, 0)
    assert chunks.drop(set(), chunks.mark()) == (1, 100)


def test_drop_keeps_chunk_used_after_the_mark() -> None:
    """The garbage collector read the catalog before a new version with an old chunk was committed."""
    chunks, _ = table()
    digest = write(chunks, 1, b"a" * 100)
    chunks.release_holds(1)
    mark = chunks.mark()
    write(chunks, 2, b"a" * 100)
    chunks.release_holds(2)
    assert chunks.drop(set(), mark) == (0, 0)
    mark = chunks.mark()
    chunks.use(digest, None)  # a pull that found it here
    assert chunks.drop(set(), mark) == (0, 0)
    assert chunks.drop(set(), chunks.mark())[0] == 1


def test_drop_refuses_while_a_live_manifest_is_unreadable() -> None:
    chunks, _ = table()
    digest, unreadable = write(chunks, 1, b"a" * 100), write(chunks, 1, b"no manifest")
    chunks.release_holds(1)
    with pytest.raises(ChunkCorrupt):
        chunks.drop({unreadable}, chunks.mark())
    assert chunks.has(digest)


def test_dropped_chunk_keeps_its_bytes_until_the_reader_is_done() -> None:
    chunks, _ = table(size=1024)
    digest = write(chunks, 1, b"a" * 400)
    chunks.release_holds(1)
    with chunks.reading(digest) as data:
        assert chunks.drop(set(), chunks.mark())[0] == 1
        assert not chunks.has(digest)
        with pytest.raises(ArenaFull):
            chunks.alloc(2, 1000)
        assert bytes(data) == b"a" * 400
    assert chunks.alloc(2, 1000) == 0


def test_verify_drops_corrupt_chunk_which_can_be_sealed_again() -> None:
    chunks, _ = table()
    digest = write(chunks, 1, b"a" * 400)
    chunks.view[7] ^= 1
    assert not chunks.verify(digest) and not chunks.has(digest) and chunks.was_corrupt(digest)
    with pytest.raises(ChunkMissing), chunks.reading(digest):
        pass
    assert write(chunks, 1, b"a" * 400) == digest
    assert chunks.verify(digest) and not chunks.was_corrupt(digest)


def test_extent_exceeds_the_request_only_with_plenty_of_room() -> None:
    chunks = ChunkTable(memoryview(bytearray(ALIGN * 80)))
    assert chunks.alloc_extent(1, ALIGN, 4 * ALIGN)[1] == 4 * ALIGN
    assert chunks.alloc_extent(1, ALIGN, 99 * ALIGN)[1] == (80 - 4) * ALIGN // 8
    assert chunks.alloc_extent(1, 40 * ALIGN, 99 * ALIGN)[1] == 40 * ALIGN
    chunks.close(1)
    assert chunks.stat()["pending"] == chunks.stat()["used_bytes"] == 0


def test_chunks_of_one_extent_are_contiguous_and_the_rest_is_freed() -> None:
    chunks = ChunkTable(memoryview(bytearray(ALIGN * 80)))
    offset, nbytes = chunks.alloc_extent(1, 2 * ALIGN, 8 * ALIGN)
    assert nbytes == 8 * ALIGN
    chunks.view[:3] = b"abc"
    chunks.view[ALIGN:ALIGN + 3] = b"abd"  # written before the one in front of it is sealed
    first = chunks.seal(1, offset, 3, keep_rest=True)
    assert chunks.stat()["pending"] == 1
    second = chunks.seal(1, offset + ALIGN, 3, keep_rest=True)
    chunks.view[2 * ALIGN:2 * ALIGN + 3] = b"abc"
    again = chunks.seal(1, offset + 2 * ALIGN, 3, keep_rest=True)
    assert again is first and (first.offset, second.offset) == (0, ALIGN)
    chunks.view[3 * ALIGN:3 * ALIGN + 3] = b"abe"
    third = chunks.seal(1, offset + 3 * ALIGN, 3)
    assert third.offset == 3 * ALIGN
    assert chunks.stat()["pending"] == 0 and chunks.stat()["used_bytes"] == 3 * ALIGN


def test_locate_all_locates_every_chunk_or_none() -> None:
    now = [0.0]
    chunks = ChunkTable(memoryview(bytearray(ALIGN * 80)), orphan_grace_s=0, verify_every_s=60, clock=lambda: now[0])
    digests = [write(chunks, 1, bytes([i]) * ALIGN) for i in range(3)]
    chunks.release_holds(1)
    assert chunks.locate_all([*digests, "0" * 32], 5, "t") is None
    assert chunks.stat()["located"] == 0
    found = chunks.locate_all(digests, 5, "t")
    assert found == [(d, *chunks.locate(d, 6, "one by one")) for d in digests]
    chunks.release(6, "one by one")
    assert chunks.drop(set(), chunks.mark())[0] == 3
    for i, (_, offset, nbytes) in enumerate(found):
        assert bytes(chunks.view[offset:offset + nbytes]) == bytes([i]) * ALIGN
    assert chunks.stat()["used_bytes"] == 3 * ALIGN
    chunks.release(5, "t")
    assert chunks.stat()["used_bytes"] == 0
    old = write(chunks, 1, b"x")
    now[0] = 60.0
    assert chunks.locate_all([old], 5, "t") is None, "its verification is not fresh"
