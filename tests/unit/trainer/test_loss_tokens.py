"""Which tokens of a batch are trained on, where their logits are, and which sample each belongs to."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import from_rows

from elastic_rl.trainer.context_parallel import multiple, own_positions
from elastic_rl.trainer.forward import LossTokens
from elastic_rl.trainer.megatron.parallel import ParallelDims
from elastic_rl.trainer.micro_batches import MicroBatch


def of_context(cp: int, cp_rank: int) -> ParallelDims:
    return ParallelDims(cp_rank, cp, 1, 0, 1, 0, torch.device("cpu"), cp=cp, cp_rank=cp_rank)


masks = st.integers(2, 6).flatmap(lambda width: st.lists(
    st.lists(st.booleans(), min_size=width - 1, max_size=width - 1), min_size=1, max_size=5))


@given(masks, st.integers(0, 1000), st.sampled_from([0.5, 1.0]), st.booleans())
def test_values_of_loss_tokens_belong_to_their_sample_and_position(
        rows: list[list[bool]], seed: int, temperature: float, packed: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    n, width, vocab = len(rows), len(rows[0]) + 1, 3
    tokens = torch.randint(0, vocab, (n, width), generator=g)
    per_token, per_sample = torch.randn(n, width, generator=g), torch.randn(n, generator=g)
    logits = torch.randn(n, width - 1, vocab, generator=g)
    # As short as the mask allows: packed rows differ in length.
    lengths = [max((t + 2 for t, trained in enumerate(row) if trained), default=1) for row in rows]
    mask = torch.tensor([[False, *row] for row in rows])
    batch = from_rows(tokens, torch.tensor(lengths), mask, values=per_token)
    micro = (MicroBatch.packed if packed else MicroBatch.padded)(torch.arange(n), batch)
    index = LossTokens.of(micro, of_context(1, 0))
    # The mask of a row begins with its second token: nothing predicts the first.
    expected = [(i, t + 1) for i, row in enumerate(rows) for t, trained in enumerate(row) if trained]
    assert index.rows.tolist() == [i for i, _ in expected]
    assert index.targets.tolist() == [int(tokens[i, t]) for i, t in expected]
    assert micro.batch["values"].tolist() == [float(per_token[i, t]) for i, t in expected], "in the same order"
    assert index.to_tokens(per_sample).tolist() == [float(per_sample[i]) for i, _ in expected]
    inside = torch.arange(width - 1) < (torch.tensor(lengths) - 1).clamp(min=1)[:, None]
    picked = index.logits(logits[inside][None] if packed else logits, temperature)
    assert picked.shape == (len(expected), vocab)
    for (i, t), found in zip(expected, picked, strict=True):
        torch.testing.assert_close(found, logits[i, t - 1] / temperature)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(2, 3))
def test_loss_token_is_found_only_at_its_positions_rank(lengths: list[int], cp: int) -> None:
    width = max(lengths)
    inside = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    tokens = torch.arange(1, len(lengths) * width + 1).view(-1, width) * inside
    mask = inside & (torch.arange(width) > 0)
    batch = from_rows(tokens, torch.tensor(lengths), mask)
    micro = MicroBatch.packed(torch.arange(len(lengths)), batch, multiple(cp))
    found: dict[int, int] = {}
    for rank in range(cp):
        index = LossTokens.of(micro, of_context(cp, rank))
        of_rank = micro.input.tokens[:, own_positions(micro.input.packed, cp, rank)]
        # These tokens count up, so that each predicts the next one.
        predicted = index.logits(of_rank[..., None], 1.0)[:, 0].long() + 1
        assert predicted.tolist() == index.targets.tolist()
        assert not found.keys() & set(index.own.tolist())
        found |= dict(zip(index.own.tolist(), index.targets.tolist(), strict=True))
    assert [found[i] for i in range(len(found))] == tokens[mask].tolist()
