"""The durable store in a folder: what has a mark is whole, and what is broken is told."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.durable.store import DurableStore, Mark
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


def test_a_chunk_is_read_as_it_was_put_whole_or_as_a_delta(store: DurableStore) -> None:
    old, new = chunk(1), chunk(1, changed=20)
    base, digest = put(store, old), digest_of(new)
    payload = delta.encode(memoryview(old), memoryview(new))
    assert payload is not None and len(payload) < len(new) / 10
    store.put_delta(digest, base, payload)
    assert (store.read_chunk(base), store.read_chunk(digest)) == (old, new)
    assert store.has_chunk(base) and not store.has_chunk(digest)


def test_a_flipped_bit_in_the_store_is_told_and_mended_by_the_next_put(store: DurableStore) -> None:
    data = chunk(2)
    digest = put(store, data)
    path = file_of(store, digest)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(ChunkCorrupt, match=digest):
        store.read_chunk(digest)
    store.put_chunk(digest, data)
    assert store.read_chunk(digest) == data


def test_a_delta_whose_base_is_gone_or_broken_gives_no_bytes(store: DurableStore) -> None:
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


def test_a_delta_that_does_not_make_its_chunk_is_refused(store: DurableStore) -> None:
    old, new = chunk(5), chunk(5, changed=5)
    base = put(store, old)
    payload = delta.encode(memoryview(old), memoryview(new))
    assert payload is not None
    with pytest.raises(ChunkCorrupt, match="cannot be made"):
        store.put_delta(digest_of(b"another"), base, payload)


def test_what_was_never_put_is_missing(store: DurableStore) -> None:
    with pytest.raises(ChunkMissing):
        store.read_chunk("0" * 32)
    with pytest.raises(VersionNotFound):
        store.mark("policy", 1)
    assert store.numbers("policy") == [] and store.streams() == [] and store.sweep() == 0


def test_marks_are_listed_read_back_and_dropped(store: DurableStore) -> None:
    marks = [Mark(version(n, stream), n, {f"{n:032x}": ""}) for stream, n in (("policy", 3), ("policy", 12), ("x", 1))]
    for mark in marks:
        store.commit(mark)
    assert store.numbers("policy") == [3, 12] and store.streams() == ["policy", "x"]
    assert store.mark("policy", 12) == marks[1]
    store.drop("policy", 3)
    store.drop("policy", 3)
    assert store.numbers("policy") == [12]


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"schema": 2}', b'{"schema": 1, "version": 3}', b"[1]"])
def test_a_mark_that_cannot_be_read_is_corrupt_and_nothing_is_swept(store: DurableStore, raw: bytes) -> None:
    digest = put(store, chunk(6))
    store.commit(Mark(version(1), 1, {digest: ""}))
    file_of(store, "000000000001.json").write_bytes(raw)
    with pytest.raises(ChunkCorrupt):
        store.mark("policy", 1)
    with pytest.raises(ChunkCorrupt):
        store.sweep(older_than_s=-1)
    assert store.has_chunk(digest)


def test_a_sweep_removes_what_no_mark_refers_to_once_it_is_old(store: DurableStore) -> None:
    kept, orphan, base = put(store, chunk(7)), put(store, chunk(8)), put(store, chunk(9))
    changed = chunk(9, changed=3)
    payload = delta.encode(memoryview(chunk(9)), memoryview(changed))
    assert payload is not None
    store.put_delta(digest_of(changed), base, payload)
    store.commit(Mark(version(1), 1, {kept: "", base: ""}))
    store.commit(Mark(version(2), 1, {digest_of(changed): base}))
    assert store.sweep() == 0 and store.has_chunk(orphan)
    assert store.sweep(older_than_s=-1) == 1 and not store.has_chunk(orphan)
    assert store.read_chunk(digest_of(changed)) == changed and store.read_chunk(kept) == chunk(7)


def test_half_a_file_of_a_dead_writer_is_never_taken_for_a_chunk(store: DurableStore) -> None:
    digest = put(store, chunk(10))
    path = file_of(store, digest)
    path.rename(f"{path}.partial")
    with pytest.raises(ChunkMissing):
        store.read_chunk(digest)
    os.truncate(f"{path}.partial", 10)
    store.put_chunk(digest, chunk(10))
    assert store.read_chunk(digest) == chunk(10)


def test_a_url_that_nobody_speaks_is_a_config_error_without_its_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        DurableStore("nosuch://user:secret@host/path", "job")
    assert "secret" not in str(caught.value) and "durable_url" in str(caught.value)


def test_a_mark_survives_its_encoding() -> None:
    mark = Mark(version(7), 5, {"a" * 32: "", "b" * 32: "c" * 32})
    assert Mark.decode(mark.encode()) == mark
    assert json.loads(mark.encode())["schema"] == 1
