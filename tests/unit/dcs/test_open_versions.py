"""Versions that a node keeps open for its host: shared by readers, verified when that is due, released by the last."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support.waiting import wait_until

from elastic_rl.dcs.fetch.fetcher import Fetcher
from elastic_rl.dcs.fetch.version_map import VersionMap
from elastic_rl.dcs.manifest import ALIGN, Packer
from elastic_rl.dcs.node.open_versions import OpenVersion, OpenVersions
from elastic_rl.dcs.storage.chunk_table import ChunkTable
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, NodeUnavailable, VersionNotFound
from elastic_rl.etcd.records import DcsNode, Version, VersionState

STREAM, VERIFY_EVERY_S = "policy", 60.0


@dataclass
class StubPin:
    version: Version
    alive: bool = True


@dataclass
class StubPins:
    """Stands for etcd: which versions there are, and which are pinned."""

    versions: dict[int, Version] = field(default_factory=dict)
    held: list[StubPin] = field(default_factory=list)
    pinned: int = 0

    def pin(self, stream: str, number: int) -> StubPin:
        if number not in self.versions:
            raise VersionNotFound(f"no {stream} version {number}")
        self.pinned += 1
        self.held.append(StubPin(self.versions[number]))
        return self.held[-1]

    def unpin(self, pin: StubPin) -> None:
        self.held.remove(pin)


class NoPeers:
    def nodes(self) -> list[DcsNode]:
        return []


class Node:
    """A table with the chunks of its versions, and its open versions."""

    def __init__(self, verify_every_s: float = VERIFY_EVERY_S) -> None:
        self.now = 1000.0
        self.table = ChunkTable(memoryview(bytearray(1 << 20)), orphan_grace_s=0, verify_every_s=verify_every_s,
                                clock=lambda: self.now)
        self.fetcher = Fetcher(self.table, NoPeers(), "n")  # type: ignore[arg-type]
        self.pins = StubPins()
        self.versions = OpenVersions(self.table, self.fetcher, self.pins, lambda: self.now)  # type: ignore[arg-type]
        self.chunks: list[str] = []

    def publish(self, number: int, count: int = 3) -> None:
        packer = Packer(ALIGN)
        packer.add("t", "uint8", (count * ALIGN,))
        packer.add("u", "uint8", (ALIGN,))
        self.chunks = [self._put(bytes([number, i] * (ALIGN // 2))) for i in range(count + 1)]
        manifest = self._put(packer.manifest(self.chunks).encode())
        self.table.release_holds(1)
        self.pins.versions[number] = Version(stream=STREAM, number=number, state=VersionState.COMMITTED, epoch=1,
                                             manifest=manifest)

    def _put(self, data: bytes) -> str:
        offset = self.table.alloc(1, len(data))
        self.table.view[offset:offset + len(data)] = data
        return self.table.seal(1, offset, len(data)).digest

    def open(self, number: int = 1) -> OpenVersion:
        """One more reader, once the version is open. Raises what the opening ended with."""
        version = self.versions.acquire(STREAM, number)
        assert version.wait(20).over, "it does not end"
        try:
            version.record()
        except BaseException:
            self.versions.release(version)
            raise
        return version

    def read(self, version: OpenVersion) -> dict[str, bytes]:
        assert version.map_at is not None
        offset, nbytes, digest = version.map_at
        table = VersionMap(self.table.view[offset:offset + nbytes], digest)
        return {t.name: b"".join(bytes(self.table.view[o:o + n]) for o, n in t.pieces) for t in table.read()}

    def flip(self, chunk: str) -> None:
        self.table.view[self.table._chunks[chunk].offset] ^= 1

    def assert_nothing_open(self) -> None:
        stat = self.table.stat()
        assert stat["located"] == stat["pending"] == 0 and not self.pins.held and not self.versions._shared


@pytest.fixture
def node() -> Node:
    out = Node()
    out.publish(1)
    return out


def test_readers_share_one_pin_one_table_and_one_verification(node: Node) -> None:
    node.now += VERIFY_EVERY_S  # so that a verification is due
    before = node.table._tiers.verifications
    readers = [node.open() for _ in range(8)]
    assert len(set(map(id, readers))) == 1 and node.pins.pinned == 1
    assert node.table._tiers.verifications == before + len(node.chunks) + 1, "each chunk and the manifest once"
    assert node.read(readers[0]) == {"t": b"".join(bytes([1, i] * (ALIGN // 2)) for i in range(3)),
                                     "u": bytes([1, 3] * (ALIGN // 2))}
    assert readers[0].complete == [0, 1]
    for reader in readers[1:]:
        node.versions.release(reader)
    assert node.pins.held and node.table.stat()["located"] == len(node.chunks)
    node.versions.release(readers[0])
    node.assert_nothing_open()


def test_version_stays_in_place_until_its_last_reader_releases_it(node: Node) -> None:
    version = node.open()
    before = node.read(version)
    assert node.table.drop(set(), node.table.mark())[0] == len(node.chunks) + 1
    node.publish(2, count=40)
    assert node.read(version) == before
    node.versions.release(version)
    assert node.table.stat()["located"] == 0


def test_version_is_opened_again_when_its_verification_has_expired(node: Node) -> None:
    first = node.open()
    node.now += VERIFY_EVERY_S / 2
    assert node.open() is first
    node.now += VERIFY_EVERY_S / 2
    second = node.open()
    assert second is not first and node.read(second) == node.read(first) and len(node.pins.held) == 2
    for version in (first, first, second):
        node.versions.release(version)
    node.assert_nothing_open()


def test_flipped_bit_is_found_when_the_next_verification_is_due(node: Node) -> None:
    reader = node.open()
    node.flip(node.chunks[1])
    assert node.open() is reader, "the last verification counts for dcs.verify_every_s"
    node.now += VERIFY_EVERY_S
    with pytest.raises(ChunkCorrupt, match=node.chunks[1]):
        node.open()
    node.versions.release(reader)
    node.versions.release(reader)
    node.assert_nothing_open()


def test_flipped_bit_is_found_at_once_without_an_interval() -> None:
    node = Node(verify_every_s=0.0)
    node.publish(1)
    node.versions.release(node.open())
    node.flip(node.chunks[0])
    with pytest.raises(ChunkCorrupt):
        node.open()
    node.assert_nothing_open()


def test_corrupt_manifest_is_not_decoded(node: Node) -> None:
    node.flip(node.pins.versions[1].manifest)
    with pytest.raises(ChunkCorrupt):
        node.open()
    node.assert_nothing_open()


def test_version_whose_pin_has_expired_is_not_shared_with_new_readers(node: Node) -> None:
    first = node.open()
    node.pins.held[0].alive = False
    assert node.open() is not first


def test_failure_is_raised_for_every_reader_and_the_next_one_tries_again(node: Node) -> None:
    with pytest.raises(VersionNotFound):
        node.open(7)
    node.pins.versions[7] = node.pins.versions[1].replace(number=7, manifest="0" * 32)
    with pytest.raises(ChunkMissing):
        node.open(7)
    node.assert_nothing_open()
    node.publish(7)
    node.versions.release(node.open(7))
    node.assert_nothing_open()


def test_unexpected_error_ends_the_opening(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.table, "locate_all", lambda *_: 1 / 0)
    with pytest.raises(NodeUnavailable, match="ZeroDivisionError"):
        node.open()
    node.assert_nothing_open()


def test_opening_is_cancelled_when_its_last_reader_leaves(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    def fetch(digests: object, *_: object, tick: Callable[[], None], **options: object) -> None:
        begun.set()
        try:
            while True:
                tick()
                threading.Event().wait(0.005)
        finally:
            ended.set()

    monkeypatch.setattr(node.fetcher, "fetch", fetch)
    readers = [node.versions.acquire(STREAM, 1) for _ in range(2)]
    assert begun.wait(60) and readers[0].wait(0).steps >= 0
    node.versions.release(readers[0])
    assert not ended.wait(0.05), "a reader is left"
    node.versions.release(readers[1])
    assert ended.wait(60)
    wait_until(lambda: not node.pins.held, what="the end of the pin")
    node.assert_nothing_open()


def test_concurrent_readers_come_and_go_without_a_leak(node: Node) -> None:
    errors = list[BaseException]()

    def read() -> None:
        try:
            for _ in range(30):
                version = node.open()
                assert node.read(version)["u"] == bytes([1, 3] * (ALIGN // 2))
                node.versions.release(version)
        except BaseException as e:
            errors.append(e)
            raise

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    node.assert_nothing_open()
