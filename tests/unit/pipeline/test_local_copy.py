"""The copy of a job's history on a host: what is at its path becomes the history, and what was there is kept."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import resource
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.manifest import Slice, TensorEntry
from elastic_rl.errors import ChunkMissing, NodeUnavailable
from elastic_rl.pipeline.records import local_copy
from elastic_rl.pipeline.records.history import Block, History, record_line
from elastic_rl.pipeline.records.local_copy import LocalCopy
from elastic_rl.pipeline.records.segments import Segment, segment_name


class Job:
    """A job's history of sealed segments and a tail, and its copy in a folder."""

    def __init__(self, folder: Path, sealed: Sequence[bytes], tail: bytes) -> None:
        ends = [*itertools.accumulate(map(len, sealed))]
        self.data = dict(zip([0, *ends], sealed, strict=False))
        self.list = [Segment(start, start + len(data), TensorEntry(
            segment_name(start, start + len(data)), "uint8", (len(data),), (Slice(digest_of(data), 0, len(data)),)))
            for start, data in self.data.items()]
        self.sealed_bytes = b"".join(sealed)
        end = len(self.sealed_bytes)
        self.history = History("h", end, [Block(end, end, tail)] if tail else [])
        self.path, self.lock = folder / "steps.jsonl", folder / "lock"
        self.reads: list[int] = []
        self.away: set[int] = set()
        self.lost = False
        self.copy = LocalCopy(self.path, self.lock, self.history, self)

    def segments(self) -> Sequence[Segment]:
        if self.lost:
            raise ChunkMissing("the manifest is on no node that answers")
        return self.list

    def read(self, segment: Segment) -> bytes:
        if segment.start in self.away:
            raise NodeUnavailable("away")
        self.reads.append(segment.start)
        return self.data[segment.start]

    @property
    def bytes(self) -> bytes:
        return self.sealed_bytes + (self.history.read(self.history.sealed) or b"")

    def settle(self) -> None:
        for _ in range(1000):
            if not self.copy.step():
                return
        raise AssertionError("the copy is never done")

    def others(self) -> list[Path]:
        return sorted(p for p in self.path.parent.glob("steps*") if p != self.path)


LINES = [record_line("step", step=n, x="." * (n * 7 % 40)) for n in range(24)]
SEALED = [b"".join(LINES[n:n + 4]) for n in range(0, 16, 4)]
WHOLE = b"".join(LINES)


def job(folder: Path) -> Job:
    return Job(folder, SEALED, b"".join(LINES[16:]))


def test_copy_in_an_empty_folder_is_the_history(tmp_path: Path) -> None:
    found = job(tmp_path / "new")
    found.settle()
    assert found.path.read_bytes() == WHOLE and not found.others()
    found.history.append(more := record_line("step", step=99))
    found.settle()
    assert found.path.read_bytes() == WHOLE, "what etcd does not have is not in the copy"
    found.history.commit(found.history.pending()[0])
    found.settle()
    assert found.path.read_bytes() == WHOLE + more


def _edit(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new):]


@given(st.one_of(
    st.integers(0, len(WHOLE)).map(lambda n: WHOLE[:n]), st.binary(max_size=len(WHOLE) + 9),
    st.tuples(st.integers(0, len(WHOLE)), st.binary(min_size=1, max_size=5)).map(lambda e: _edit(WHOLE, *e)),
    st.binary(min_size=1, max_size=9).map(lambda more: WHOLE + more)))
def test_whatever_is_at_the_path_becomes_the_history_and_is_kept(before: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = job(Path(folder))
        found.path.write_bytes(before)
        found.settle()
        assert found.path.read_bytes() == WHOLE
        kept = [p.read_bytes() for p in found.others()]
        if WHOLE.startswith(before):
            assert not kept
        else:
            [aside] = kept
            there = before.removesuffix(aside)
            assert there + aside == before and WHOLE.startswith(there)
            assert not there or len(there) >= len(found.sealed_bytes), "of what is sealed the whole file"
        found.copy.close()


def test_intact_segments_of_an_edited_file_are_not_fetched(tmp_path: Path) -> None:
    found = job(tmp_path)
    start = found.list[2].start
    found.path.write_bytes(_edit(WHOLE, start + 3, b"!"))
    found.settle()
    assert found.path.read_bytes() == WHOLE and found.reads == [start]


@pytest.mark.parametrize("change", [
    lambda path: path.unlink(), lambda path: path.write_bytes(b"mine\n"), lambda path: path.open("ab").write(b"more\n"),
    lambda path: path.open("r+b").truncate(10), lambda path: path.replace(path.with_name("elsewhere"))],
    ids=["deleted", "replaced", "appended", "truncated", "renamed"])
def test_file_that_somebody_changes_meanwhile_becomes_the_history_again(
        tmp_path: Path, change: Callable[[Path], object]) -> None:
    found = job(tmp_path)
    found.settle()
    change(found.path)
    found.history.append(more := record_line("step", step=99))
    found.history.commit(found.history.pending()[0])
    found.settle()
    assert found.path.read_bytes() == WHOLE + more


def test_copy_goes_on_once_a_segment_can_be_had(tmp_path: Path) -> None:
    found = job(tmp_path)
    found.away = {found.list[1].start}
    for _ in range(3):
        with pytest.raises(NodeUnavailable):
            found.settle()
    assert not found.path.exists(), "what is not complete is in a file of its own"
    found.away.clear()
    found.settle()
    assert found.path.read_bytes() == WHOLE


def test_copy_goes_on_without_its_sealed_part_where_that_is_lost_and_its_end_is_the_historys(tmp_path: Path) -> None:
    sealed, tail = [record_line("run", id="h") + SEALED[0], *SEALED[1:]], b"".join(LINES[16:])
    first, found = Job(tmp_path, sealed, tail[:len(tail) // 2]), Job(tmp_path, sealed, tail)
    first.settle()
    first.copy.close()
    found.lost = True
    found.settle()
    assert found.path.read_bytes() == found.bytes and not found.others() and not found.reads
    found.history.append(record_line("step", step=99))
    found.history.commit(found.history.pending()[0])
    found.settle()
    assert found.path.read_bytes() == found.bytes
    found.path.write_bytes(found.sealed_bytes)
    found.settle()
    assert found.path.read_bytes() == found.bytes, "one that a run left which has ended well"
    for other in (found.bytes.replace(b'"step": 17', b'"step": 71'), found.bytes.replace(b'"id": "h"', b'"id": "g"'),
                  found.sealed_bytes[:-1]):
        found.path.write_bytes(other)
        with pytest.raises(ChunkMissing):
            found.settle()


def test_copy_that_could_not_be_compared_is_compared_once_that_can_be_done(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_copy, "_COMPARE_S", (0.0, 0.0))
    sealed = [record_line("run", id="h") + SEALED[0], *SEALED[1:]]
    found = Job(tmp_path, sealed, b"".join(LINES[16:]))
    found.lost = True
    found.path.write_bytes(edited := found.bytes.replace(b'"step": 5', b'"step": 6'))
    for _ in range(10):
        found.copy.step()
    assert found.path.read_bytes() == edited and not found.others(), "what was edited cannot be told now"
    found.lost = False
    found.settle()
    assert found.path.read_bytes() == found.bytes and [p.read_bytes() for p in found.others()] == [edited]


def test_full_disk_costs_no_record(tmp_path: Path) -> None:
    found = job(tmp_path)
    found.settle()
    found.history.append(more := record_line("step", step=99))
    found.history.commit(found.history.pending()[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(WHOLE) + 10, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError):
                found.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found.settle()
    assert found.path.read_bytes() == WHOLE + more and not found.others()


class FileSystem:
    """The free space of the file system of the copy, as the copy sees it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, free: int) -> None:
        self.folder, self.free = folder, free
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=self.free - sum(
            path.stat().st_size for path in self.folder.iterdir())))


RESERVE = local_copy._RESERVE_BYTES


def test_copy_takes_no_space_that_would_be_lacking_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    disk = FileSystem(monkeypatch, tmp_path, RESERVE + len(WHOLE) - 1)
    found = job(tmp_path)
    with pytest.raises(OSError, match="waits for 257 MiB of free space"):
        found.settle()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"] and not found.reads
    disk.free += 1
    found.settle()
    assert found.path.read_bytes() == WHOLE
    found.history.append(more := record_line("step", step=99))
    found.history.commit(found.history.pending()[0])
    with pytest.raises(OSError):
        found.settle()
    assert found.path.read_bytes() == WHOLE
    disk.free += len(more)
    found.settle()
    assert found.path.read_bytes() == WHOLE + more


def test_space_of_a_file_that_is_being_made_is_given_back_when_it_is_needed(tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FileSystem(monkeypatch, tmp_path, 2 * RESERVE)
    found = job(tmp_path)
    found.path.write_bytes(b"mine\n")
    while not found.reads:
        found.copy.step()
    assert [path.name for path in found.others()] == ["steps.jsonl.partial"]
    disk.free = RESERVE
    with pytest.raises(OSError):
        found.settle()
    assert not found.others() and found.path.read_bytes() == b"mine\n"
    disk.free = 2 * RESERVE
    found.settle()
    assert found.path.read_bytes() == WHOLE


@pytest.mark.parametrize("killed", [True, False])
def test_unfinished_file_does_not_outlive_its_process(tmp_path: Path, killed: bool) -> None:
    found = job(tmp_path)
    while not found.reads:
        found.copy.step()
    assert found.others()
    if killed:
        assert found.copy._lock is not None
        found.copy._lock.close()  # as the kernel does
        found.path.write_bytes(WHOLE)
        found = job(tmp_path)
        found.settle()
    else:
        found.copy.close()
    assert not found.others()


def test_file_that_cannot_be_replaced_is_not_compared_again(tmp_path: Path) -> None:
    found = job(tmp_path)
    found.path.write_bytes(_edit(WHOLE, found.list[-1].end - 9, b"!"))
    (blocker := found.path.with_name("steps.jsonl.partial")).mkdir()
    with pytest.raises(OSError):
        found.settle()
    found.list = []  # with which nothing can be compared
    for _ in range(2):
        with pytest.raises(OSError):
            found.copy.step()
    found.path.write_bytes(WHOLE)
    found.list = job(tmp_path).list
    found.settle()
    assert found.path.read_bytes() == WHOLE, "a file that has changed is compared"
    blocker.rmdir()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, _socket], ids=["folder", "fifo", "socket"])
def test_what_is_no_file_is_set_aside(make: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # whose path is short enough for a socket
        found = job(Path(folder))
        make(found.path)
        kind = stat.S_IFMT(found.path.stat().st_mode)
        found.settle()
        assert found.path.read_bytes() == WHOLE
        assert [stat.S_IFMT(path.stat().st_mode) for path in found.others()] == [kind]
        found.path.unlink()
        make(found.path)  # in the place of the file that is continued
        assert found.copy.intact(found.list[0]) is None
        found.settle()
        assert found.path.read_bytes() == WHOLE and len(found.others()) == 2
        found.copy.close()


def test_of_a_copy_that_somebody_appends_to_only_that_is_set_aside(tmp_path: Path) -> None:
    found = job(tmp_path)
    found.settle()
    before = found.path.stat().st_ino
    with found.path.open("ab") as file:
        file.write(b"mine\n")
    found.history.append(more := record_line("step", step=99))  # the history goes on meanwhile
    found.history.commit(found.history.pending()[0])
    found.settle()
    assert found.path.read_bytes() == WHOLE + more and found.path.stat().st_ino == before
    assert [path.read_bytes() for path in found.others()] == [b"mine\n"]


@pytest.mark.parametrize("new", [lambda data: data + b"mine\n", lambda data: b"mine\n" + data], ids=["end", "start"])
def test_file_that_somebody_changes_again_and_again_is_left_alone_in_the_end(
        tmp_path: Path, new: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture) -> None:
    found = job(tmp_path)
    for _ in range(12):
        found.settle()
        found.path.write_bytes(theirs := new(found.path.read_bytes()))
    found.settle()
    assert found.path.read_bytes() == theirs and len(found.others()) == local_copy._MOST_ASIDE
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    found.path.unlink()
    found.settle()
    assert found.path.read_bytes() == WHOLE


def test_gap_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = job(tmp_path)
    found.list = [Segment(0, found.list[2].end, None), *found.list[3:]]
    FileSystem(monkeypatch, tmp_path, RESERVE + len(WHOLE) - found.list[0].end + 100)
    found.settle()
    assert found.path.read_bytes().endswith(WHOLE[found.list[0].end:])


def test_only_the_holder_of_the_lock_writes_the_copy(tmp_path: Path) -> None:
    found = job(tmp_path)
    with found.lock.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not found.copy.step() and not found.path.exists()
    found.settle()
    assert found.path.read_bytes() == WHOLE


def test_gap_of_the_stream_is_a_record_in_a_new_copy_and_costs_an_old_one_nothing(tmp_path: Path) -> None:
    for folder in ("new", "old", "older"):
        (tmp_path / folder).mkdir()
        found = job(tmp_path / folder)
        gap = Segment(0, found.list[2].end, None)
        found.list = [gap, *found.list[3:]]
        if folder == "old":
            found.path.write_bytes(WHOLE[:-30])
        if folder == "older":  # it was made when the gap was smaller
            found.path.write_bytes(Segment(0, len(SEALED[0]), None).gap_line() + WHOLE[len(SEALED[0]):-30])
        found.settle()
        there = found.path.read_bytes()
        assert not found.others()
        if folder == "new":
            assert there == gap.gap_line() + WHOLE[gap.end:]
            assert json.loads(there.splitlines()[0]) == {"kind": "gap", "start": 0, "end": gap.end}
        else:
            assert there.endswith(WHOLE[len(SEALED[0]):]) and (folder == "older" or there == WHOLE)
