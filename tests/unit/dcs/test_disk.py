"""The folder of a node's chunks on disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_rl.dcs.codecs.digests import BLAKE3, digest_of
from elastic_rl.dcs.storage.disk import DiskFolder
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, DiskFull, PreflightFailed


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskFolder]:
    folder = DiskFolder(tmp_path / "n", 1000, "job")
    yield folder
    folder.close()


def put(disk: DiskFolder, data: bytes) -> str:
    digest = digest_of(data)
    disk.write(digest, memoryview(data))
    return digest


def read(disk: DiskFolder, digest: str, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    disk.read_into(digest, memoryview(out))
    return bytes(out)


def files(disk: DiskFolder) -> set[str]:
    return {p.name for p in disk.folder.rglob("*") if p.is_file()} - {"lock"}


def test_what_is_written_is_read_and_removed(disk: DiskFolder) -> None:
    digest = put(disk, b"x" * 300)
    assert read(disk, digest, 300) == b"x" * 300 and disk.used_bytes == 300
    assert (disk.folder / digest[:2] / digest).stat().st_size == 300
    put(disk, b"x" * 300)
    assert disk.used_bytes == 300, "the same chunk counted twice"
    disk.remove(digest)
    disk.remove(digest)
    assert disk.used_bytes == 0 and not files(disk)
    with pytest.raises(ChunkMissing):
        read(disk, digest, 300)


def test_a_chunk_over_the_limit_is_refused_and_the_others_stay(disk: DiskFolder) -> None:
    digest = put(disk, b"x" * 600)
    with pytest.raises(DiskFull, match="600 of 1000 bytes"):
        put(disk, b"y" * 401)
    assert files(disk) == {digest} and read(disk, digest, 600) == b"x" * 600
    put(disk, b"y" * 400)


def test_a_write_that_fails_leaves_no_part_of_a_file(disk: DiskFolder) -> None:
    digest = put(disk, b"x" * 100)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            put(disk, b"y" * 400)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(disk) == {digest} and disk.used_bytes == 100


def test_a_file_of_another_length_is_told_as_corrupt(disk: DiskFolder) -> None:
    digest = put(disk, b"x" * 100)
    for damaged in (b"x" * 99, b"x" * 101, b""):
        (disk.folder / digest[:2] / digest).write_bytes(damaged)
        with pytest.raises(ChunkCorrupt):
            read(disk, digest, 100)


def test_the_index_has_whole_chunks_only_and_touches_no_foreign_file(tmp_path: Path) -> None:
    first = DiskFolder(tmp_path / "n", 1000, "job")
    digest, long = put(first, b"x" * 100), digest_of(b"b", BLAKE3)
    first.write(long, memoryview(b"b"))
    first.close()
    place = first.folder / digest[:2]
    left = place / f"{digest[:-1]}0.partial"
    foreign = [place / "notes.txt", place / "notes.partial", first.folder / "ab" / ("cd" * 16), first.folder / "README",
               first.folder / "ab" / f"{'a' * 31}g"]
    for path in (left, *foreign):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"1")
    (place / f"{digest[:-1]}1").symlink_to("/etc/passwd")
    again = DiskFolder(tmp_path / "n", 1000, "job")
    assert again.index() == {digest: 100, long: 1}
    assert again.used_bytes == 101
    assert not left.exists() and all(p.read_bytes() == b"1" for p in foreign)
    assert (place / f"{digest[:-1]}1").is_symlink()
    again.close()


def test_a_folder_has_one_node_at_a_time_and_one_job_for_ever(tmp_path: Path) -> None:
    first = DiskFolder(tmp_path / "n", 1000, "job")
    with pytest.raises(PreflightFailed, match="another process"):
        DiskFolder(tmp_path / "n", 1000, "job")
    first.close()
    with pytest.raises(PreflightFailed, match="job job"):
        DiskFolder(tmp_path / "n", 1000, "jo")
    DiskFolder(tmp_path / "n", 1000, "job").close()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "n").write_bytes(b"")
    with pytest.raises(PreflightFailed, match=r"dcs\.disk_dir"):
        DiskFolder(tmp_path / "n" / "m", 1000, "job")
