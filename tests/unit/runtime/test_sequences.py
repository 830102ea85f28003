"""Sequences are split by the number and by the bytes of their items."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.runtime.sequences import batches


@settings(max_examples=seeds(40))
@given(items=st.lists(st.integers(0, 9), max_size=30), size=st.integers(1, 6), most=st.integers(1, 20))
def test_parts_are_within_both_limits_and_no_smaller_than_they_must_be(items: list[int], size: int, most: int) -> None:
    parts = [list(part) for part in batches(items, size, nbytes=lambda item: item, most_bytes=most)]
    assert [*itertools.chain(*parts)] == items and all(parts)
    assert all(len(part) <= size and (sum(part) <= most or len(part) == 1) for part in parts)
    assert all(len(part) == size or sum(part) + after[0] > most for part, after in itertools.pairwise(parts))


@given(items=st.lists(st.integers(), max_size=30), size=st.integers(1, 6))
def test_parts_have_so_many_items_where_bytes_do_not_matter(items: list[int], size: int) -> None:
    assert [len(part) for part in batches(items, size)][:-1] == [size] * (max(0, len(items) - 1) // size)
    assert [*itertools.chain(*batches(items, size))] == items
