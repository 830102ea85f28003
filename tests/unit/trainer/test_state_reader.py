"""A rank reads the tensors of a state that it has a part of, in bounded buckets, and no chunk that it does not need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.fetch import mapping
from elastic_rl.dcs.fetch.mapping import load_tensors
from elastic_rl.dcs.fetch.version_map import VersionMap, encode
from elastic_rl.dcs.manifest import Manifest, Slice, TensorEntry
from elastic_rl.errors import ChunkCorrupt
from elastic_rl.trainer.checkpoint.state_reader import selected

COUNT, NBYTES = 8, 4096


def content(i: int) -> bytes:
    return bytes([i + 1]) * NBYTES


@pytest.fixture
def reference(tmp_path: Path) -> dict[str, Any]:
    """Tensors t0, t1, …, each in a chunk of its own; the chunk of t6 is corrupt."""
    digests = [digest_of(content(i)) for i in range(COUNT)]
    tensors = tuple(TensorEntry(f"t{i}", "uint8", (NBYTES,), (Slice(d, 0, NBYTES),)) for i, d in enumerate(digests))
    blob = encode(Manifest(tensors, dict.fromkeys(digests, NBYTES)))
    table = VersionMap(memoryview(blob))
    for i in range(COUNT):
        table.place(i, i * NBYTES)
    data = bytearray(b"".join(content(i) for i in range(COUNT)))
    data[6 * NBYTES] ^= 1
    (tmp_path / "arena").write_bytes(data + blob)
    return {"format": mapping.FORMAT, "path": str(tmp_path / "arena"), "stream": "s", "version": 1,
            "map": [COUNT * NBYTES, len(blob), table.digest()], "tensors": [[0, 3], [4, COUNT]]}


def test_selected_tensors_come_in_buckets_and_others_are_not_touched(reference: dict[str, Any]) -> None:
    asked: list[str] = []

    def select(name: str) -> bool:
        asked.append(name)
        return name in ("t0", "t1", "t3", "t5", "t7")

    buckets = list(selected(reference, select, 2 * NBYTES))
    assert asked == ["t0", "t1", "t2", "t4", "t5", "t6", "t7"], "t3 is not in this part of the version"
    assert [bucket["tensors"] for bucket in buckets] == [[[0, 2]], [[5, 6], [7, 8]]]
    found = {name: tensor.clone() for bucket in buckets for name, tensor in load_tensors(bucket)}
    assert all(torch.equal(tensor, torch.frombuffer(bytearray(content(int(name[1:]))), dtype=torch.uint8))
               for name, tensor in found.items())
    assert list(found) == ["t0", "t1", "t5", "t7"]


def test_corrupt_chunk_is_found_before_its_bucket_is_used(reference: dict[str, Any]) -> None:
    [bucket] = selected(reference, lambda name: name in ("t5", "t6"), 2 * NBYTES)
    used: list[str] = []
    with pytest.raises(ChunkCorrupt):
        used.extend(name for name, _ in load_tensors(bucket))
    assert used == []


def resident(path: str) -> int:
    """KiB of the mappings of a file that are in this process's resident memory."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            counted = line.endswith(path)
        elif counted and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_pages_that_were_read_leave_the_resident_memory(reference: dict[str, Any]) -> None:
    for bucket in selected(reference, lambda name: name < "t6", NBYTES):
        kept = list(load_tensors({**bucket, "once": False}))
        before = resident(reference["path"])
        list(load_tensors(bucket))
        assert resident(reference["path"]) < before
        assert all(bytes(tensor.numpy()) == content(int(name[1:])) for name, tensor in kept), "a view became invalid"
