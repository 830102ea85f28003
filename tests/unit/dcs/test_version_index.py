"""What a node knows of its catalog: for which it drops chunks, what it keeps, what it knows after a restart."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.clock import Clock
from support.shared_fixtures import small_disk

from elastic_rl.dcs.connection import VersionName
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.dcs.node.version_index import FILE, UNREADABLE, VersionIndex
from elastic_rl.errors import CatalogMismatch, ChunkMissing, Conflict, DiskFull
from elastic_rl.etcd.records import Version, VersionState

GRACE_S = 100.0


def version(number: int, manifest: str = "", meta: dict[str, object] | None = None) -> Version:
    return Version(stream="policy", number=number, state=VersionState.COMMITTED, epoch=1,
                   manifest=manifest or f"m{number}", meta=meta or {})


def name(number: int, manifest: str = "") -> VersionName:
    return VersionName.from_version(version(number, manifest))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def index(tmp_path: Path, clock: Clock) -> VersionIndex:
    return VersionIndex(tmp_path, grace_s=GRACE_S, clock=clock)


def test_index_drops_nothing_for_another_catalog(index: VersionIndex) -> None:
    index.note("x", 1, [version(1)])
    with pytest.raises(CatalogMismatch, match="catalog x"):
        index.kept("y", 7, [], [])
    with pytest.raises(CatalogMismatch):
        index.note("y", 7, [version(9)])
    assert index.summary() == ("x", 1) and index.names() == [name(1)]


def test_index_drops_nothing_for_an_older_state_of_its_catalog(index: VersionIndex) -> None:
    index.note("x", 5, [version(1)])
    with pytest.raises(Conflict, match="has seen 5"):
        index.kept("x", 4, [], [name(1)])
    assert index.names() == [name(1)]
    index.note("x", 3, [version(2)])  # a publisher that is late
    assert index.summary() == ("x", 5)


def test_index_joins_the_first_catalog_with_a_commit(index: VersionIndex) -> None:
    index.note("x", 0, [])
    assert index.kept("x", 0, [], []) == set()
    assert index.summary() == ("", 0)
    index.note("y", 1, [version(1)])
    assert index.summary() == ("y", 1)


def test_released_version_goes_and_live_one_stays(index: VersionIndex) -> None:
    index.note("x", 3, [version(1), version(2), version(3)])
    assert index.kept("x", 4, [name(2), name(3)], [name(1)]) == {"m2", "m3"}
    assert index.names() == [name(2), name(3)]


def test_unknown_version_is_kept_for_its_grace(index: VersionIndex, clock: Clock) -> None:
    index.note("x", 2, [version(1), version(2)])
    assert index.kept("x", 2, [name(2)], []) == {"m1", "m2"}
    clock.now = GRACE_S - 1
    assert index.kept("x", 2, [name(2)], []) == {"m1", "m2"}
    assert index.kept("x", 2, [name(1), name(2)], []) == {"m1", "m2"}, "it became known"
    clock.now = GRACE_S + 1
    assert index.kept("x", 2, [name(2)], []) == {"m1", "m2"}, "the grace did not begin again"
    clock.now = 2 * GRACE_S + 2
    assert index.kept("x", 2, [name(2)], []) == {"m2"}
    assert index.names() == [name(2)]


def test_version_released_under_another_manifest_is_unknown(index: VersionIndex) -> None:
    index.note("x", 1, [version(1)])
    assert index.kept("x", 1, [], [name(1, "other")]) == {"m1"}


versions = st.builds(version, st.integers(1, 9), st.sampled_from(["", "other"]),
                     st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=4), max_size=3))


@given(st.lists(versions, max_size=8), st.integers(1, 1 << 40))
def test_index_survives_a_restart(noted: list[Version], commits: int) -> None:
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        first = VersionIndex(Path(folder), grace_s=GRACE_S)
        first.note("x", commits, noted)
        again = VersionIndex(Path(folder), grace_s=GRACE_S)
        assert again.summary() == first.summary() == ("x", commits)
        pages = [again.inventory(NoChunks(), start, 2) for start in range(0, 10, 2)]
        expected = {VersionName.from_version(v): v for v in noted}
        assert [v["version"] for page in pages for v in page["versions"]] == [
            v.model_dump(mode="json") for v in expected.values()]
        assert [page["more"] for page in pages] == [start + 2 < len(expected) for start in range(0, 10, 2)]


class NoChunks:
    def has(self, digest: str) -> bool:
        return False

    @contextlib.contextmanager
    def reading(self, digest: str) -> Iterator[memoryview]:
        raise ChunkMissing(digest)
        yield memoryview(b"")


class SomeChunks(NoChunks):
    """A manifest of three parts, of which the second lacks a chunk."""

    manifest = Manifest((), {"a": 1, "b": 1, "c": 1, "d": 1}, (1, 2, 1))

    def has(self, digest: str) -> bool:
        return digest != "c"

    @contextlib.contextmanager
    def reading(self, digest: str) -> Iterator[memoryview]:
        yield memoryview(self.manifest.encode())


def test_inventory_lists_the_parts_that_are_complete(index: VersionIndex) -> None:
    index.note("x", 1, [version(1)])
    assert [(v["parts"], v["held"]) for v in index.inventory(SomeChunks(), 0, 10)["versions"]] == [(3, [0, 2])]
    assert [(v["parts"], v["held"]) for v in index.inventory(NoChunks(), 0, 10)["versions"]] == [(0, [])]


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"schema": 9}', b'{"schema": 1, "catalog": "x", "commits": 1}', b"\xff",
                                 *(b'{"schema": 1, "catalog": "x", "commits": %s, "versions": []}' % n for n in (
                                     b"1e308", b"1e999", b"-1", b"9" * 40, b"true", b"NaN"))])
def test_unreadable_file_protects_the_chunks(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / FILE).write_bytes(raw)
    index = VersionIndex(tmp_path, grace_s=GRACE_S)
    assert index.summary() == (UNREADABLE, 0)
    with pytest.raises(CatalogMismatch):
        index.kept("x", 1, [], [])
    with pytest.raises(CatalogMismatch):
        index.note("x", 1, [version(1)])
    assert (tmp_path / FILE).read_bytes() == raw


def test_half_written_file_of_a_killed_node_is_ignored(tmp_path: Path, index: VersionIndex) -> None:
    index.note("x", 1, [version(1)])
    (tmp_path / f"{FILE}.partial").write_bytes(b'{"schema": 1, "ca')
    again = VersionIndex(tmp_path, grace_s=GRACE_S)
    assert again.summary() == ("x", 1) and again.names() == [name(1)]


def test_full_disk_leaves_the_index_as_it_was(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "64k") as folder:
        index = VersionIndex(folder, grace_s=GRACE_S)
        index.note("x", 1, [version(1)])
        (folder / "filler").write_bytes(os.urandom(48 << 10))
        with pytest.raises(DiskFull):
            index.note("x", 2, [version(2, meta={"much": "x" * (32 << 10)})])
        assert index.summary() == ("x", 1) and index.names() == [name(1)]
        assert VersionIndex(folder, grace_s=GRACE_S).names() == [name(1)]
