"""The order in which chunks are saved to disk: whole versions, the newest first."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.storage.chunk import Chunk, Copy
from elastic_rl.dcs.storage.save_queue import SaveQueue
from elastic_rl.errors import DiskFull

POLICY, STATE = "policy", "trainer_state"


@dataclass
class Simulation:
    """A queue, versions that are published, and a disk that saves one batch a step."""

    now: float = 0.0
    chunks: dict[str, Chunk] = field(default_factory=dict)
    versions: dict[str, list[str]] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.queue = SaveQueue(self.chunks, self.lock, threading.Condition(self.lock), lambda: self.now, enabled=True)

    def schedule(self, chunk: Chunk, *, is_manifest: bool = False) -> None:
        with self.lock:
            self.queue.schedule(chunk, is_manifest=is_manifest)

    def forget(self, digest: str) -> None:
        with self.lock:
            self.queue.forget(self.chunks.pop(digest))

    def release(self, chunk: Chunk) -> None:
        chunk.holders.clear()
        self.schedule(chunk)

    def seal(self, *digests: str, holder: int | None = None, keep_until: float = 0.0) -> None:
        for digest in digests:
            chunk = self.chunks.setdefault(digest, Chunk(digest, 1, Copy(0, 0.0, 1)))
            chunk.keep_until = keep_until
            if holder is not None:
                chunk.holders.add(holder)
            self.schedule(chunk, is_manifest=digest.startswith("m"))

    def publish(self, stream: str, number: int, chunks: list[str]) -> str:
        """Seals the chunks and the manifest of a version; returns the manifest."""
        manifest = f"m-{stream}-{number}"
        self.versions[manifest] = [*chunks, manifest]
        self.seal(manifest, *chunks)
        return manifest

    def batch(self, most: int = 1, nbytes: int = 1 << 30) -> list[str]:
        """Saves one batch, as the saver does."""
        self.removed += self.queue.take_removals()
        for manifest in self.queue.take_manifests():
            if manifest in self.versions:
                layout = manifest.rpartition("-")[0]
                self.queue.add_version(manifest, frozenset(self.versions[manifest]), layout)
        batch = self.queue.wait_batch(0.0, max_chunks=most, max_bytes=nbytes)
        self.queue.finished(batch)
        self.saved += batch
        return batch

    def drain(self) -> list[str]:
        while self.batch():
            pass
        return self.saved

    def drop(self, manifest: str) -> None:
        for digest in self.versions[manifest]:
            if digest in self.chunks and not any(digest in v for m, v in self.versions.items() if m != manifest):
                self.forget(digest)
        del self.versions[manifest]

    def whole(self) -> list[str]:
        """Versions whose every chunk is on disk."""
        return [m for m, chunks in self.versions.items() if all(self.chunks[d].on_disk for d in chunks)]


def names(stream: str, number: int, count: int = 4) -> list[str]:
    return [f"{stream}{number}.{i}" for i in range(count)]


def test_newest_version_is_saved_first_and_its_manifest_last() -> None:
    sim = Simulation()
    for number in (1, 2, 3):
        sim.publish(POLICY, number, names("p", number))
    assert sim.drain() == [*names("p", 3), "m-policy-3", *names("p", 2), "m-policy-2", *names("p", 1), "m-policy-1"]


def test_version_that_was_begun_is_completed_before_a_newer_one() -> None:
    sim = Simulation()
    sim.publish(POLICY, 1, names("p", 1))
    sim.batch()
    sim.publish(POLICY, 2, names("p", 2))
    assert sim.drain()[:5] == [*names("p", 1), "m-policy-1"]


def test_versions_published_faster_than_the_disk_leave_whole_versions_on_it() -> None:
    sim = Simulation()
    for number in range(1, 40):  # twelve chunks published for each seven that are saved
        manifest = sim.publish(POLICY, number, names("p", number, 11))
        for _ in range(7):
            sim.batch()
        if number > 4:
            sim.drop(f"m-policy-{number - 4}")
        if number > 8:
            assert sim.whole(), "there is no whole version on disk"
    assert manifest == "m-policy-39" and int(sim.whole()[-1].rpartition("-")[2]) >= 36


def test_streams_take_turns_when_one_is_published_faster_than_the_disk() -> None:
    sim = Simulation()
    sim.publish(STATE, 1, names("s", 1))
    for number in range(1, 20):
        sim.publish(POLICY, number, names("p", number))
        for _ in range(4):
            sim.batch()
    assert "m-trainer_state-1" in sim.whole()


def test_chunk_shared_with_an_older_version_is_saved_with_the_newer_one() -> None:
    sim = Simulation()
    sim.publish(POLICY, 1, ["shared", "old"])
    sim.publish(POLICY, 2, ["new", "shared"])
    for _ in range(3):
        sim.batch()
    assert sim.whole() == ["m-policy-2"]


def test_held_chunk_waits_for_its_holder() -> None:
    sim = Simulation()
    sim.seal("a", "b", holder=7)
    assert sim.drain() == []
    sim.release(sim.chunks["a"])
    assert sim.drain() == ["a"]
    sim.release(sim.chunks["b"])
    assert sim.drain() == ["a", "b"]


def test_orphan_waits_for_its_grace_and_holds_up_no_other_chunk() -> None:
    sim = Simulation()
    sim.seal("orphan", keep_until=10.0)
    sim.seal("other")
    assert sim.drain() == ["other"]
    sim.now = 10.0
    assert sim.drain() == ["other", "orphan"]


def test_batch_has_chunks_of_one_version_and_keeps_to_its_limits() -> None:
    sim = Simulation()
    sim.publish(POLICY, 1, names("p", 1))
    sim.publish(POLICY, 2, names("p", 2))
    assert sim.batch(most=3) == names("p", 2)[:3]
    assert sim.batch(most=100, nbytes=1) == names("p", 2)[3:]
    assert sim.batch(most=100) == ["m-policy-2"]
    assert sim.batch(most=100) == names("p", 1)


def test_failed_batch_is_tried_again_after_a_pause_that_a_removal_ends() -> None:
    sim = Simulation()
    sim.seal("a", "b")
    assert sim.queue.wait_batch(0.0, max_chunks=2, max_bytes=9) == ["a", "b"]
    sim.queue.finished(["a"], DiskFull("full"))
    assert isinstance(sim.queue.trouble, DiskFull) and sim.batch() == [] 
    sim.forget("a")
    assert sim.batch() == ["b"] and sim.removed == ["a"] and sim.queue.trouble is None


@given(st.lists(st.tuples(st.sampled_from(["publish", "save", "hold", "release", "drop", "wait"]), st.integers(0, 5)),
                max_size=60))
def test_every_chunk_is_saved_once_after_any_sequence_of_events(steps: list[tuple[str, int]]) -> None:
    sim = Simulation()
    number = 0
    for what, pick in steps:
        match what:
            case "publish":
                number += 1
                sim.publish((POLICY, STATE)[pick % 2], number, [f"c{number % 3}", *names("p", number, pick)])
            case "save":
                batch = sim.batch(most=pick + 1)
                assert len(batch) == len(set(batch)) and all(sim.chunks[d].on_disk for d in batch)
                assert not any(sim.chunks[d].holders for d in batch)
            case "hold" if sim.chunks:
                list(sim.chunks.values())[pick % len(sim.chunks)].holders.add(1)
            case "release":
                for chunk in sim.chunks.values():
                    if chunk.holders:
                        sim.release(chunk)
            case "drop" if sim.versions:
                sim.drop(list(sim.versions)[pick % len(sim.versions)])
            case "wait":
                sim.now += 1
        assert sim.queue.nbytes == len(sim.queue) == sum(not c.on_disk for c in sim.chunks.values())
    for chunk in sim.chunks.values():
        sim.release(chunk)
    sim.drain()
    assert all(c.on_disk for c in sim.chunks.values()) and not len(sim.queue)
