"""Samples as tensors: collation, shares, the wire format, and what is refused."""

from __future__ import annotations

from itertools import pairwise

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
        assert int(batch["lengths"][i]) == len(expected)
        assert [*zip(batch.by_sample("tokens")[i].tolist(), batch.by_sample("loss_mask")[i].tolist(), strict=True)] == [
            (token, loss) for token, loss, _ in expected]
        if "old_logprobs" in batch:
            assert batch.by_sample("old_logprobs")[i].tolist() == pytest.approx([p for _, loss, p in expected if loss])
        assert int(batch["versions"][i]) == sample.oldest_version
    assert int(batch["lengths"].sum()) == len(batch["tokens"]) == len(batch["loss_mask"])


@thorough
@given(rows, st.integers(1, 5))
def test_shares_of_a_batch_round_trip_through_the_wire(pairs: list[tuple[Prompt, Sample]], count: int) -> None:
    batch = collate(pairs, [0.5] * len(pairs))
    parts, order = [Batch.from_bytes(share.to_bytes()) for share in batch.shares(count)], batch.share_rows(count)
    for share in parts:
        assert share.tensors.keys() == batch.tensors.keys()
    for name, tensor in batch.tensors.items():
        values = [s[name] for s in parts]
        if SCHEMA[name].dims == ("L",):
            assert torch.equal(batch.joined(order, values), tensor), name
        elif SCHEMA[name].dims == ("N",):
            assert torch.equal(tensor[torch.cat(order)], torch.cat(values)), name
    found = {int(number): row.tolist() for share in parts
             for number, row in zip(share["numbers"], share.by_sample("tokens"), strict=True)}
    assert [found[number] for number in range(batch.samples)] == [row.tolist() for row in batch.by_sample("tokens")]


@thorough
@given(st.binary(max_size=64))
def test_bytes_that_are_not_a_batch_raise_config_error(raw: bytes) -> None:
    with pytest.raises(ConfigError):
        Batch.from_bytes(raw)


GOOD = {"tokens": torch.ones(7, dtype=torch.int32), "lengths": torch.tensor([4, 3]),
        "loss_mask": torch.tensor([0, 0, 1, 1, 0, 1, 1], dtype=torch.bool), "advantages": torch.zeros(2)}


@pytest.mark.parametrize(("change", "named"), [
    ({"lengths": torch.tensor([0, 7])}, "lengths"), ({"lengths": torch.tensor([5, 3])}, "V is 8"),
    ({"lengths": torch.tensor([3, 3])}, "V is 6"), ({"advantages": torch.zeros(3)}, "advantages"),
    ({"lengths": torch.tensor([-1, 8])}, "lengths"),
    ({"lengths": torch.tensor([2**63 - 1, 2**63 - 1, 9]), "advantages": torch.zeros(3)}, "lengths must be 1 to 7"),
    ({"tokens": torch.zeros(7)}, "int32"), ({"loss_mask": torch.ones(2, 4, dtype=torch.bool)}, "loss_mask"),
    ({"loss_mask": torch.tensor([1, 0, 0, 0, 0, 1, 0], dtype=torch.bool)}, "first token"),
    ({"loss_mask": torch.tensor([0, 0, 0, 0, 1, 1, 0], dtype=torch.bool)}, "first token"),
    ({"rewards": torch.zeros(2)}, "no tensor 'rewards'"), ({"old_logprobs": torch.zeros(7)}, "old_logprobs"),
    ({"values": torch.tensor([0.0, 0.0, 0.0, float("nan")])}, "not finite")])
def test_inconsistent_batch_raises_config_error(change: dict[str, torch.Tensor], named: str) -> None:
    Batch(GOOD)
    with pytest.raises(ConfigError, match=named):
        Batch({**GOOD, **change})


def test_mask_of_other_bytes_than_a_mask_has_is_refused() -> None:
    """Safetensors give any byte as a truth; counted as numbers, 255 of one sample would be rows of others."""
    raw = Batch(GOOD).to_bytes()
    assert Batch.from_bytes(raw).loss_tokens == 4
    mask = bytes([0, 0, 1, 1, 0, 1, 1])
    assert raw.count(mask) == 1
    with pytest.raises(ConfigError, match="neither 0 nor 1"):
        Batch.from_bytes(raw.replace(mask, bytes([0, 0, 255, 1, 0, 1, 1])))


def test_share_without_a_sample_is_a_piece_too() -> None:
    """A replica that gets no sample of a batch must be told so."""
    [rows] = [rows for rows in Batch(GOOD).share_rows(3) if not len(rows)]
    [piece] = Batch(GOOD).pieces(rows, 100)
    assert Batch.from_bytes(Batch(GOOD).rows(piece).to_bytes()).samples == 0


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
    assert batch["loss_mask"].tolist() == [False, False, True, True] and "old_logprobs" not in batch
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
    values = torch.arange(batch.loss_tokens, dtype=torch.float32)
    own = [share.tensors["values"] for share in batch.with_tensors(values=values).shares(count)]
    assert torch.equal(batch.joined(rows, own), values)
    assert [len(v) for v in own] == [share.loss_tokens for share in parts]
    with pytest.raises(ConfigError, match="values of a share must be"):
        batch.joined(rows, [torch.nn.functional.pad(v, (0, 1)) for v in own])


@thorough
@given(rows, st.integers(1, 400))
def test_pieces_of_a_batch_are_within_the_limit_and_are_the_batch_again(
        pairs: list[tuple[Prompt, Sample]], limit: int) -> None:
    batch = collate(pairs, [0.5] * len(pairs))
    pieces = [batch.rows(rows) for rows in batch.pieces(torch.arange(batch.samples), limit)]
    for piece in pieces:
        held = sum(tensor.numel() * tensor.element_size() for tensor in piece.tensors.values())
        assert held == int(piece.sample_bytes.sum()) and (held <= limit or piece.samples == 1)
    assert all(int(one.sample_bytes.sum()) + int(after.sample_bytes[0]) > limit
               for one, after in pairwise(pieces)), "no more pieces than there must be"
    again = Batch.of_pieces([Batch.from_bytes(piece.to_bytes()) for piece in pieces])
    assert again.tensors.keys() == batch.tensors.keys()
    assert all(torch.equal(again[name], batch[name]) for name in batch.tensors)


@thorough
@given(rows, st.data())
def test_samples_without_loss_lose_their_loss_tokens_and_nothing_else(
        pairs: list[tuple[Prompt, Sample]], data: st.DataObject) -> None:
    batch = collate(pairs)
    batch = batch.with_tensors(values=torch.arange(batch.loss_tokens, dtype=torch.float32))
    out = data.draw(st.sets(st.integers(0, batch.samples - 1)))
    left = batch.without_loss(torch.tensor(sorted(out), dtype=torch.int64))
    assert torch.equal(left["tokens"], batch["tokens"])
    for row, values in enumerate(left.by_sample("values")):
        assert values.tolist() == ([] if row in out else batch.by_sample("values")[row].tolist())
    sums = batch.sequence_sum(batch["values"])
    assert left.sequence_sum(left["values"]).tolist() == [
        0.0 if row in out else s for row, s in enumerate(sums.tolist())]
    assert torch.equal(left.to_tokens(torch.arange(left.samples)), torch.repeat_interleave(
        torch.arange(left.samples), left.loss_counts))


@thorough
@given(rows, st.integers(1, 5), st.integers(1, 4))
def test_minibatches_have_the_same_samples_with_any_number_of_replicas(
        pairs: list[tuple[Prompt, Sample]], replicas: int, minibatches: int) -> None:
    batch = collate(pairs, [0.5] * len(pairs))
    order = batch.share_rows(replicas, minibatches)
    assert torch.equal(torch.cat(order).sort().values, torch.arange(len(pairs)))
    shares = [Batch.from_bytes(batch.rows(rows).to_bytes()) for rows in order]
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
    for share in [batch.rows(own) for own in batch.share_rows(replicas, minibatches)]:
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
    batch = Batch({"tokens": torch.zeros(sum(lengths), dtype=torch.int32), "lengths": torch.tensor(lengths),
                   "loss_mask": torch.zeros(sum(lengths), dtype=torch.bool)})
    rows = batch.share_rows(count, minibatches, cost.of_sample)
    for i in range(minibatches):
        work = [sum(cost.of_sample(lengths[n]) for n in share.tolist() if n % minibatches == i) for share in rows]
        assert max(work) - min(work) <= max((cost.of_sample(n) for n in lengths[i::minibatches]), default=0.0) + 1e-6


def test_one_long_sample_takes_room_for_its_own_tokens_only() -> None:
    lengths = [4000, *[10] * 7]
    batch = collate([(Prompt((1,)), Sample((Segment((2,) * (n - 1), (-1.0,) * (n - 1), version=1),)))
                     for n in lengths], [0.5] * 8)
    sizes = [len(share.to_bytes()) for share in batch.shares(4)]
    assert sum(sizes) < sum(lengths) * 9 + 4 * 1000, "4 bytes for a token, 4 for its log-prob, 1 in the mask"
    assert sizes[0] > 4000 * 9
