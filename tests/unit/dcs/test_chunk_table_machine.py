"""The table of chunks with a disk under any order of events."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.allocator import regions
from support.budget import seeds
from support.tiered_table import Node

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.manifest import ALIGN, Packer, aligned
from elastic_rl.errors import (
    ArenaFull,
    ChunkMissing,
    DiskFull,
)

CONNS = st.integers(1, 3)
TOKENS = st.sampled_from("pq")
ITEMS = st.integers(0, 9)


def content(item: int) -> bytes:
    return bytes([item + 1]) * ((1 + item % 4) * ALIGN - item)


class TieredTable(RuleBasedStateMachine):
    """After any sequence of events: what was sealed and not dropped is read back, what was located does not move, and
    no region is lost or allocated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.node = self.open()
        self.live: set[int] = set()
        self.held: set[tuple[int, int]] = set()
        self.located: dict[tuple[int, str], dict[int, int]] = {}

    def open(self) -> Node:
        return Node(self.folder / "n", arena=8 * ALIGN, disk=12 * ALIGN)

    @rule(conn=CONNS, item=ITEMS)
    def seal(self, conn: int, item: int) -> None:
        try:
            self.node.write(conn, content(item))
        except (ArenaFull, DiskFull):
            return
        self.live.add(item)
        self.held.add((conn, item))

    @rule(conn=CONNS)
    def release_holds(self, conn: int) -> None:
        self.node.table.release_holds(conn)
        self.held = {h for h in self.held if h[0] != conn}

    @rule(conn=CONNS)
    def close(self, conn: int) -> None:
        self.node.table.close(conn)
        self.held = {h for h in self.held if h[0] != conn}
        self.located = {k: v for k, v in self.located.items() if k[0] != conn}

    @rule()
    def save(self) -> None:
        self.node.saver.step(0)

    @rule(conn=CONNS, token=TOKENS, item=ITEMS)
    def locate(self, conn: int, token: str, item: int) -> None:
        try:
            offset, nbytes = self.node.table.locate(digest_of(content(item)), conn, token)
        except ChunkMissing:
            assert item not in self.live
        except (ArenaFull, DiskFull):
            pass
        else:
            assert item in self.live and nbytes == len(content(item))
            self.located.setdefault((conn, token), {})[offset] = item

    @rule(conn=CONNS, token=TOKENS)
    def release(self, conn: int, token: str) -> None:
        self.node.table.release(conn, token)
        self.located.pop((conn, token), None)

    @rule(item=ITEMS)
    def read(self, item: int) -> None:
        if item in self.live:
            assert self.node.read(digest_of(content(item))) == content(item)
            assert self.node.table.verify(digest_of(content(item)))
        else:
            assert not self.node.table.verify(digest_of(content(item)))

    @rule(used=st.sets(ITEMS))
    def drop(self, used: set[int]) -> None:
        mark = self.node.table.mark()
        for item in used:
            self.node.table.use(digest_of(content(item)), None)
        self.node.table.drop(set(), mark)
        self.live &= used | {item for _, item in self.held}

    @precondition(lambda self: not self.located)
    @rule(item=ITEMS)
    def corrupt(self, item: int) -> None:
        chunk = self.node.table._chunks.get(digest_of(content(item)))
        if chunk is None or chunk.copy is None:
            return
        self.node.table.view[chunk.offset] ^= 1
        assert self.node.table.verify(chunk.digest) == chunk.on_disk
        if not self.node.table.has(chunk.digest):
            self.live.discard(item)
            self.held = {h for h in self.held if h[1] != item}

    @rule()
    def restart(self) -> None:
        saved = {c.digest for c in self.node.table._chunks.values() if c.on_disk}
        self.node.disk.close()
        self.node = self.open()
        assert saved <= set(self.node.table._chunks)
        self.live = {i for i in range(10) if self.node.table.has(digest_of(content(i)))}
        self.held, self.located = set(), {}

    @invariant()
    def located_bytes_do_not_move(self) -> None:
        view = self.node.table.view
        for items in self.located.values():
            for offset, item in items.items():
                assert bytes(view[offset:offset + len(content(item))]) == content(item)

    @invariant()
    def arena_holds_copies_and_nothing_else(self) -> None:
        table = self.node.table
        expected = {c.offset: aligned(c.nbytes) for c in table._chunks.values() if c.copy}
        for items in self.located.values():
            expected |= {offset: aligned(len(content(item))) for offset, item in items.items()}
        assert dict(regions(table._tiers.space)[0]) == expected
        assert {c.digest for c in table._chunks.values() if c.copy} == set(table._tiers._resident)

    @invariant()
    def every_chunk_is_in_the_arena_or_on_disk(self) -> None:
        table = self.node.table
        assert set(table._chunks) == {digest_of(content(i)) for i in self.live}
        for chunk in table._chunks.values():
            assert chunk.copy or chunk.on_disk
            assert not chunk.on_disk or self.node.path(chunk.digest).read_bytes() in map(content, range(10))
        assert self.node.disk.used_bytes <= 12 * ALIGN

    def teardown(self) -> None:
        for item in self.live:
            assert self.node.read(digest_of(content(item))) == content(item)
        self.node.disk.close()
        shutil.rmtree(self.folder)


TestTieredTable = TieredTable.TestCase
TestTieredTable.settings = settings(max_examples=seeds(40), stateful_step_count=40, deadline=None)


class LostManifests:
    """Chunks rot, those of manifests among them. No drop takes a sound chunk of a live version, whether or not its
    manifest is here, and nothing of what came after the last loss stays that no live version has."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.node = self.open()
        self.manifests: dict[str, dict[str, bytes]] = {}
        """What each live version consists of by digest, its manifest first, by the manifest's."""
        self.owed: dict[str, set[str]] = {}
        """Digests that came here for a live version and have not rotted, by its manifest's."""
        self.garbage: set[str] = set()
        """Digests that came after the last loss, and that may be of no live version."""
        self.marked: tuple[int, set[str]] | None = None
        """A mark of this process, and the live manifests of that time."""
        self.number, self.rotten = 0, False
        """Number of versions; whether a file has rotted, which may not have been noticed."""

    def open(self) -> Node:
        return Node(self.folder, arena=256 * ALIGN)

    def publish(self) -> None:
        items = self.rng.sample(range(5), self.rng.randint(1, 3))
        packer, self.number, before = Packer(ALIGN), self.number + 1, set(self.node.table._chunks)
        for item in items:
            packer.add(f"t{item}-{self.number}", "uint8", (ALIGN,))
        chunks = {self.node.write(1, data): data for data in (bytes([item]) * ALIGN for item in items)}
        encoded = packer.manifest([*chunks]).encode()
        manifest = self.node.commit(encoded)
        self.manifests[manifest], self.owed[manifest] = {manifest: encoded, **chunks}, {manifest, *chunks}
        self.garbage |= self.owed[manifest] - before

    def release(self) -> None:
        manifest = self.rng.choice([*self.manifests])
        del self.manifests[manifest], self.owed[manifest]

    def fetch(self) -> None:
        """Another node has what is lacking of a version, or its manifest alone."""
        manifest = self.rng.choice([*self.manifests])
        for digest, data in [*self.manifests[manifest].items()][:self.rng.choice([1, 9])]:
            if self.node.table.use(digest, None) is None or not self.node.table.verify(digest):
                assert self.node.commit(data) == digest
            self.owed[manifest].add(digest)
        self.garbage = set()

    def rot(self) -> None:
        """Most often a manifest rots; one that was read before is known without its bytes."""
        chunks = self.node.table._chunks
        manifests = [d for d in self.manifests if d in chunks] if self.rng.random() < 0.8 else []
        chunk = chunks[self.rng.choice(manifests or [*chunks])]
        if chunk.copy is None:
            self.node.path(chunk.digest).write_bytes(b"rotten")
            self.rotten = True
        else:
            self.node.table.view[chunk.offset] ^= 1
            if self.node.table.verify(chunk.digest, force=True):
                return  # from disk
        for owed in self.owed.values():
            owed.discard(chunk.digest)
        self.garbage = set()

    def restart(self) -> None:
        if self.rng.random() < 0.5:
            self.node.save_all()
        saved = {c.digest for c in self.node.table._chunks.values() if c.on_disk}
        self.node.disk.close()
        self.node, self.garbage, self.marked = self.open(), set(), None
        for owed in self.owed.values():
            owed &= saved

    def drop(self) -> None:
        table, live, missed = self.node.table, set(self.manifests), set(self.node.table._missed)
        table.drop(live, table.mark())
        has = set(table._chunks)
        for owed in self.owed.values():
            assert owed <= has
        needed = live.union(*(table._parsed.get(manifest) or self.owed[manifest] for manifest in live))
        if not self.rotten and set(table._missed) <= missed:  # what came before one is missed is kept for it
            assert not (self.garbage & has) - needed
        if not table.manifests_to_fetch(live):
            assert has <= needed
        self.garbage, self.rotten = set(), False

    def mark(self) -> None:
        self.marked = self.node.table.mark(), set(self.manifests)

    def drop_late(self) -> None:
        """A garbage collector that read the catalog a while ago."""
        assert self.marked is not None
        mark, live = self.marked
        self.node.table.drop(live, mark)
        for owed in self.owed.values():
            assert owed <= set(self.node.table._chunks)
        self.garbage = set()

    def step(self) -> None:
        steps = [self.publish, self.mark, self.drop, self.drop, *([self.restart] if self.rng.random() < 0.3 else []),
                 *([self.drop_late] if self.marked is not None else []),
                 *([self.release, self.fetch] if self.manifests else []),
                 *([self.rot] if self.node.table._chunks else [])]
        self.rng.choice(steps)()


@settings(max_examples=seeds(40))
@given(seed=st.integers(0, 1 << 32))
def test_lost_manifests_under_any_order_of_events(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        machine = LostManifests(Path(folder), random.Random(seed))
        try:
            for _ in range(60):
                machine.step()
        finally:
            machine.node.disk.close()
