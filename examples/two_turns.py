"""A way to generate of one's own: two turns, between which the environment asks for another answer, which counts.

    PYTHONPATH=examples elastic-rl train -c examples/two_turns.yaml --with-cluster
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from elastic_rl.data.samples import Sample, Segment
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.generation import PromptRequest

AGAIN = 3
"""Last tokens of a prompt: the question mark, the end of the turn, and what begins an answer."""


async def generate(request: PromptRequest, engines: GenerateClient) -> Sequence[Sample]:
    """Gives as many samples as requested, each of a first turn, the end of the question once more, and a second
    turn."""
    # All segments of a sample together may be as long as a response.
    room = request.sampling.max_new_tokens - AGAIN
    turn = replace(request.sampling, max_new_tokens=max(1, room // 2))
    first = await engines.generate(request.prompt.token_ids, turn, request.samples)
    return await asyncio.gather(*(second_turn(request, engines, turn, sample, i) for i, sample in enumerate(first)))


async def second_turn(request: PromptRequest, engines: GenerateClient, turn: Sampling, first: Sample, index: int
                      ) -> Sample:
    # The policy did not write these tokens: they have no log-probs, and it is not trained on them.
    again = Segment(request.prompt.token_ids[-AGAIN:], loss=False)
    so_far = (*request.prompt.token_ids, *first.response_ids, *again.token_ids)
    # A seed of its own: samples whose first turns are equal would else have the same second one.
    own = turn if turn.seed is None else replace(turn, seed=turn.seed + index)
    [second] = await engines.generate(so_far, own, 1)
    return replace(second, segments=(*first.segments, again, *second.segments))
