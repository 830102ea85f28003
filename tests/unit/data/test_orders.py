"""Permutations that are not stored, orders of prompts, and parts taken by weight."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.data.mixing import MAX_CYCLE, Concatenated, WeightedOrder, turns
from elastic_rl.data.order import PromptOrder, fingerprint, order_of, probes
from elastic_rl.data.permutation import MAX_SIZE, Permutation
from elastic_rl.data.samples import Prompt

keys = st.text(max_size=8)


@settings(max_examples=seeds(40))
@given(st.integers(1, 150), keys)
def test_permutation_takes_every_value_once_and_back(size: int, key: str) -> None:
    shuffle = Permutation(size, key)
    values = [shuffle[i] for i in range(size)]
    assert sorted(values) == list(range(size)) and len(shuffle) == size
    assert [shuffle.position(v) for v in values] == list(range(size))


@given(st.integers(1, MAX_SIZE), st.data(), keys)
def test_permutation_of_any_size_goes_there_and_back(size: int, data: st.DataObject, key: str) -> None:
    position = data.draw(st.integers(0, size - 1))
    shuffle = Permutation(size, key)
    assert 0 <= shuffle[position] < size and shuffle.position(shuffle[position]) == position


def test_permutations_of_few_values_are_all_about_as_frequent() -> None:
    for size, count in ((2, 2), (3, 6), (4, 24)):
        seen = Counter(tuple(Permutation(size, f"{k}")[i] for i in range(size)) for k in range(100 * count))
        assert len(seen) == count and min(seen.values()) > 55 and max(seen.values()) < 150


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_permutation_of_no_or_too_many_values_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="a permutation has"):
        Permutation(size, "")
    for outside in (-1, 5):
        with pytest.raises(IndexError):
            Permutation(5, "")[outside]
        with pytest.raises(IndexError):
            Permutation(5, "").position(outside)


def test_pass_counts_how_often_a_problem_was_taken() -> None:
    order = PromptOrder(7, 1)
    taken: Counter[int] = Counter()
    for ordinal in range(50):
        index, data_pass = order.problem(ordinal)
        assert data_pass == taken[index]
        taken[index] += 1
    with pytest.raises(ValueError, match="count from 0"):
        order.problem(-1)


# -- weights -----------------------------------------------------------------------------------------------------------
weights = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@given(weights)
def test_each_prefix_of_a_cycle_keeps_shares_within_one(given_weights: list[int]) -> None:
    cycle, total = turns(given_weights), sum(given_weights)
    taken = [0] * len(given_weights)
    for n, part in enumerate(cycle, 1):
        taken[part] += 1
        assert all(abs(t - n * w / total) < 1 for t, w in zip(taken, given_weights, strict=True))
    assert [t * total for t in taken] == [w * len(cycle) for w in given_weights]


@given(weights, st.integers(0, 9), st.integers(0, 5000), st.integers(1, 400))
def test_any_window_has_each_part_within_two_of_its_share(given_weights: list[int], seed: int, first: int, count: int
                                                          ) -> None:
    order = WeightedOrder([(PromptOrder(3, 0), 3)] * len(given_weights), given_weights, seed)
    taken = Counter(order.part(g)[0] for g in range(first, first + count))
    assert all(abs(taken[i] - count * w / sum(given_weights)) < 2 for i, w in enumerate(given_weights))


@settings(max_examples=10)  # each makes a cycle of the longest kind
@given(st.lists(st.floats(1e-4, 1e4), min_size=2, max_size=6))
def test_weights_that_no_short_cycle_has_are_rounded(given_weights: list[float]) -> None:
    cycle, total = turns(given_weights), sum(given_weights)
    assert len(cycle) <= MAX_CYCLE
    counts = Counter(cycle)
    for part, weight in enumerate(given_weights):
        assert counts[part] >= 1
        assert abs(counts[part] / len(cycle) - weight / total) < (len(given_weights) + 1) / MAX_CYCLE


@settings(max_examples=seeds(40))
@given(weights, st.integers(0, 9), st.integers(1, 12))
def test_each_part_is_taken_in_its_own_order_without_a_gap(given_weights: list[int], seed: int, size: int) -> None:
    parts = [(PromptOrder(size + i, i), size + i) for i in range(len(given_weights))]
    order = WeightedOrder(parts, given_weights, seed)
    ranks: Counter[int] = Counter()
    seen = set()
    offsets = [sum(n for _, n in parts[:i]) for i in range(len(parts))]
    for ordinal in range(60):
        part, rank = order.part(ordinal)
        assert rank == ranks[part]
        ranks[part] += 1
        index, data_pass = order.problem(ordinal)
        own, own_pass = parts[part][0].problem(rank)
        assert (index, data_pass) == (offsets[part] + own, own_pass)
        seen.add((index, data_pass))
    assert len(seen) == 60, "index and pass stand for one ordinal"
    assert order.problem(77) == WeightedOrder(parts, given_weights, seed).problem(77)


@pytest.mark.parametrize("wrong", [[], [0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_wrong_weights_are_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        WeightedOrder([(PromptOrder(1, 0), 1)] * len(wrong), wrong, 0)


# -- lists of parts ----------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 5), max_size=6))
def test_concatenated_parts_are_one_list(sizes: list[int]) -> None:
    prompts = [[Prompt((part + 1, i + 1)) for i in range(size)] for part, size in enumerate(sizes)]
    whole, one = Concatenated(prompts), [p for part in prompts for p in part]
    assert list(whole) == one == [whole[i] for i in range(len(whole))]
    for outside in (-1, len(one)):
        with pytest.raises(IndexError):
            whole[outside]


def test_fingerprint_of_parts_looks_into_each_part() -> None:
    parts = [[Prompt((1, i)) for i in range(1000)], [Prompt((2, 1))]]
    assert probes(Concatenated(parts))[-1] == 1000 and len(probes(Concatenated(parts))) == 65
    assert fingerprint(Concatenated(parts)) != fingerprint(Concatenated([parts[0], [Prompt((2, 2))]]))


def test_source_without_an_order_of_its_own_is_shuffled() -> None:
    class Source:
        train = [Prompt((1,))] * 9

    assert [order_of(Source, 3).problem(g) for g in range(20)] == [PromptOrder(9, 3).problem(g) for g in range(20)]
