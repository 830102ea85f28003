"""Samples as tensors: collation, shares, the wire format, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.data.batch import SCHEMA, Batch, balanced, collate
from elastic_rl.data.samples import Prompt, Sample, Segment, demonstration
from elastic_rl.errors import ConfigError
from elastic_rl.models.flops import SequenceCost

thorough = settings(deadline=None, max_examples=seeds(40))
tokens = st.lists(st.integers(2, 40), min_size=1, max_size=5).map(tuple)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ids = draw(tokens)
    if draw(st.booleans()):
        return Segment(ids, loss=False)
    return Segment(ids, tuple(draw(st.lists(st.floats(-5, 0, width=32), min_size=len(ids), max_size=len(ids)))),
                   version=draw(st.integers(1, 9)))


rows = st.lists(st.tuples(tokens.map(Prompt), st.lists(segments(), min_size=1, max_size=4).map(
    lambda s: Sample(tuple(s)))), min_size=1, max_size=7)


@thorough
@given(rows)
def test_batch_has_every_token_with_its_origin(pairs: list[tuple[Prompt, Sample]]) -> None:
    batch = collate(pairs, [float(i) for i in range(len(pairs))])
    for i, (prompt, sample) in enumerate(pairs):
        expected = [*((t, False, 0.0) for t in prompt.token_ids), *(
            (t, s.loss, s.logprobs[j] if s.logprobs else 0.0) for s in sample.segments
            for j, t in enumerate(s.token_ids))]
        n = int(batch["lengths"][i])
        old = batch["old_logprobs"][i] if "old_logprobs" in batch else torch.zeros(n)
        assert [(int(batch["tokens"][i, j]), bool(batch["loss_mask"][i, j]), pytest.approx(float(old[j])))
                for j in range(n)] == expected
        assert not batch["tokens"][i, n:].any() and not batch["loss_mask"][i, n:].any()
        assert int(batch["versions"][i]) == sample.oldest_version


@thorough
@given(rows, st.integers(1, 5))
def test_shares_of_a_batch_round_trip_through_the_wire(pairs: list[tuple[Prompt, Sample]], count: int) -> None:
    batch = collate(pairs, [0.5] * len(pairs))
    parts, order = [Batch.from_bytes(share.to_bytes()) for share in batch.shares(count)], batch.share_rows(count)
    for share in parts:
        assert share.tensors.keys() == batch.tensors.keys()
        assert share.width == max(share["lengths"].tolist(), default=0), "no row needs that width"
    for name, tensor in batch.tensors.items():
        values = [s[name] for s in parts]
        expected = batch.joined(order, values) if tensor.ndim == 2 else tensor[torch.cat(order)]
        assert torch.equal(expected, tensor if tensor.ndim == 2 else torch.cat(values)), name


@thorough
@given(st.binary(max_size=64))
def test_bytes_that_are_not_a_batch_raise_config_error(raw: bytes) -> None:
    with pytest.raises(ConfigError):
        Batch.from_bytes(raw)


GOOD = {"tokens": torch.ones(2, 4, dtype=torch.int64), "lengths": torch.tensor([4, 3]),
        "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]], dtype=torch.bool), "advantages": torch.zeros(2)}


@pytest.mark.parametrize(("change", "named"), [
    ({"lengths": torch.tensor([0, 3])}, "lengths"), ({"lengths": torch.tensor([5, 3])}, "lengths"),
    ({"lengths": torch.tensor([3, 3])}, "padding"), ({"advantages": torch.zeros(3)}, "advantages"),
    ({"tokens": torch.zeros(2, 4)}, "int64"), ({"loss_mask": torch.ones(2, 4, dtype=torch.bool)}, "padding"),
    ({"loss_mask": torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)}, "first token"),
    ({"rewards": torch.zeros(2)}, "no tensor 'rewards'"), ({"old_logprobs": torch.zeros(2, 5)}, "old_logprobs")])
def test_inconsistent_batch_raises_config_error(change: dict[str, torch.Tensor], named: str) -> None:
    Batch(GOOD)
    with pytest.raises(ConfigError, match=named):
        Batch({**GOOD, **change})


def test_missing_tensor_is_named() -> None:
    with pytest.raises(ConfigError, match="needs the tensor 'lengths'"):
        Batch({"tokens": GOOD["tokens"], "loss_mask": GOOD["loss_mask"]})
    with pytest.raises(ConfigError, match="no tensor 'old_logprobs', only"):
        Batch(GOOD)["old_logprobs"]
    assert set(GOOD) < set(SCHEMA)


def test_generated_token_without_a_log_prob_is_refused() -> None:
    with pytest.raises(ConfigError, match="no log-probs"):
        collate([(Prompt((1,)), Sample((Segment((2,), version=3),)))])
    with pytest.raises(ValueError, match="log-probs"):
        Segment((1, 2), (-0.5,))


def test_demonstration_is_trained_on_without_log_probs() -> None:
    prompt = Prompt((3, 4), answer_ids=(5, 1))
    batch = collate([(prompt, demonstration(prompt))])
    assert batch["loss_mask"].tolist() == [[False, False, True, True]] and "old_logprobs" not in batch
    with pytest.raises(ValueError, match="no answer"):
        demonstration(Prompt((3,)))


def test_sample_is_as_old_as_the_oldest_of_its_trained_segments() -> None:
    sample = Sample((Segment((1,), (-1.0,), version=4), Segment((2,), loss=False), Segment((3,), (-1.0,), version=6)))
    assert (sample.oldest_version, sample.versions, sample.response_ids) == (4, (4, 6), (1, 2, 3))
    assert Sample((Segment((1,), (-1.0,)),)).oldest_version == 0


@thorough
@given(st.lists(st.integers(1, 10_000), max_size=50), st.integers(1, 9))
def test_balanced_shares_have_every_row_once_and_about_as_many_tokens(lengths: list[int], count: int) -> None:
    parts = balanced(lengths, count)
    assert len(parts) == count and sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(part == sorted(part) for part in parts) and parts == balanced(lengths, count)
    tokens = [sum(lengths[row] for row in part) for part in parts]
    longest = max(lengths, default=0)
    assert max(tokens) <= sum(lengths) / count + longest * (1 - 1 / count) + 1e-6
    assert max(tokens) - min(tokens) <= longest
    assert len(lengths) < count or all(parts)


def test_longest_sequence_left_goes_to_the_replica_with_fewest_tokens() -> None:
    assert balanced([1, 1, 1, 1, 6, 2], 2) == [[4], [0, 1, 2, 3, 5]]
    assert balanced([1, 2, 3, 4, 5, 6], 3) == [[0, 5], [1, 4], [2, 3]]


@thorough
@given(rows, st.integers(1, 5))
def test_results_of_replicas_are_put_in_the_order_of_the_batch(pairs: list[tuple[Prompt, Sample]], count: int) -> None:
    batch = collate(pairs, [0.5] * len(pairs))
    parts, rows = batch.shares(count), batch.share_rows(count)
    for name in ("tokens", "loss_mask"):
        assert torch.equal(batch.joined(rows, [share[name] for share in parts]), batch[name])
    with pytest.raises(ConfigError, match="values of a share must be"):
        batch.joined(rows, [torch.nn.functional.pad(share["tokens"], (0, 1)) for share in parts])


@thorough
@given(rows, st.integers(1, 5), st.integers(1, 4))
def test_minibatches_have_the_same_samples_with_any_number_of_replicas(
        pairs: list[tuple[Prompt, Sample]], replicas: int, minibatches: int) -> None:
    batch = collate(pairs, [0.5] * len(pairs))
    order = batch.share_rows(replicas, minibatches)
    assert torch.equal(torch.cat(order).sort().values, torch.arange(len(pairs)))
    shares = [Batch.from_bytes(batch.share(rows).to_bytes()) for rows in order]
    for i in range(minibatches):
        own = [share.minibatch(i, minibatches) for share in shares]
        assert torch.cat([part["numbers"] for part in own]).sort().values.tolist() == [
            *range(i, len(pairs), minibatches)]
        assert len(pairs) < replicas * minibatches or all(part.samples for part in own), "a replica would have none"


@thorough
@given(rows, st.integers(1, 5), st.integers(1, 4))
def test_each_sample_is_in_one_minibatch_of_its_share(pairs: list[tuple[Prompt, Sample]], replicas: int,
                                                      minibatches: int) -> None:
    """One that is in two of them is trained on twice in a step, and one that is in none never."""
    batch = collate(pairs, [0.5] * len(pairs))
    for share in [batch.share(own) for own in batch.share_rows(replicas, minibatches)]:
        cut = share.minibatches(minibatches)
        assert len(cut) == minibatches, "all replicas make as many updates"
        assert sorted(n for part in cut for n in part["numbers"].tolist()) == sorted(share["numbers"].tolist())
        assert sum(part.loss_tokens for part in cut) == share.loss_tokens


def test_many_small_minibatches_together_are_balanced_too() -> None:
    lengths = [100 + 7 * (n % 13) for n in range(64)]
    batch = collate([(Prompt((1,)), Sample((Segment((2,) * (n - 1), (-1.0,) * (n - 1), version=1),)))
                     for n in lengths], [0.5] * 64)
    tokens = [sum(lengths[row] for row in rows.tolist()) for rows in batch.share_rows(8, 16)]
    assert max(tokens) - min(tokens) <= 2 * max(lengths)


def test_shares_are_balanced_by_work_and_not_by_tokens() -> None:
    """One sequence whose attention alone is more than all that thirty others are."""
    lengths = [1000, *[100] * 30]
    batch = collate([(Prompt((1,)), Sample((Segment((2,) * (n - 1), (-1.0,) * (n - 1), version=1),)))
                     for n in lengths], [0.5] * 31)
    cost = SequenceCost(linear=100.0, square=1.0)
    assert [len(rows) for rows in batch.share_rows(2, cost=cost.of_sample)] == [1, 30]
    assert [len(rows) for rows in batch.share_rows(2)] == [11, 20], "by tokens"


@thorough
@given(st.lists(st.integers(2, 500), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 4))
def test_work_of_shares_differs_by_one_sequence_of_each_minibatch(lengths: list[int], count: int, minibatches: int
                                                                  ) -> None:
    cost = SequenceCost(linear=100.0, square=1.0)
    shape = len(lengths), max(lengths)
    batch = Batch({"tokens": torch.zeros(shape, dtype=torch.int64), "lengths": torch.tensor(lengths),
                   "loss_mask": torch.zeros(shape, dtype=torch.bool)})
    rows = batch.share_rows(count, minibatches, cost.of_sample)
    for i in range(minibatches):
        work = [sum(cost.of_sample(lengths[n]) for n in share.tolist() if n % minibatches == i) for share in rows]
        assert max(work) - min(work) <= max((cost.of_sample(n) for n in lengths[i::minibatches]), default=0.0) + 1e-6


def test_one_long_sample_widens_its_own_share_only() -> None:
    lengths = [4000, *[10] * 7]
    batch = collate([(Prompt((1,)), Sample((Segment((2,) * (n - 1), (-1.0,) * (n - 1), version=1),)))
                     for n in lengths], [0.5] * 8)
    wide, *others = (len(share.to_bytes()) for share in batch.shares(4))
    assert wide > 4000 * 13 and all(size < 3 * 10 * 13 + 2000 for size in others)
