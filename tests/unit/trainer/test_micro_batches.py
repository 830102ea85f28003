"""The cut of a share into micro-batches: what is in each, how much is padded, and what goes through the model."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import from_rows
from support.budget import seeds

from elastic_rl.config import TrainerConfig
from elastic_rl.data.batch import Batch
from elastic_rl.models.flops import SequenceCost
from elastic_rl.trainer import micro_batches
from elastic_rl.trainer.micro_batches import ModelInput, cut, cut_by_length, fill, pack

thorough = settings(deadline=None, max_examples=seeds(40))
lengths_of = st.lists(st.integers(1, 60), max_size=60)
budgets = st.integers(1, 200)
COST = SequenceCost(linear=10.0, square=1.0)
"""The cost for a model that is so narrow that attention counts from ten positions on."""


def packed(lengths: list[int], budget: int) -> list[list[int]]:
    return pack(lengths, budget, COST)


both = pytest.mark.parametrize("arrange", [cut_by_length, packed])
Arrange = Callable[[list[int], int], list[list[int]]]


def batch_of(lengths: list[int]) -> Batch:
    """A batch of sequences of distinct tokens, all of them trained on but for the first of each."""
    width, n = max(lengths, default=1), len(lengths)
    inside = torch.arange(width)[None] < torch.tensor(lengths, dtype=torch.int64)[:, None]
    return from_rows(torch.arange(1, n * width + 1).view(n, width), torch.tensor(lengths, dtype=torch.int64),
                     inside & (torch.arange(width) > 0), advantages=torch.arange(n) * 1.0)


@both
@thorough
@given(lengths=lengths_of, budget=budgets)
def test_every_sequence_is_in_one_micro_batch(arrange: Arrange, lengths: list[int], budget: int) -> None:
    micros = arrange(lengths, budget)
    assert sorted(number for micro in micros for number in micro) == list(range(len(lengths)))
    assert all(micros) and micros == arrange(lengths, budget)


@thorough
@given(lengths_of, budgets)
def test_padded_micro_batch_stays_within_the_budget_or_is_one_sequence(lengths: list[int], budget: int) -> None:
    for micro in cut_by_length(lengths, budget):
        assert len(micro) == 1 or len(micro) * max(lengths[i] for i in micro) <= budget


@thorough
@given(lengths_of.filter(bool), budgets)
def test_padding_is_bounded_by_the_logarithm_of_the_spread(lengths: list[int], budget: int) -> None:
    micros = cut_by_length(lengths, budget)
    padding = sum(len(micro) * max(lengths[i] for i in micro) for micro in micros) - sum(lengths)
    assert padding <= budget * math.log(max(lengths) / min(lengths)) + 1e-6


@thorough
@given(lengths_of, budgets)
def test_packed_micro_batches_stay_within_the_budget_and_are_few(lengths: list[int], budget: int) -> None:
    micros, few = packed(lengths, budget), fill(lengths, budget)
    filled = sorted(sum(lengths[i] for i in micro) for micro in few)
    assert len(filled) < 2 or filled[0] + filled[1] > budget, "two of them could be one"
    assert len(few) <= len(micros) < 1 + 2 * max(sum(lengths) / budget, len(few) / 2)
    assert all(len(micro) == 1 or sum(lengths[i] for i in micro) <= budget for micro in micros)


@thorough
@given(lengths_of, st.integers(20, 200))
def test_work_of_packed_micro_batches_differs_by_one_sequence_unless_memory_decides(lengths: list[int], budget: int
                                                                                   ) -> None:
    micros = packed(lengths, budget)
    work = {i: sum(COST(lengths[n]) for n in micro) for i, micro in enumerate(micros)}
    least = min(work, key=lambda i: work[i], default=0)
    for i, micro in enumerate(micros):
        smallest = min(micro, key=lambda n: lengths[n])
        fits = sum(lengths[n] for n in micros[least]) + lengths[smallest] <= budget
        assert not fits or work[i] - COST(lengths[smallest]) <= work[least] + 1e-6


def test_sequence_that_finds_no_room_leaves_the_balance_of_the_others() -> None:
    """Two micro-batches suffice for the positions, but not where the longest two are apart, as their work asks for."""
    lengths, budget = [90, 90, 40, 35, 35, 35, 35], 180

    def worst(micros: list[list[int]]) -> float:
        work = [sum(COST(lengths[n]) for n in micro) for micro in micros]
        return max(work) * len(work) / sum(work)

    assert len(fill(lengths, budget)) == 2 and worst(fill(lengths, budget)) > 1.35
    assert len(packed(lengths, budget)) == 3 and worst(packed(lengths, budget)) < 1.05


def test_work_of_packing_grows_with_the_sequences_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of a replica has 100,000 samples, most of which find room beside few others."""
    moves = 0

    def counted(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any) -> Any:
            nonlocal moves
            moves += 1
            return move(*args)
        return moved

    monkeypatch.setattr(micro_batches, "heapq", SimpleNamespace(
        **{name: counted(getattr(heapq, name)) for name in ("heappush", "heappop", "heapreplace")}))
    draw = random.Random(0)
    lengths = [min(131_072, int(draw.lognormvariate(8.7, 0.8)) + 1) for _ in range(12_500)]
    packed(lengths, 16_384)
    assert moves < 10 * len(lengths)


def test_sequences_are_packed_by_their_work_and_not_by_their_tokens() -> None:
    lengths = [80, *[20] * 12]

    def work(micros: list[list[int]]) -> list[float]:
        return [sum(COST(lengths[n]) for n in micro) for micro in micros]

    assert work(packed(lengths, 200)) == [6000.0, 8400.0]
    assert work(fill(lengths, 200)) == [10800.0, 3600.0]


def test_work_of_what_goes_through_the_model_is_that_of_its_sequences_and_of_padding() -> None:
    assert ModelInput(torch.zeros(1, 30, dtype=torch.int64), (10, 20)).flops(COST) == COST(10) + COST(20)
    assert ModelInput(torch.zeros(3, 20, dtype=torch.int64)).flops(COST) == 3 * COST(20)


@both
@thorough
@given(lengths=lengths_of, budget=budgets)
def test_a_step_for_which_memory_does_not_suffice_fails_at_once(arrange: Arrange, lengths: list[int], budget: int
                                                                 ) -> None:
    """The first micro-batch needs most: positions if they are packed, else those of the longest rows."""
    micros = [[lengths[i] for i in micro] for micro in arrange(lengths, budget)]
    needs = [sum(micro) if arrange is packed else max(micro) for micro in micros]
    assert needs == sorted(needs, reverse=True)


def test_longest_sequences_are_packed_first_and_short_ones_fill_up() -> None:
    assert fill([2, 2, 3, 3, 5, 5], 10) == [[4, 5], [2, 3, 0, 1]]


@thorough
@given(lengths=lengths_of, cp=st.integers(2, 4))
def test_budget_holds_for_each_rank_with_its_padding(lengths: list[int], cp: int) -> None:
    budget = 30
    micros = cut(batch_of(lengths), TrainerConfig(micro_batch_tokens=budget, context_parallel=cp), COST)
    sizes = [micro.input.tokens.numel() for micro in micros]
    assert all(len(m.rows) == 1 or size <= budget * cp for m, size in zip(micros, sizes, strict=True))
    assert all(size % (2 * cp) == 0 for size in sizes)
    smallest = sorted(sizes)[:2]
    assert len(smallest) < 2 or sum(smallest) > budget * cp, "the whole budget is used"


SETTINGS = [{"micro_batch_tokens": 40, "packing": False}, {"micro_batch_tokens": 40},
            {"micro_batch_tokens": 20, "context_parallel": 2}]


@pytest.mark.parametrize("given_settings", SETTINGS, ids=["padded", "packed", "split"])
@thorough
@given(lengths=lengths_of)
def test_what_goes_through_the_model_is_each_sequence_without_its_last_token(
        given_settings: dict[str, int], lengths: list[int]) -> None:
    share = batch_of(lengths)
    micros = cut(share, TrainerConfig(**given_settings), COST)
    rows = [row for micro in micros for row in micro.rows.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    for micro in micros:
        flat = micro.input.tokens.flatten()
        assert sum(micro.input.packed) in (0, len(flat))
        for i, row in enumerate(micro.rows.tolist()):
            start, taken = int(micro.starts[i]), max(lengths[row] - 1, 1)
            assert flat[start:start + taken].tolist() == share.by_sample("tokens")[row][:taken].tolist()
            if micro.input.packed:
                chunks = 4 if "context_parallel" in given_settings else 1
                assert micro.input.packed[i] == -(-taken // chunks) * chunks
                assert not flat[start + taken:start + micro.input.packed[i]].any()
            assert float(micro.batch["advantages"][i]) == row
            assert torch.equal(micro.batch.by_sample("tokens")[i], share.by_sample("tokens")[row])


def test_packed_rows_have_no_padding_and_rows_of_like_lengths_little() -> None:
    lengths = [9, 257] * 20

    def positions(**given_settings: object) -> int:
        return sum(m.input.tokens.numel() for m in cut(batch_of(lengths), TrainerConfig(**given_settings), COST))

    assert positions() == 20 * 8 + 20 * 256
    assert positions(packing=False, micro_batch_tokens=1024) == 20 * 8 + 20 * 256
    assert positions(packing=False, micro_batch_tokens=40 * 256) == 40 * 256
