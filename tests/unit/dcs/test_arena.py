"""The arena's allocator, its file, and the table of chunks in it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.manifest import ALIGN, Packer, aligned
from elastic_rl.dcs.storage.arena import PREFIX, Allocator, ArenaFile, is_owned, remove_leftovers
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.errors import ArenaFull, ChunkCorrupt, ChunkMissing, ConfigError, PreflightFailed

SIZE = 64 * ALIGN


def check(space: Allocator, expected: dict[int, int]) -> None:
    """Regions cover the arena without a gap or an overlap, and no two free ones are neighbours."""
    taken, free = space.regions()
    assert dict(taken) == expected
    assert space.used == sum(expected.values())
    at, last_free = 0, False
    for start, size, is_free in sorted([(*r, False) for r in taken] + [(*r, True) for r in free]):
        assert start == at and size > 0 and start % ALIGN == size % ALIGN == 0
        assert not (is_free and last_free)
        at, last_free = start + size, is_free
    assert at == space.size


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "shrink", "split"]), st.integers(1, 12 * ALIGN),
                          st.integers(0, 99))))
def test_regions_never_overlap_and_free_neighbours_are_joined(steps: list[tuple[str, int, int]]) -> None:
    space, mine = Allocator(SIZE), dict[int, int]()
    for what, nbytes, pick in steps:
        if what == "alloc":
            try:
                mine[space.alloc(nbytes)] = aligned(nbytes)
            except ArenaFull:
                assert space.largest_free < aligned(nbytes)
        elif mine:
            offset = sorted(mine)[pick % len(mine)]
            if what == "free":
                space.free(offset)
                del mine[offset]
            elif what == "split":
                if aligned(nbytes) < mine[offset]:
                    after = space.split(offset, nbytes)
                    mine[offset], mine[after] = aligned(nbytes), mine[offset] - aligned(nbytes)
            else:
                mine[offset] = aligned(min(nbytes, mine[offset]))
                space.shrink(offset, mine[offset])
        check(space, mine)
    for offset in mine:
        space.free(offset)
    check(space, {})
    assert space.largest_free == space.size


def test_what_is_not_a_region_cannot_be_freed() -> None:
    space = Allocator(SIZE)
    offset = space.alloc(10)
    space.free(offset)
    with pytest.raises(KeyError):
        space.free(offset)
    with pytest.raises(ValueError):
        space.alloc(0)


def test_too_small_a_file_system_is_unfit(tmp_path: Path) -> None:
    with pytest.raises(PreflightFailed, match=r"MiB free .*dcs.arena_bytes=\d+.*remount"):
        ArenaFile.create("job", "n", 1 << 60, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_only_what_nobody_owns_is_a_leftover(tmp_path: Path) -> None:
    mine = ArenaFile.create("job", "n", 1 << 16, folder=tmp_path)
    dead, other = tmp_path / f"{PREFIX}old-n-abc", tmp_path / "something-else"
    dead.touch()
    other.touch()
    assert is_owned(mine.path) and not is_owned(dead)
    assert remove_leftovers(tmp_path) == [dead]
    assert mine.path.exists() and other.exists()
    os.close(os.open(mine.path, os.O_RDONLY))
    assert is_owned(mine.path), "a reader that closed took the owner's lock with it"
    mine.close()
    assert not mine.path.exists()


def test_a_publisher_that_attaches_does_not_become_the_owner(tmp_path: Path) -> None:
    owner = ArenaFile.create("job", "n", 1 << 16, folder=tmp_path)
    writer = ArenaFile.attach(owner.path)
    writer.view[5:8] = b"abc"
    assert bytes(owner.view[5:8]) == b"abc"
    writer.close()
    assert owner.path.exists()
    fcntl.flock(owner._fd, fcntl.LOCK_UN)  # as if it had died
    assert remove_leftovers(tmp_path) == [owner.path]
    owner.close()


# -- the table of chunks ------------------------------------------------------------------------------------------
class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


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


def test_the_same_bytes_are_kept_once() -> None:
    chunks, _ = table()
    digest = write(chunks, 1, b"x" * 1000)
    used = chunks.stat()["used_bytes"]
    assert write(chunks, 2, b"x" * 1000) == digest == digest_of(b"x" * 1000)
    assert chunks.stat()["used_bytes"] == used == aligned(1000)
    with chunks.reading(digest) as data:
        assert bytes(data) == b"x" * 1000


def test_a_connection_can_only_seal_its_own_region() -> None:
    chunks, _ = table()
    offset = chunks.alloc(1, 100)
    for conn, at, nbytes in ((2, offset, 100), (1, offset + ALIGN, 10), (1, offset, 101), (1, offset, 0)):
        with pytest.raises(ConfigError):
            chunks.seal(conn, at, nbytes)
    with pytest.raises(ChunkCorrupt):
        chunks.seal(1, offset, 100, expect="0" * 32)
    assert chunks.stat()["pending"] == chunks.stat()["used_bytes"] == 0


def test_a_closed_connection_gives_its_open_regions_back_at_once_and_its_chunks_after_the_grace() -> None:
    chunks, clock = table(grace_s=10)
    digest = write(chunks, 1, b"a" * 100)
    chunks.alloc(1, 5000)
    assert chunks.drop(set(), chunks.mark()) == (0, 0), "a held chunk was dropped"
    chunks.close(1)
    assert chunks.stat()["pending"] == 0
    assert chunks.drop(set(), chunks.mark()) == (0, 0), "the commit may still be under way"
    clock.now = 10.1
    assert chunks.drop(set(), chunks.mark()) == (1, 100)
    assert not chunks.has(digest) and chunks.stat()["used_bytes"] == 0


def test_what_a_live_manifest_refers_to_stays() -> None:
    chunks, _ = table()
    digest = write(chunks, 1, b"a" * 100)
    manifest = manifest_of(chunks, 1, digest, 100)
    loose = write(chunks, 1, b"b" * 100)
    chunks.settle(1)
    assert chunks.drop({manifest}, chunks.mark())[0] == 1
    assert chunks.has(digest) and chunks.has(manifest) and not chunks.has(loose)
    assert chunks.drop(set(), chunks.mark())[0] == 2


def test_a_chunk_whose_commit_fell_between_the_mark_and_the_drop_is_spared() -> None:
    """Sealed, then the janitor took its mark and read the catalog, then the commit and the settling, then the drop."""
    chunks, _ = table()
    write(chunks, 1, b"a" * 100)
    mark = chunks.mark()
    chunks.settle(1)
    assert chunks.drop(set(), mark) == (0, 0)
    assert chunks.drop(set(), chunks.mark()) == (1, 100)


def test_a_chunk_that_was_used_again_after_the_mark_is_spared() -> None:
    """The janitor read the catalog before a new version, made of an old chunk, was committed."""
    chunks, _ = table()
    digest = write(chunks, 1, b"a" * 100)
    chunks.settle(1)
    mark = chunks.mark()
    write(chunks, 2, b"a" * 100)
    chunks.settle(2)
    assert chunks.drop(set(), mark) == (0, 0)
    mark = chunks.mark()
    chunks.use(digest, None)  # a pull that found it here
    assert chunks.drop(set(), mark) == (0, 0)
    assert chunks.drop(set(), chunks.mark())[0] == 1


def test_a_live_manifest_that_cannot_be_read_stops_the_sweep() -> None:
    chunks, _ = table()
    digest, rotten = write(chunks, 1, b"a" * 100), write(chunks, 1, b"no manifest")
    chunks.settle(1)
    with pytest.raises(ChunkCorrupt):
        chunks.drop({rotten}, chunks.mark())
    assert chunks.has(digest)


def test_a_chunk_that_is_being_read_keeps_its_bytes_until_the_reader_is_done() -> None:
    chunks, _ = table(size=1024)
    digest = write(chunks, 1, b"a" * 400)
    chunks.settle(1)
    with chunks.reading(digest) as data:
        assert chunks.drop(set(), chunks.mark())[0] == 1
        assert not chunks.has(digest)
        with pytest.raises(ArenaFull):
            chunks.alloc(2, 1000)
        assert bytes(data) == b"a" * 400
    assert chunks.alloc(2, 1000) == 0


def test_a_rotten_chunk_is_given_up_and_can_come_back() -> None:
    chunks, _ = table()
    digest = write(chunks, 1, b"a" * 400)
    chunks.view[7] ^= 1
    assert not chunks.sound(digest) and not chunks.has(digest) and chunks.was_rotten(digest)
    with pytest.raises(ChunkMissing), chunks.reading(digest):
        pass
    assert write(chunks, 1, b"a" * 400) == digest
    assert chunks.sound(digest) and not chunks.was_rotten(digest)


def test_a_region_is_larger_than_asked_for_only_where_there_is_plenty_of_room() -> None:
    chunks = ChunkTable(memoryview(bytearray(ALIGN * 80)))
    assert chunks.extent(1, ALIGN, 4 * ALIGN)[1] == 4 * ALIGN
    assert chunks.extent(1, ALIGN, 99 * ALIGN)[1] == (80 - 4) * ALIGN // 8
    assert chunks.extent(1, 40 * ALIGN, 99 * ALIGN)[1] == 40 * ALIGN
    chunks.close(1)
    assert chunks.stat()["pending"] == chunks.stat()["used_bytes"] == 0


def test_chunks_of_one_extent_lie_one_behind_the_other_and_what_is_left_is_given_back() -> None:
    chunks = ChunkTable(memoryview(bytearray(ALIGN * 80)))
    offset, nbytes = chunks.extent(1, 2 * ALIGN, 8 * ALIGN)
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


def test_chunks_are_located_all_at_once_or_not_at_all() -> None:
    now = [0.0]
    chunks = ChunkTable(memoryview(bytearray(ALIGN * 80)), orphan_grace_s=0, verify_every_s=60, clock=lambda: now[0])
    digests = [write(chunks, 1, bytes([i]) * ALIGN) for i in range(3)]
    chunks.settle(1)
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
    assert chunks.locate_all([old], 5, "t") is None, "it is to be verified before it is handed out"
