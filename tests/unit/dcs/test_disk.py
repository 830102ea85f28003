"""The folder of a node's chunks on disk."""

from __future__ import annotations

import errno
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


def test_disk_reads_and_removes_what_was_written(disk: DiskFolder) -> None:
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


def test_disk_refuses_chunk_over_the_limit(disk: DiskFolder) -> None:
    digest = put(disk, b"x" * 600)
    with pytest.raises(DiskFull, match="600 of 1000 bytes"):
        put(disk, b"y" * 401)
    assert files(disk) == {digest} and read(disk, digest, 600) == b"x" * 600
    put(disk, b"y" * 400)


def test_failed_write_leaves_no_partial_file(disk: DiskFolder) -> None:
    digest = put(disk, b"x" * 100)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            put(disk, b"y" * 400)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(disk) == {digest} and disk.used_bytes == 100


@pytest.mark.parametrize(("room", "error"), [(1000, OSError), (99, DiskFull)])
def test_quota_that_refuses_what_seems_to_have_room_is_a_fault_of_the_disk(
        room: int, error: type[Exception], disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, data: memoryview) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("elastic_rl.dcs.storage.disk.os.write", refuse)
    monkeypatch.setattr(disk, "room", lambda: room)
    with pytest.raises(error) as raised:
        put(disk, b"y" * 100)
    assert isinstance(raised.value, DiskFull) == (error is DiskFull) and not files(disk)


def test_batch_stores_all_chunks_and_counts_them_against_the_limit(disk: DiskFolder) -> None:
    data = [bytes([i]) * 300 for i in range(3)]
    digests = [digest_of(d) for d in data]
    with disk.batch() as batch:
        for digest, content in zip(digests, data, strict=True):
            batch.add(digest, memoryview(content))
        assert files(disk) == {f"{d}.partial" for d in digests} and disk.used_bytes == 0
        with pytest.raises(DiskFull):
            batch.add(digest_of(b"y" * 101), memoryview(b"y" * 101))
        assert batch.commit() == digests
    assert [read(disk, d, 300) for d in digests] == data and disk.used_bytes == 900 and files(disk) == set(digests)


def test_batch_that_is_not_committed_leaves_nothing(disk: DiskFolder) -> None:
    with disk.batch() as batch:
        batch.add(digest_of(b"x"), memoryview(b"x"))
    assert not files(disk) and disk.used_bytes == 0
    put(disk, b"x")


def test_batch_whose_sync_fails_stores_none_of_its_chunks(disk: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = put(disk, b"x" * 100)

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("elastic_rl.dcs.storage.disk.sync_folder", fail)
    with pytest.raises(OSError, match="Input/output"), disk.batch() as batch:
        for digest in (before[:2] + "0" * 30, before[:2] + "1" * 30):  # in a folder that is there
            batch.add(digest, memoryview(b"y" * 10))
        batch.commit()
    assert files(disk) == {before} and disk.used_bytes == 100


def test_read_reports_file_of_another_length_as_corrupt(disk: DiskFolder) -> None:
    digest = put(disk, b"x" * 100)
    for wrong in (b"x" * 99, b"x" * 101, b""):
        (disk.folder / digest[:2] / digest).write_bytes(wrong)
        with pytest.raises(ChunkCorrupt):
            read(disk, digest, 100)


def test_index_lists_whole_chunks_and_leaves_foreign_files_alone(tmp_path: Path) -> None:
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


def test_folder_belongs_to_one_node_and_one_job(tmp_path: Path) -> None:
    first = DiskFolder(tmp_path / "n", 1000, "job")
    with pytest.raises(PreflightFailed, match="another process"):
        DiskFolder(tmp_path / "n", 1000, "job")
    first.close()
    with pytest.raises(PreflightFailed, match="job job"):
        DiskFolder(tmp_path / "n", 1000, "jo")
    DiskFolder(tmp_path / "n", 1000, "job").close()


def test_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "n").write_bytes(b"")
    with pytest.raises(PreflightFailed, match=r"dcs\.disk_dir"):
        DiskFolder(tmp_path / "n" / "m", 1000, "job")
