"""Tensors to chunks and back, over every dtype, shape and layout."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.codecs.tensors import checksum, dtype_name, from_bytes, to_bytes
from elastic_rl.dcs.manifest import ALIGN, DTYPES, Manifest, Packer, SliceCopy, TensorEntry
from elastic_rl.errors import ChunkCorrupt, ConfigError

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bit pattern of any dtype; plain, transposed, strided or sliced."""
    dtype, shape = getattr(torch, draw(dtypes)), draw(shapes)
    n = torch.Size(shape).numel()
    raw = torch.tensor(list(draw(st.binary(min_size=n * dtype.itemsize, max_size=n * dtype.itemsize))),
                       dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    plain = raw.view(dtype).view(shape)
    layout = draw(st.sampled_from(["plain", "transposed", "sliced"]))
    if layout == "transposed" and plain.dim() == 2:
        return plain.t()
    if layout == "sliced" and plain.dim() and plain.shape[0] > 1:
        return plain[1:]
    return plain


def pack(named: dict[str, torch.Tensor], chunk_bytes: int) -> tuple[Manifest, dict[str, bytes]]:
    """What a publisher does, in memory."""
    packer, buffers = Packer(chunk_bytes), list[bytearray]()
    for name, t in named.items():
        data = bytes(to_bytes(t).numpy())
        for p in packer.add(name, dtype_name(t.dtype), tuple(t.shape)):
            while len(buffers) <= p.chunk:
                buffers.append(bytearray())
            assert len(buffers[p.chunk]) <= p.offset and p.offset % ALIGN == 0
            buffers[p.chunk].extend(bytes(p.offset - len(buffers[p.chunk])) + data[p.source:p.source + p.nbytes])
    assert [len(b) for b in buffers] == packer.sizes
    assert all(0 < n <= max(chunk_bytes, ALIGN) for n in packer.sizes)
    chunks = {digest_of(bytes(b)): bytes(b) for b in buffers}
    return packer.manifest([digest_of(bytes(b)) for b in buffers]), chunks


def unpack(entry: TensorEntry, chunks: dict[str, bytes]) -> torch.Tensor:
    data = b"".join(chunks[s.digest][s.offset:s.offset + s.nbytes] for s in entry.slices)
    return from_bytes(torch.tensor(list(data), dtype=torch.uint8), entry.dtype, entry.shape)


@settings(max_examples=seeds(40), deadline=None)
@given(st.lists(tensors(), max_size=6), st.integers(ALIGN, 1024))
def test_tensors_round_trip_bit_for_bit(values: list[torch.Tensor], chunk_bytes: int) -> None:
    named = {f"t{i}": t for i, t in enumerate(values)}
    manifest, chunks = pack(named, chunk_bytes)
    again = Manifest.decode(manifest.encode())
    assert again == manifest and again.encode() == manifest.encode()
    assert [e.name for e in again.tensors] == list(named)
    assert again.nbytes == sum(t.numel() * t.element_size() for t in values)
    for entry in again.tensors:
        back, expected = unpack(entry, chunks), named[entry.name]
        assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
        assert bytes(to_bytes(back).numpy()) == bytes(to_bytes(expected).numpy())
        assert checksum(back) == checksum(expected)
        if entry.nbytes <= chunk_bytes - chunk_bytes % ALIGN:
            assert len(entry.slices) <= 1, "a tensor that fits in a chunk was cut"


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_dtypes_are_known_with_their_sizes(name: str) -> None:
    assert getattr(torch, name).itemsize == DTYPES[name]
    scalar = torch.zeros(DTYPES[name], dtype=torch.uint8).view(getattr(torch, name)).reshape(())
    assert to_bytes(scalar).shape == (DTYPES[name],)
    assert from_bytes(to_bytes(scalar), name, ()).shape == ()


def test_lazy_conjugate_is_stored_resolved() -> None:
    t = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(from_bytes(to_bytes(t.conj()), "complex64", (2,)), torch.tensor([1 - 2j, 3 + 4j]))


def test_contiguous_tensor_is_not_copied() -> None:
    t = torch.ones(10)
    assert to_bytes(t).data_ptr() == t.data_ptr()


def test_equal_tensors_make_equal_chunks_and_manifests() -> None:
    named = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.arange(100)}
    one, two = pack(named, 512), pack({k: v.clone() for k, v in named.items()}, 512)
    assert one[0].encode() == two[0].encode() and one[1] == two[1]


def test_packer_splits_tensor_larger_than_a_chunk() -> None:
    packer = Packer(2 * ALIGN)
    packer.add("small", "uint8", (1,))
    assert packer.add("large", "uint8", (5 * ALIGN,)) == [
        SliceCopy(1, 0, 0, 2 * ALIGN), SliceCopy(2, 0, 2 * ALIGN, 2 * ALIGN), SliceCopy(3, 0, 4 * ALIGN, ALIGN)]
    assert packer.add("next", "uint8", (1,)) == [SliceCopy(3, ALIGN, 0, 1)]


def test_packer_rejects_duplicate_name_and_unknown_dtype() -> None:
    packer = Packer(1024)
    packer.add("a", "float32", (1,))
    with pytest.raises(ValueError, match="named 'a'"):
        packer.add("a", "float32", (1,))
    with pytest.raises(ValueError, match="qint8"):
        packer.add("b", "qint8", (1,))
    with pytest.raises(ConfigError):
        Packer(ALIGN - 1)


@pytest.mark.parametrize("change", [
    {"schema": 99}, {"chunks": []}, {"tensors": [["a", "float32", [9], [[0, 0, 4]]]]},
    {"tensors": [["a", "float32", [1], [[0, 100000, 4]]]]}, {"tensors": [["a", "float31", [1], [[0, 0, 4]]]]},
    {"tensors": [["a", "float32", [-1], []]]}, {"tensors": [["a", "float32", [1], [[0, 0, 4]]]] * 2},
    {"tensors": [["a", "float32", [1], [[-1, 0, 4]]]]}, {"tensors": 3}])
def test_inconsistent_manifest_is_rejected(change: dict[str, object]) -> None:
    value = json.loads(pack({"a": torch.ones(1)}, 1024)[0].encode())
    with pytest.raises(ChunkCorrupt):
        Manifest.decode(json.dumps({**value, **change}).encode())


@given(st.binary(max_size=50))
def test_noise_is_not_decoded_as_manifest(raw: bytes) -> None:
    with pytest.raises(ChunkCorrupt):
        Manifest.decode(raw)
