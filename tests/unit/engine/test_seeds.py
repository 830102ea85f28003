"""Seeds of samples."""

from __future__ import annotations

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.engine.sglang.seeds import derived_seeds, hashes

prompts = st.lists(st.sampled_from([(1, 2), (1, 3), (2,), (1, 2, 0)]), max_size=12)


@given(st.integers(0, 2**31 - 1), prompts, prompts)
def test_seed_of_a_sample_is_independent_of_its_request(seed, own, others):
    alone = derived_seeds(seed, own)
    other = [p for p in others if p not in own]
    assert derived_seeds(seed, [*other, *own])[len(other):] == alone
    assert all(0 <= s < 2**31 for s in alone)


def test_samples_of_one_prompt_and_requests_of_other_seeds_differ():
    assert len({*derived_seeds(7, [(1, 2)] * 64), *derived_seeds(8, [(1, 2)] * 64)}) == 128


def _murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of whole blocks."""
    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 & 0xFFFFFFFF
        k = (k << 15 | k >> 17) & 0xFFFFFFFF
        h ^= k * 0x1B873593 & 0xFFFFFFFF
        h = (h << 13 | h >> 19) & 0xFFFFFFFF
        h = h * 5 + 0xE6546B64 & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def test_reference_implementation_gives_the_published_value():
    assert _murmur3(b"test") == 0xBA6BD213


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
       st.integers(1, 5))
def test_hashes_are_murmur3_of_seed_position_and_column(rows, columns):
    found = hashes(torch.tensor([s for s, _ in rows]), torch.tensor([p for _, p in rows]), torch.arange(columns))
    assert found.tolist() == [[_murmur3(struct.pack("<QII", seed, position, c)) for c in range(columns)]
                              for seed, position in rows]
