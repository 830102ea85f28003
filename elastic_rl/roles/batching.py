"""Makes the tensors of a train step from sampled prompt groups. Pure."""

from __future__ import annotations

import torch

from elastic_rl.engine.client import Sample
from elastic_rl.trainer.batch import TrainBatch


def make_batch(prompts: list[list[int]], groups: list[list[Sample]], advantages: list[list[float]], ordinals: list[int],
               *, max_prompt: int, max_response: int) -> TrainBatch:
    """Right-pads to fixed shapes, the same in every step of a run.

    ``groups``[g][k] is sample k of prompt g. Result: tokens [N, max_prompt + max_response] int64, where N counts all
    samples; engine_logprobs [N, max_response] fp32, padded with 0.
    """
    rows = [(prompt, sample, adv) for prompt, group, row in zip(prompts, groups, advantages, strict=True)
            for sample, adv in zip(group, row, strict=True)]
    n = len(rows)
    tokens = torch.zeros(n, max_prompt + max_response, dtype=torch.int64)
    logprobs = torch.zeros(n, max_response)
    for i, (prompt, sample, _) in enumerate(rows):
        sequence = prompt + sample.token_ids
        tokens[i, :len(sequence)] = torch.tensor(sequence)
        logprobs[i, :len(sample.logprobs)] = torch.tensor(sample.logprobs)
    return TrainBatch(
        tokens=tokens,
        prompt_len=torch.tensor([len(p) for p, _, _ in rows]),
        response_len=torch.tensor([len(s.token_ids) for _, s, _ in rows]),
        engine_logprobs=logprobs,
        advantages=torch.tensor([a for _, _, a in rows], dtype=torch.float32),
        policy_versions=torch.tensor([s.version for _, s, _ in rows]),
        groups=torch.tensor(ordinals),
    )
