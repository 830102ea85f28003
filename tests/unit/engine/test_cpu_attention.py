"""Attention of padded groups of sequences equals that of each sequence alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.engine.sglang.cpu_attention import attend, groups, pad

LENGTHS = st.lists(st.integers(1, 3000), max_size=300)
SEQUENCES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=9)
"""Sequences, each with its number of new tokens, and of tokens before them that are in the cache already."""


@given(LENGTHS)
def test_groups_hold_every_sequence_once_and_waste_little(lengths) -> None:
    found = groups(lengths)
    assert sorted(i for group in found for i in group) == list(range(len(lengths)))
    for group in found:
        sizes = [lengths[i] for i in group]
        assert max(sizes) == sizes[0] and (sizes[0] <= 64 or sizes[0] <= 2 * min(sizes))
        assert len(group) == 1 or len(group) * sizes[0] <= 1 << 18


def test_short_sequences_form_one_group() -> None:
    assert len(groups([5, 64, 9, 1] * 100)) == 1


def alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of one sequence whose last query is its last key. [queries, heads, size]; keys have fewer
    heads."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    seen = torch.arange(len(key)) <= torch.arange(len(query))[:, None] + len(key) - len(query)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@given(SEQUENCES, st.sampled_from([(4, 2), (4, 4), (6, 1)]), st.integers(0, 2**16))
def test_padded_attention_equals_that_of_each_sequence_alone(sequences, heads, seed) -> None:
    rng = torch.Generator().manual_seed(seed)
    queries = torch.tensor([new for new, _ in sequences])
    keys = torch.tensor([new + old for new, old in sequences])
    total, size, scale = int(queries.sum()), 8, 0.3
    slots = torch.randperm(400, generator=rng)
    # Whatever is in slots that no sequence has written must not matter.
    k_cache, v_cache = (torch.full((400, heads[1], size), torch.nan) for _ in range(2))
    table = torch.zeros(len(sequences), int(keys.max()) + 3, dtype=torch.int32)
    taken = 0
    for i, n in enumerate(keys.tolist()):
        mine = slots[taken:taken + n]
        taken += n
        table[i, :n] = mine.int()
        table[i, n:] = slots[-1]
        for cache in (k_cache, v_cache):
            cache[mine] = torch.randn(n, heads[1], size, generator=rng)
    query = torch.randn(total, heads[0], size, generator=rng)
    first = queries.cumsum(0) - queries

    output = torch.full_like(query, torch.nan)
    for group in groups(keys.tolist()):
        chosen = torch.tensor(group)
        attend(pad(first[chosen], queries[chosen], keys[chosen], table[chosen]), query, k_cache, v_cache, output, scale)

    for i, (start, new, n) in enumerate(zip(first.tolist(), queries.tolist(), keys.tolist(), strict=True)):
        places = table[i, :n].long()
        expected = alone(query[start:start + new], k_cache[places], v_cache[places], scale)
        assert torch.allclose(output[start:start + new], expected, atol=1e-5)
