"""Which tokens of a batch are trained on, where their logits are, and which sample each belongs to."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.data.batch import Batch
from elastic_rl.trainer.micro_batches import MicroBatch
from elastic_rl.trainer.step import LossTokens

masks = st.integers(2, 6).flatmap(lambda width: st.lists(
    st.lists(st.booleans(), min_size=width - 1, max_size=width - 1), min_size=1, max_size=5))


@given(masks, st.integers(0, 1000), st.sampled_from([0.5, 1.0]), st.booleans())
def test_values_and_logits_of_loss_tokens_are_those_of_their_sample_and_position(
        rows: list[list[bool]], seed: int, temperature: float, packed: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    n, width, vocab = len(rows), len(rows[0]) + 1, 3
    tokens = torch.randint(0, vocab, (n, width), generator=g)
    per_token, per_sample = torch.randn(n, width, generator=g), torch.randn(n, generator=g)
    logits = torch.randn(n, width - 1, vocab, generator=g)
    # As short as the mask allows: packed rows differ in length.
    lengths = [max((t + 2 for t, trained in enumerate(row) if trained), default=1) for row in rows]
    batch = Batch({"tokens": tokens, "lengths": torch.tensor(lengths),
                   "loss_mask": torch.tensor([[False, *row] for row in rows])})
    micro = (MicroBatch.packed if packed else MicroBatch.padded)(torch.arange(n), batch)
    index = LossTokens.of(micro, torch.device("cpu"))
    # The mask of a row begins with its second token: nothing predicts the first.
    expected = [(i, t + 1) for i, row in enumerate(rows) for t, trained in enumerate(row) if trained]
    assert index.rows.tolist() == [i for i, _ in expected]
    assert index.targets.tolist() == [int(tokens[i, t]) for i, t in expected]
    assert index.values(per_token).tolist() == [float(per_token[i, t]) for i, t in expected]
    assert index.values(per_sample).tolist() == [float(per_sample[i]) for i, _ in expected]
    inside = torch.arange(width - 1) < (torch.tensor(lengths) - 1).clamp(min=1)[:, None]
    picked = index.logits(logits[inside][None] if packed else logits, temperature)
    assert picked.shape == (len(expected), vocab)
    for (i, t), found in zip(expected, picked, strict=True):
        torch.testing.assert_close(found, logits[i, t - 1] / temperature)
