"""Which positions of a packed row each rank of a context-parallel group has."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.trainer.context_parallel import multiple, own_positions, places

thorough = settings(deadline=None, max_examples=seeds(40))
sizes = st.integers(1, 5)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], int]:
    """Lengths of sequences, and the number of ranks."""
    cp = draw(sizes)
    return [n * multiple(cp) for n in draw(st.lists(st.integers(1, 12), max_size=8))], cp


@thorough
@given(rows())
def test_every_position_is_at_one_rank_and_ranks_have_equally_many(row: tuple[list[int], int]) -> None:
    lengths, cp = row
    of_ranks = [own_positions(lengths, cp, rank) for rank in range(cp)]
    assert sorted(torch.cat(of_ranks).tolist()) == list(range(sum(lengths)))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for own in of_ranks:
        # In the order of the sequences, and within each of the positions: the order that attention counts on.
        assert own.tolist() == sorted(own.tolist())
        assert [int(((own >= start) & (own < start + n)).sum()) for start, n in zip(starts, lengths, strict=True)] \
            == [n // cp for n in lengths]


@thorough
@given(rows())
def test_all_ranks_have_as_much_attention_to_compute(row: tuple[list[int], int]) -> None:
    """A position attends to itself and to those before it in its sequence."""
    lengths, cp = row
    before = torch.cat([torch.zeros(0, dtype=torch.int64), *(torch.arange(1, n + 1) for n in lengths)])
    assert len({int(before[own_positions(lengths, cp, rank)].sum()) for rank in range(cp)}) == 1


@thorough
@given(rows())
def test_places_are_where_a_rank_has_its_positions(row: tuple[list[int], int]) -> None:
    lengths, cp = row
    for rank in range(cp):
        own = own_positions(lengths, cp, rank)
        found = places(own, sum(lengths))
        assert found[own].tolist() == list(range(len(own)))
        assert int((found >= 0).sum()) == len(own)


def test_the_chunks_of_a_sequence_are_dealt_out_from_both_ends() -> None:
    assert own_positions([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert own_positions([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert own_positions([3, 2], 1, 0).tolist() == [0, 1, 2, 3, 4]
