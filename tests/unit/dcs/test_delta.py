"""The delta codec: whatever goes in comes out, and whatever is broken is told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.manifest import Packer
from elastic_rl.errors import ChunkCorrupt

ANY = 1000.0
"""No limit: the header alone is many times the shortest chunk."""
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def changes(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """(base, new, itemsize): some elements of random bytes changed, few or many, in runs or alone."""
    itemsize = draw(ITEMSIZES)
    elements = draw(st.integers(1, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, elements * itemsize, dtype=np.uint8)
    new = base.copy()
    for _ in range(draw(st.integers(0, 40))):
        start = draw(st.integers(0, elements - 1)) * itemsize
        length = draw(st.sampled_from([1, itemsize, 5 * itemsize]))
        new[start:start + length] = rng.integers(0, 256, len(new[start:start + length]), dtype=np.uint8)
    return base.tobytes(), new.tobytes(), itemsize


def applied(encoded: bytes, base: bytes) -> bytes:
    out = bytearray(len(base))
    delta.decode(encoded, memoryview(base), memoryview(out))
    return bytes(out)


@given(changes())
def test_what_was_encoded_is_decoded_and_decoding_its_result_changes_nothing(case) -> None:
    base, new, itemsize = case
    encoded = delta.encode(memoryview(base), memoryview(new), itemsize, max_ratio=ANY)
    assert encoded is not None
    assert applied(encoded, base) == new
    assert applied(encoded, new) == new


@given(changes(), st.floats(0.01, 1.0))
def test_a_delta_is_never_larger_than_was_asked_for(case, ratio: float) -> None:
    base, new, itemsize = case
    encoded = delta.encode(memoryview(base), memoryview(new), itemsize, max_ratio=ratio)
    assert encoded is None or len(encoded) <= ratio * len(new)


@given(changes(), st.data())
def test_a_broken_delta_is_told_or_gives_bytes_that_the_digest_will_judge(case, data) -> None:
    base, new, itemsize = case
    encoded = delta.encode(memoryview(base), memoryview(new), itemsize, max_ratio=ANY)
    assert encoded is not None
    broken = bytearray(encoded)
    if data.draw(st.booleans()):
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        broken = broken[:data.draw(st.integers(0, len(broken) - 1))]
    fence = b"fence" * 10
    memory = bytearray(fence + bytes(len(base)) + fence)
    try:
        delta.decode(bytes(broken), memoryview(base), memoryview(memory)[len(fence):-len(fence)])
    except ChunkCorrupt:
        pass
    assert memory[:len(fence)] == fence and memory[-len(fence):] == fence, "it wrote outside of the chunk"


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 70_000])
def test_gaps_of_any_length_are_kept(gap: int) -> None:
    base = np.zeros(100_000, np.uint16)
    new = base.copy()
    new[gap] = 7
    new[-1] = 9
    encoded = delta.encode(base.view(np.uint8).data, new.view(np.uint8).data)
    assert encoded is not None and applied(encoded, base.tobytes()) == new.tobytes()


def test_two_percent_of_bf16_takes_a_thirtieth() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    new = base.copy()
    new[rng.choice(len(new), len(new) // 50, replace=False)] ^= 1
    encoded = delta.encode(base.view(np.uint8).data, new.view(np.uint8).data)
    assert encoded is not None and len(encoded) * 30 < new.nbytes


@pytest.mark.parametrize("base, new", [(b"", b""), (b"ab", b"abcd"), (b"abc", b"abd")])
def test_what_has_no_delta_has_none(base: bytes, new: bytes) -> None:
    assert delta.encode(memoryview(base), memoryview(new)) is None


def test_bases_are_the_chunks_at_the_same_place_of_an_equal_layout() -> None:
    def manifest(seed: int, *, shape: tuple[int, ...] = (64,)):
        packer = Packer(256)
        packer.add("same", "uint8", (200,))
        packer.add("moves", "uint8", shape)
        packer.add("more", "uint8", (300,))
        return packer.manifest([digest_of(b"first"), *(digest_of(f"{i}-{seed}".encode())
                                                       for i in range(1, len(packer.sizes)))])

    old, new = manifest(1), manifest(2)
    chunks_old, chunks_new = list(old.chunks), list(new.chunks)
    assert delta.bases(old, new) == dict(zip(chunks_new[1:], chunks_old[1:], strict=True))
    assert delta.bases(old, old) == {}
    other = manifest(3, shape=(65,))
    assert set(delta.bases(old, other)) <= set(list(other.chunks)[2:]), "a tensor of another shape has no base"
