"""The table of chunks with a disk: saving, spilling, loading, and what keeps a chunk where it is."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.tiered_table import KIB, Node

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.manifest import Packer
from elastic_rl.dcs.storage.chunk_table import _MANIFEST_PREFIX
from elastic_rl.dcs.storage.disk import WriteBatch
from elastic_rl.errors import (
    ArenaFull,
    ChunkMissing,
    DiskFull,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "n"


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    out = Node(folder)
    yield out
    out.disk.close()


def test_saver_saves_chunk_once_its_holds_are_released(node: Node) -> None:
    digest = node.write(1, b"a" * KIB)
    node.saver.step(0)
    assert not node.path(digest).exists()
    node.table.release_holds(1)
    node.saver.step(0)
    assert node.path(digest).read_bytes() == b"a" * KIB and node.table.stat()["unsaved"] == 0


def test_saver_saves_orphan_after_its_grace(folder: Path) -> None:
    node = Node(folder, grace_s=10)
    digest = node.write(1, b"a" * KIB)
    node.table.close(1)
    node.saver.step(0)
    assert not node.path(digest).exists()
    node.clock.now = 10.1
    node.saver.step(0)
    assert node.path(digest).exists()
    node.disk.close()


def test_table_keeps_more_than_the_arena_holds(node: Node) -> None:
    versions = [bytes([i]) * KIB for i in range(12)]
    digests = []
    for data in versions:
        digests.append(node.commit(data))
        node.save_all()
    assert not node.resident(digests[0]) and node.resident(digests[-1])
    assert [node.read(d) for d in digests] == versions
    assert node.resident(digests[-1]) and node.table.stat()["used_bytes"] == 4 * KIB


def test_spill_takes_least_recently_used_chunks_first(node: Node) -> None:
    a, b, c, d = (node.commit(bytes([i]) * KIB) for i in range(4))
    node.save_all()
    node.table.use(a, None)
    node.commit(b"x" * KIB)
    assert [node.resident(x) for x in (a, b, c, d)] == [True, False, True, True]


def test_spill_spares_held_unsaved_read_and_located_chunks(node: Node) -> None:
    held, unsaved, read, located = (node.commit(bytes([i]) * KIB) for i in range(4))
    node.save_all()
    node.table.use(held, 7)
    node.table._chunks[unsaved].on_disk = False
    offset, nbytes = node.table.locate(located, 8, "t")
    with node.table.reading(read):
        with pytest.raises(ArenaFull):
            node.table.alloc(2, 1)
        assert node.table.stat()["resident"] == 4
    assert node.table.alloc(2, KIB) >= 0  # the one whose reader is done
    assert not node.resident(read) and bytes(node.table.view[offset:offset + nbytes]) == b"\x03" * KIB
    node.table.release(8, "t")
    assert node.table.alloc(2, KIB) == offset
    node.table.release_holds(7)
    assert node.table.alloc(2, KIB) >= 0 and not node.resident(held) and node.resident(unsaved)


def test_spill_drops_nothing_if_it_would_not_suffice(node: Node) -> None:
    node.commit(b"a" * KIB)
    node.save_all()
    node.write(1, b"b" * KIB)
    with pytest.raises(ArenaFull):
        node.table.alloc(2, 4 * KIB)
    assert node.table.stat()["resident"] == 2


@pytest.mark.parametrize("how", ["release", "close"])
def test_located_chunk_keeps_its_region_after_a_drop_until_release(node: Node, how: str) -> None:
    digest = node.commit(b"a" * KIB)
    offset, _ = node.table.locate(digest, 5, "one")
    node.table.locate(digest, 5, "one")
    node.table.locate(digest, 5, "two")
    assert node.table.drop(set(), node.table.mark()) == (1, KIB)
    node.table.release(5, "one")
    with pytest.raises(ArenaFull):
        node.table.alloc(2, 4 * KIB)
    assert bytes(node.table.view[offset:offset + KIB]) == b"a" * KIB
    if how == "release":
        node.table.release(5, "two")
    else:
        node.table.close(5)
    assert node.table.alloc(2, 4 * KIB) == 0
    with pytest.raises(ChunkMissing):
        node.table.locate(digest, 5, "three")


def test_locate_neither_holds_a_chunk_nor_releases_a_hold(node: Node) -> None:
    digest = node.write(1, b"a" * KIB)
    node.table.locate(digest, 1, "t")
    node.table.release(1, "t")
    assert node.table.stat()["held"] == 1 and node.table.drop(set(), node.table.mark()) == (0, 0)
    node.table.release_holds(1)
    assert node.table.stat()["held"] == 0 and node.table.drop(set(), node.table.mark()) == (1, KIB)


def test_alloc_reports_full_disk_once_the_arena_is_full_and_recovers(folder: Path) -> None:
    node = Node(folder, disk=2 * KIB)
    digests = [node.commit(bytes([i]) * KIB) for i in range(4)]
    for _ in digests:
        node.saver.step(0)
    with pytest.raises(DiskFull, match="2048 of 2048"):
        for _ in range(3):  # two have a copy on disk and make room
            node.commit(bytes([9]) * KIB + bytes([_]))
    assert all(node.read(d) == bytes([i]) * KIB for i, d in enumerate(digests))
    node.table.release_holds(1)
    mark = node.table.mark()
    kept = digests[3]
    node.table.use(kept, None)
    node.table.drop(set(), mark)
    for _ in range(3):
        node.saver.step(0)
    assert node.path(kept).exists() and node.disk.used_bytes == KIB
    assert node.commit(b"z" * 2 * KIB)
    node.disk.close()


def test_dropped_chunk_loses_its_file(node: Node) -> None:
    digest = node.commit(b"a" * KIB)
    node.save_all()
    assert node.path(digest).exists()
    node.table.drop(set(), node.table.mark())
    node.saver.step(0)
    assert not node.path(digest).exists() and node.disk.used_bytes == 0


def test_disk_that_fails_is_told_while_there_is_something_to_save(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with(error: Exception) -> str:
        def broken(batch: WriteBatch, name: str, data: memoryview) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(WriteBatch, "add", broken)
            patch.setattr(node.table._queue, "_retry_at", 0.0)
            node.saver.step(0)
        return node.table.disk_fault()

    node.commit(b"a" * KIB)
    assert fails_with(DiskFull("no room")) == "", "that is another alert"
    assert "Input/output error" in fails_with(OSError(errno.EIO, "Input/output error"))
    node.table.drop(set(), node.table.mark())
    assert node.table.disk_fault() == "", "it is no longer wanted"


def test_chunk_sealed_again_before_its_file_is_removed_ends_up_on_disk(node: Node) -> None:
    digest = node.commit(b"a" * KIB)
    node.save_all()
    node.table.drop(set(), node.table.mark())
    assert node.commit(b"a" * KIB) == digest
    node.save_all()
    node.saver.step(0)
    assert node.path(digest).exists() and node.disk.used_bytes == KIB


def test_drop_removes_the_file_of_a_chunk_that_was_sealed_again(node: Node) -> None:
    digest = node.commit(b"a" * KIB)
    node.save_all()
    node.table.alloc(9, 4 * KIB)
    node.table.close(9)
    assert not node.resident(digest) and node.path(digest).exists()
    node.commit(b"a" * KIB)  # its file is not relied upon from here on
    node.table.drop(set(), node.table.mark())
    node.saver.step(0)
    assert not node.path(digest).exists() and node.disk.used_bytes == 0


def test_file_of_a_chunk_dropped_and_sealed_meanwhile_is_kept(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = node.commit(b"a" * KIB)
    node.save_all()
    node.table.alloc(9, 4 * KIB)
    node.table.close(9)
    node.commit(b"a" * KIB)
    write = WriteBatch.add

    def drop_and_seal(batch: WriteBatch, name: str, data: memoryview) -> None:
        write(batch, name, data)
        node.table.drop(set(), node.table.mark())  # which has the old file removed
        node.commit(b"a" * KIB)

    with monkeypatch.context() as patch:
        patch.setattr(WriteBatch, "add", drop_and_seal)
        node.saver.step(0)
    node.saver.step(0)
    assert node.table._chunks[digest].on_disk and node.path(digest).exists()


@pytest.mark.parametrize("again", [False, True])
def test_chunk_dropped_while_it_is_saved_leaves_no_file_unless_sealed_again(
        node: Node, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    digest, write = node.commit(b"a" * KIB), WriteBatch.add

    def slowly(batch: WriteBatch, name: str, data: memoryview) -> None:
        write(batch, name, data)
        assert node.table.drop(set(), node.table.mark()) == (1, KIB)
        if again:
            node.commit(b"a" * KIB)

    with monkeypatch.context() as patch:
        patch.setattr(WriteBatch, "add", slowly)
        node.saver.step(0)
    node.saver.step(0)
    assert node.table.has(digest) == node.path(digest).exists() == again


def test_restarted_node_has_the_chunks_on_disk(folder: Path) -> None:
    before = Node(folder)
    packer = Packer(KIB)
    packer.add("t", "uint8", (KIB,))
    digest = before.commit(b"a" * KIB)
    manifest = before.commit(packer.manifest([digest]).encode())
    loose = before.commit(b"b" * KIB)
    before.save_all()
    lost = before.commit(b"c" * KIB)
    before.disk.close()
    after = Node(folder)
    assert after.table.has(digest) and not after.table.has(lost)
    assert after.table.stat()["used_bytes"] == 0
    assert after.table.drop({manifest}, after.table.mark())[0] == 1 and not after.table.has(loose)
    assert after.table.verify(digest) and after.read(digest) == b"a" * KIB
    after.disk.close()


def test_corrupt_file_is_never_served(folder: Path) -> None:
    before = Node(folder)
    digest = before.commit(b"a" * KIB)
    before.save_all()
    before.disk.close()
    before.path(digest).write_bytes(b"a" * (KIB - 1) + b"b")
    after = Node(folder)
    assert after.table.has(digest), "files are verified only when they are used"
    with pytest.raises(ChunkMissing), after.table.reading(digest):
        pytest.fail("wrong bytes were served")
    assert not after.table.has(digest) and after.table.was_corrupt(digest) and not after.table.verify(digest)
    after.saver.step(0)
    assert not after.path(digest).exists() and after.table.stat()["used_bytes"] == 0
    assert after.commit(b"a" * KIB) == digest and not after.table.was_corrupt(digest)
    after.disk.close()


def test_drop_keeps_what_was_there_while_a_live_manifest_on_disk_is_corrupt(folder: Path) -> None:
    before = Node(folder)
    packer = Packer(KIB)
    packer.add("t", "uint8", (KIB,))
    digest = before.commit(b"a" * KIB)
    manifest = before.commit(packer.manifest([digest]).encode())
    before.save_all()
    before.disk.close()
    before.path(manifest).write_bytes(before.path(manifest).read_bytes().replace(b'"t"', b'"u"'))
    after = Node(folder)
    for _ in range(2):
        assert after.table.drop({manifest}, after.table.mark()) == (0, 0)
    assert after.table.has(digest)
    after.disk.close()


@pytest.mark.parametrize("corrupt", ["arena", "disk"])
def test_manifest_that_is_lost_everywhere_does_not_fill_the_node_for_good(folder: Path, corrupt: str) -> None:
    """A version of which no copy of the manifest is left stays live: nobody else may say that it is over."""
    packer = Packer(KIB)
    packer.add("t", "uint8", (KIB,))
    node = Node(folder)
    digest = node.commit(b"a" * KIB)
    manifest = node.commit(packer.manifest([digest]).encode())
    if corrupt == "disk":
        node.save_all()
        node.disk.close()
        node.path(manifest).write_bytes(b"rotten")
        node = Node(folder)
    else:
        node.table.view[node.table._chunks[manifest].offset] ^= 1
    for n in range(20):
        before = node.commit(b"%07d" % n * 100)
        # The first of them is there when the loss is found.
        assert node.table.drop({manifest}, node.table.mark())[0] == bool(n)
        assert node.table.has(digest) and node.table.has(before) == (not n)
    assert node.table.manifests_to_fetch({manifest}) == [manifest]
    node.disk.close()


def test_further_losses_keep_nothing_more_for_a_manifest_that_is_lost_everywhere(folder: Path) -> None:
    packer = Packer(KIB)
    packer.add("t", "uint8", (KIB,))
    node = Node(folder)
    digest = node.commit(b"a" * KIB)
    manifest = node.commit(packer.manifest([digest]).encode())
    for n in range(20):
        lost = manifest if not n else node.commit(b"%07d" % n * 100)
        garbage = node.commit(b"%06d" % n * 100)
        node.table.view[node.table._chunks[lost].offset] ^= 1
        assert not node.table.verify(lost, force=True)
        node.table.drop({manifest}, node.table.mark())
        assert node.table.has(digest) and node.table.has(garbage) == (not n)
    node.disk.close()


def test_late_drop_leaves_what_is_of_a_version_that_was_committed_since_and_lost_its_manifest(node: Node) -> None:
    """Order: mark and catalog read of the garbage collector, commit, loss of its manifest, drop, the next sweep."""
    packer = Packer(KIB)
    packer.add("t", "uint8", (KIB,))
    mark = node.table.mark()
    digest = node.commit(b"a" * KIB)
    manifest = node.commit(packer.manifest([digest]).encode())
    node.table.view[node.table._chunks[manifest].offset] ^= 1
    assert not node.table.verify(manifest, force=True)
    assert node.table.drop(set(), mark) == (0, 0)
    assert node.table.manifests_to_fetch({manifest}) == [manifest]
    assert node.table.drop({manifest}, node.table.mark()) == (0, 0) and node.table.has(digest)


def test_drop_after_restart_requires_the_manifest_that_was_lost_before_it(folder: Path) -> None:
    packer = Packer(KIB)
    packer.add("t", "uint8", (KIB,))
    before = Node(folder)
    digest, orphan = before.commit(b"a" * KIB), before.commit(b"o" * KIB)
    encoded = packer.manifest([digest]).encode()
    manifest = before.commit(encoded)
    before.save_all()
    before.disk.close()
    before.path(manifest).write_bytes(b"rotten")
    corrupt = Node(folder)
    assert corrupt.table.drop({manifest}, corrupt.table.mark()) == (0, 0)
    corrupt.saver.step(0)
    assert not corrupt.path(manifest).exists()
    corrupt.disk.close()
    after = Node(folder)
    assert after.table.drop({manifest}, after.table.mark()) == (0, 0)
    assert after.table.has(digest) and after.table.manifests_to_fetch({manifest}) == [manifest]
    after.commit(encoded)
    assert after.table.manifests_to_fetch({manifest}) == []
    assert after.table.drop({manifest}, after.table.mark()) == (1, KIB)
    assert after.table.has(digest) and not after.table.has(orphan)
    elsewhere = "f" * 32  # a version that was committed since, of which nothing is here
    assert after.table.manifests_to_fetch({manifest, elsewhere}) == []
    assert after.table.drop({manifest, elsewhere}, after.table.mark()) == (0, 0) and after.table.has(digest)
    after.disk.close()


def test_drop_reads_manifest_from_disk_while_the_arena_is_full(node: Node) -> None:
    packer = Packer(KIB)
    packer.add("t", "uint8", (KIB,))
    digest = node.commit(b"a" * KIB)
    manifest = node.commit(packer.manifest([digest]).encode())
    node.save_all()
    node.table.alloc(9, 4 * KIB)
    assert not node.resident(manifest)
    assert node.table.drop({manifest}, node.table.mark()) == (0, 0)
    assert node.read(digest) == b"a" * KIB and not node.resident(digest)
    with pytest.raises(ArenaFull):
        node.table.locate(digest, 1, "t")


def test_corrupt_arena_copy_is_replaced_from_disk(node: Node) -> None:
    digest = node.commit(b"a" * KIB)
    node.save_all()
    node.table.view[node.table._chunks[digest].offset] ^= 1
    assert node.read(digest) != b"a" * KIB, "the fault did not happen"
    assert node.table.verify(digest) and node.read(digest) == b"a" * KIB


def test_saver_does_not_save_corrupt_copy(node: Node) -> None:
    digest = node.commit(b"a" * KIB)
    node.table.view[node.table._chunks[digest].offset] ^= 1
    node.saver.step(0)
    assert not node.path(digest).exists() and not node.table.has(digest)


def test_seal_of_spilled_chunk_does_not_rely_on_its_unverified_file(node: Node) -> None:
    digest = node.commit(b"a" * KIB)
    node.save_all()
    node.table.alloc(9, 4 * KIB)
    node.table.close(9)
    assert not node.resident(digest)
    node.path(digest).write_bytes(b"corrupt")
    assert node.commit(b"a" * KIB) == digest
    node.save_all()
    assert node.path(digest).read_bytes() == b"a" * KIB


def test_verify_skips_fresh_copy_unless_forced(folder: Path) -> None:
    node = Node(folder, verify_every_s=60)
    digest = node.commit(b"a" * KIB)
    node.table.view[node.table._chunks[digest].offset] ^= 1
    node.clock.now = 59
    assert node.table.verify(digest)
    node.clock.now = 61
    assert not node.table.verify(digest)
    digest = node.commit(b"b" * KIB)
    node.table.view[node.table._chunks[digest].offset] ^= 1
    assert not node.table.verify(digest, force=True)
    node.disk.close()


def test_concurrent_callers_share_one_verification(node: Node) -> None:
    digest = node.commit(b"a" * KIB)
    chunk = node.table._chunks[digest]
    before = node.table._tiers.verifications
    with chunk.busy:
        callers = [threading.Thread(target=node.table.verify, args=(digest,), daemon=True) for _ in range(8)]
        for caller in callers:
            caller.start()
        while chunk.copy is None or chunk.copy.users < 8:
            threading.Event().wait(0.001)
    for caller in callers:
        caller.join(60)
    assert node.table._tiers.verifications == before + 1


def test_newest_whole_version_is_saved_while_publishes_outpace_the_disk(folder: Path) -> None:
    node = Node(folder, arena=64 * KIB)
    versions = []
    for number in range(8):  # five chunks are published for each two that are saved
        packer = Packer(KIB)
        packer.add("t", "uint8", (4 * KIB,))
        digests = [node.write(1, bytes([number * 10 + i]) * KIB) for i in range(4)]
        digests.append(node.write(1, packer.manifest(digests).encode()))
        node.table.release_holds(1)
        versions.append(digests)
        for _ in range(2):
            node.saver.step(0, max_chunks=1)
    whole = [i for i, digests in enumerate(versions) if all(node.path(d).exists() for d in digests)]
    assert whole == [0, 2, 5], "each one the newest when its first chunk was saved"
    node.save_all()
    assert all(node.path(d).exists() for digests in versions for d in digests), "in the end all are"
    node.disk.close()


def test_manifest_is_recognized_by_its_first_bytes() -> None:
    assert Packer(KIB).manifest([]).encode().startswith(_MANIFEST_PREFIX)


def test_alloc_waits_for_chunks_that_are_being_saved(folder: Path) -> None:
    node = Node(folder, wait_s=30)
    for i in range(4):
        node.commit(bytes([i]) * KIB)
    node.saver.start()
    for i in range(4, 40):
        node.commit(bytes([i]) * KIB)  # nine times the arena, as fast as the disk takes them
    node.saver.stop(10)
    assert [node.read(digest_of(bytes([i]) * KIB)) for i in range(40)] == [bytes([i]) * KIB for i in range(40)]
    node.disk.close()


def test_concurrent_writers_readers_and_drops_see_only_right_bytes(folder: Path) -> None:
    node = Node(folder, arena=16 * KIB, disk=40 * KIB, wait_s=0.5)
    node.saver.start()
    pieces = {digest_of(data): data for data in (bytes([i]) * (KIB + 64 * (i % 5)) for i in range(24))}
    wrong, spilled, ended = list[str](), set[str](), threading.Event()

    def repeat(act: Callable[[random.Random], None], seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not ended.is_set():
                with contextlib.suppress(ChunkMissing, ArenaFull, DiskFull):
                    act(rng)
        except BaseException as e:
            wrong.append(repr(e))
            raise

    def write(rng: random.Random) -> None:
        conn = threading.get_ident()
        data = rng.choice(list(pieces.values()))
        digest = node.write(conn, data)
        assert node.read(digest) == data, "a chunk that is held is there"
        node.table.release_holds(conn)

    def read(rng: random.Random) -> None:
        digest = rng.choice(list(pieces))
        assert node.read(digest) == pieces[digest]
        node.table.verify(digest, force=rng.random() < 0.5)

    def locate(rng: random.Random) -> None:
        conn, digest = threading.get_ident(), rng.choice(list(pieces))
        spilled.update(d for d, c in list(node.table._chunks.items()) if c.offset < 0)
        offset, nbytes = node.table.locate(digest, conn, "t")
        try:
            for _ in range(3):
                assert bytes(node.table.view[offset:offset + nbytes]) == pieces[digest]
                threading.Event().wait(0.002)
        finally:
            node.table.release(conn, "t")

    def drop(rng: random.Random) -> None:
        mark = node.table.mark()
        for digest in rng.sample(list(pieces), 16):
            node.table.use(digest, None)
        node.table.drop(set(), mark)
        threading.Event().wait(0.02)

    threads = [threading.Thread(target=repeat, args=(act, i), daemon=True)
               for i, act in enumerate((write, write, read, read, locate, locate, drop))]
    for thread in threads:
        thread.start()
    threading.Event().wait(1.5)
    ended.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a deadlock"
    node.saver.stop(5)
    assert not wrong
    assert spilled, "nothing was spilled: this test shows nothing"
    assert node.table._tiers._readers == 0 and not any(c.copy.users for c in node.table._chunks.values() if c.copy)
    node.disk.close()
