"""The durable store in a folder: versions with a mark are whole, and corruption is detected."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.durable.store import ORPHAN_AGE_S, CommitMark, DurableStore, PartMark
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, ConfigError, VersionNotFound
from elastic_rl.etcd.records import Version, VersionState


@pytest.fixture
def store(tmp_path: Path) -> DurableStore:
    return DurableStore(f"file://{tmp_path}/kept", "job")


def chunk(seed: int, changed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 1 << 16, 4096, dtype=np.uint16)
    data[:changed] ^= 1
    return data.tobytes()


def version(number: int, stream: str = "policy") -> Version:
    return Version(stream=stream, number=number, state=VersionState.COMMITTED, epoch=1, manifest=f"{number:032x}")


def put(store: DurableStore, data: bytes) -> str:
    digest = digest_of(data)
    store.put_chunk(digest, data)
    return digest


def file_of(store: DurableStore, name: str) -> Path:
    [found] = Path(store.url.removeprefix("file://")).rglob(name)
    return found


def commit(store: DurableStore, number: int, anchor: int, *parts: dict[str, str]) -> None:
    for i, objects in enumerate(parts):
        store.commit_part("policy", number, i, PartMark(objects))
    store.commit(CommitMark(version(number), anchor, len(parts)))


def test_chunk_is_read_as_stored_whole_or_as_delta(store: DurableStore) -> None:
    old, new = chunk(1), chunk(1, changed=20)
    base, digest = put(store, old), digest_of(new)
    payload = delta.encode(memoryview(old), memoryview(new))
    assert payload is not None and len(payload) < len(new) / 10
    store.put_delta(digest, base, payload)
    assert (store.read_chunk(base), store.read_chunk(digest)) == (old, new)


def test_flipped_bit_is_detected_and_fixed_by_the_next_put(store: DurableStore) -> None:
    data = chunk(2)
    digest = put(store, data)
    path = file_of(store, digest)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ChunkCorrupt, match=digest):
        store.read_chunk(digest)
    store.put_chunk(digest, data)
    assert store.read_chunk(digest) == data


def test_delta_without_a_valid_base_is_not_decoded(store: DurableStore) -> None:
    old, new = chunk(3), chunk(3, changed=5)
    base, digest = put(store, old), digest_of(new)
    payload = delta.encode(memoryview(old), memoryview(new))
    assert payload is not None
    store.put_delta(digest, base, payload)
    path = file_of(store, base)
    path.write_bytes(chunk(4))
    with pytest.raises(ChunkCorrupt):
        store.read_chunk(digest)
    path.unlink()
    with pytest.raises((ChunkCorrupt, ChunkMissing)):
        store.read_chunk(digest)


def test_delta_that_does_not_make_its_chunk_is_rejected(store: DurableStore) -> None:
    old, new = chunk(5), chunk(5, changed=5)
    base = put(store, old)
    payload = delta.encode(memoryview(old), memoryview(new))
    assert payload is not None
    with pytest.raises(ChunkCorrupt, match="cannot be made"):
        store.put_delta(digest_of(b"another"), base, payload)


def test_missing_chunk_and_version_raise(store: DurableStore) -> None:
    with pytest.raises(ChunkMissing):
        store.read_chunk("0" * 32)
    with pytest.raises(VersionNotFound):
        store.mark("policy", 1)
    assert store.numbers("policy") == [] and store.streams() == [] and store.sweep() == 0


def test_marks_are_listed_read_and_dropped(store: DurableStore) -> None:
    marks = [CommitMark(version(n, stream), n, 2) for stream, n in (("policy", 3), ("policy", 12), ("x", 1))]
    for mark in marks:
        store.commit(mark)
    assert store.numbers("policy") == [3, 12] and store.streams() == ["policy", "x"]
    assert store.mark("policy", 12) == marks[1]
    store.drop("policy", 3)
    store.drop("policy", 3)
    assert store.numbers("policy") == [12]


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"schema": 1}', b'{"schema": 2, "version": 3}', b"[1]"])
@pytest.mark.parametrize("name", ["000000000001.json", "000000.json"])
def test_corrupt_mark_is_detected_and_stops_the_sweep(store: DurableStore, name: str, raw: bytes) -> None:
    digest = put(store, chunk(6))
    commit(store, 1, 1, {digest: ""})
    file_of(store, name).write_bytes(raw)
    with pytest.raises(ChunkCorrupt):
        store.mark("policy", 1)
        store.part("policy", 1, 0)
    with pytest.raises(ChunkCorrupt):
        store.sweep(older_than_s=-1)
    assert store.read_chunk(digest) == chunk(6)


def test_sweep_removes_old_objects_that_no_committed_version_needs(store: DurableStore) -> None:
    kept, orphan, base = put(store, chunk(7)), put(store, chunk(8)), put(store, chunk(9))
    changed = chunk(9, changed=3)
    payload = delta.encode(memoryview(chunk(9)), memoryview(changed))
    assert payload is not None
    store.put_delta(digest_of(changed), base, payload)
    commit(store, 2, 1, {kept: ""}, {digest_of(changed): base})
    store.commit_part("policy", 3, 0, PartMark({orphan: ""}))  # of a copy that was never completed
    assert store.sweep() == 0 and store.read_chunk(orphan) == chunk(8)
    assert store.sweep(older_than_s=-1) == 1
    with pytest.raises(ChunkMissing):
        store.read_chunk(orphan)
    with pytest.raises(ChunkMissing):
        store.part("policy", 3, 0)
    assert store.read_chunk(digest_of(changed)) == changed, "the base of a delta that is needed was removed"
    assert store.read_chunk(kept) == chunk(7)


def test_partial_file_of_a_dead_writer_is_never_read_and_is_swept(store: DurableStore) -> None:
    digest = put(store, chunk(10))
    path = file_of(store, digest)
    partial = path.with_name(f"{path.name}.0123.partial")
    path.rename(partial)
    with pytest.raises(ChunkMissing):
        store.read_chunk(digest)
    os.truncate(partial, 10)
    store.put_chunk(digest, chunk(10))
    assert store.read_chunk(digest) == chunk(10)
    assert store.sweep() == 0 and partial.exists()
    commit(store, 1, 1, {digest: ""})
    assert store.sweep(older_than_s=-1) == 1 and not partial.exists()
    assert store.read_chunk(digest) == chunk(10)


def test_unknown_url_scheme_is_a_config_error_without_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        DurableStore("nosuch://user:secret@host/path", "job")
    assert "secret" not in str(caught.value) and "durable_url" in str(caught.value)


def test_marks_are_read_as_written_with_their_schema() -> None:
    mark, part = CommitMark(version(7), 5, 3), PartMark({"a" * 32: "", "b" * 32: "c" * 32})
    assert CommitMark.decode(mark.encode()) == mark and PartMark.decode(part.encode()) == part
    assert json.loads(mark.encode())["schema"] == json.loads(part.encode())["schema"] == 2


def set_age(store: DurableStore, digest: str, age_s: float) -> None:
    at = time.time() - age_s
    os.utime(file_of(store, digest), (at, at))


def test_sweep_keeps_old_chunk_that_another_node_needs_again_meanwhile(
        store: DurableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    data, other = chunk(20), DurableStore(store.url, "job")
    digest = put(store, data)
    set_age(store, digest, 2 * ORPHAN_AGE_S)
    listing, uploaded = store._fs.glob, []

    def slow_listing(pattern: str) -> list[str]:
        found = listing(pattern)
        if "/chunks/" in pattern and not uploaded:
            assert [p for p in found if p.endswith(digest)]
            uploaded.append(put(other, data))
            commit(other, 5, 1, {digest: ""})
        return found

    monkeypatch.setattr(store._fs, "glob", slow_listing)
    assert store.sweep() == 0 and uploaded == [digest]
    assert other.read_chunk(digest) == data


def test_sweep_ends_when_its_node_no_longer_leads(store: DurableStore) -> None:
    for seed in (21, 22, 23):
        set_age(store, put(store, chunk(seed)), 2 * ORPHAN_AGE_S)
    answers = iter([True, False])
    assert store.sweep(still_leads=lambda: next(answers)) == 1
    assert store.sweep() == 2


def test_errors_hold_no_password(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        DurableStore("nosuch://key:secret@bucket/path", "job")
    assert "secret" not in str(e.value) and "bucket" in str(e.value)
    assert "secret" not in DurableStore("memory://key:secret@bucket/path", "job").url
