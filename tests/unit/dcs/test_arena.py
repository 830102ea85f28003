"""The arena's allocator and its file."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.allocator import regions
from support.shared_fixtures import small_disk

from elastic_rl.dcs.manifest import ALIGN, aligned
from elastic_rl.dcs.storage.allocator import Allocator
from elastic_rl.dcs.storage.arena import _LOCK, PREFIX, ArenaFile, Leftovers, is_owned, open_for_reading
from elastic_rl.errors import ArenaFull, NodeUnavailable, PreflightFailed

SIZE = 64 * ALIGN


def check(space: Allocator, expected: dict[int, int]) -> None:
    """Regions cover the arena without a gap or an overlap, and no two free ones are neighbours."""
    taken, free = regions(space)
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
def test_allocator_never_overlaps_regions_and_merges_free_neighbours(steps: list[tuple[str, int, int]]) -> None:
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


def test_allocator_rejects_free_of_unknown_offset() -> None:
    space = Allocator(SIZE)
    offset = space.alloc(10)
    space.free(offset)
    with pytest.raises(KeyError):
        space.free(offset)
    with pytest.raises(ValueError):
        space.alloc(0)


def test_arena_reports_too_small_a_file_system(tmp_path: Path) -> None:
    with pytest.raises(PreflightFailed, match=r"MiB free .*dcs.arena_bytes=\d+.*remount"):
        ArenaFile.create("job", "n", 1 << 60, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_leftovers_are_arenas_without_a_living_owner(tmp_path: Path) -> None:
    mine = ArenaFile.create("job", "n", 1 << 16, folder=tmp_path)
    dead, other = tmp_path / f"{PREFIX}old-n-abc", tmp_path / "something-else"
    dead.touch()
    other.touch()
    assert is_owned(mine.path) and not is_owned(dead)
    assert Leftovers(tmp_path).removed == [dead]
    assert mine.path.exists() and other.exists()
    os.close(os.open(mine.path, os.O_RDONLY))
    assert is_owned(mine.path), "a reader that closed took the owner's lock with it"
    mine.close()
    assert not mine.path.exists()


def test_attached_publisher_does_not_own_the_arena(tmp_path: Path) -> None:
    owner = ArenaFile.create("job", "n", 1 << 16, folder=tmp_path)
    writer = ArenaFile.attach(owner.path)
    writer.view[5:8] = b"abc"
    assert bytes(owner.view[5:8]) == b"abc"
    writer.close()
    assert owner.path.exists()
    fcntl.flock(owner._fd, fcntl.LOCK_UN)  # as if it had died
    assert Leftovers(tmp_path).removed == [owner.path]
    owner.close()



# -- the arena of a node that was killed -------------------------------------------------------------------------------
MIB = 1 << 20


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in /dev/shm, where pages can be freed under a mapping."""
    folder = Path(tempfile.mkdtemp(prefix="erl-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def killed(folder: Path, nbytes: int) -> Path:
    """An arena of ones whose node was killed."""
    arena = ArenaFile.create("job", "n", nbytes, folder=folder)
    arena.view[:] = b"\1" * nbytes
    path = arena.path
    arena._owner = False
    arena.close()
    return path


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_leftovers_free_memory_that_others_map_but_do_not_read(shm: Path) -> None:
    path = killed(shm, 4 * MIB)
    fd = os.open(path, os.O_RDWR)
    with mmap.mmap(fd, 0) as mapped:
        assert mapped[0] == 1 and allocated(fd) == 4 * MIB
        leftovers = Leftovers(shm)
        assert leftovers.removed == [path] and not path.exists() and leftovers.nbytes == 0
        assert allocated(fd) == 0
    os.close(fd)


def test_leftovers_keep_what_is_being_read_until_the_reader_is_done(shm: Path) -> None:
    path = killed(shm, 4 * MIB)
    reading = open_for_reading(path, MIB + 5, 2 * MIB + 5)
    other = open_for_reading(path, 3 * MIB, 3 * MIB)
    with mmap.mmap(reading, 0, prot=mmap.PROT_READ) as mapped:
        leftovers = Leftovers(shm)
        assert mapped[MIB + 5:2 * MIB + 5] == b"\1" * MIB, "bytes were freed under their reader"
        assert [os.pread(reading, 1, at)[0] for at in (0, 3 * MIB, 3 * MIB + mmap.PAGESIZE)] == [0, 1, 0]
        assert leftovers.nbytes == allocated(reading) == MIB + 2 * mmap.PAGESIZE
        os.close(other)
        leftovers.reclaim()
        assert leftovers.nbytes == allocated(reading) == MIB + mmap.PAGESIZE
        probe = os.dup(reading)  # the same open file description: the lock stays
        os.close(reading)
        leftovers.reclaim()
        assert mapped[MIB + 5] == 1
    assert allocated(probe) == MIB + mmap.PAGESIZE
    size = os.fstat(probe)
    os.close(probe)
    leftovers.reclaim()
    assert leftovers.nbytes == 0 and size.st_nlink == 0


def test_file_of_that_name_with_any_number_of_locks_is_a_leftover(shm: Path) -> None:
    file = shm / f"{PREFIX}foreign"
    file.write_bytes(b"")
    os.truncate(file, 3000 * mmap.PAGESIZE)
    reader = os.open(file, os.O_RDONLY)
    try:
        for page in range(0, 3000, 2):
            fcntl.fcntl(reader, fcntl.F_OFD_SETLK, _LOCK.pack(
                fcntl.F_RDLCK, os.SEEK_SET, page * mmap.PAGESIZE, mmap.PAGESIZE, 0))
        leftovers = Leftovers(shm)
        assert leftovers.removed == [file] and leftovers.nbytes == 1500 * mmap.PAGESIZE
    finally:
        os.close(reader)
    leftovers.reclaim()
    assert leftovers.nbytes == 0


def test_arena_of_a_killed_node_cannot_be_opened_after_it_was_removed(shm: Path) -> None:
    path = killed(shm, MIB)
    Leftovers(shm)
    with pytest.raises(NodeUnavailable):
        open_for_reading(path, 0, 10)


def test_arena_can_be_created_while_others_map_that_of_the_killed_node(tmp_path: Path) -> None:
    with small_disk(tmp_path / "shm", "4M") as folder:
        path = killed(folder, 3 * MIB)
        fd = os.open(path, os.O_RDONLY)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
            os.close(fd)
            with pytest.raises(PreflightFailed):
                ArenaFile.create("job", "n", 3 * MIB, folder=folder)
            Leftovers(folder)
            ArenaFile.create("job", "n", 3 * MIB, folder=folder).close()
            assert len(mapped) == 3 * MIB
