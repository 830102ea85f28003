"""Samples of several turns, for jobs whose task has one: each answer is begun, interrupted and gone on with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from elastic_rl.data.samples import Sample, Segment
from elastic_rl.engine.client import GenerateClient
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.errors import ConfigError

_FIRST = 1
"""Tokens of the first turn."""


async def generate(request: PromptRequest, engines: GenerateClient) -> Sequence[Sample]:
    """Samples of two turns, between which stands the last token of the prompt, which the policy has not written. Raises
    ConfigError for responses that are too short."""
    prompt, sampling = request.prompt.token_ids, request.sampling
    between = Segment(prompt[-1:], loss=False)
    rest = sampling.max_new_tokens - _FIRST - len(between.token_ids)
    if rest < 1:
        raise ConfigError(f"a response of {sampling.max_new_tokens} tokens has no room for two turns",
                          hint="set a larger data.options.operand_below")
    first = await engines.generate(prompt, replace(sampling, max_new_tokens=_FIRST), request.samples)

    async def second(index: int, begun: Sample) -> Sample:
        seed = None if sampling.seed is None else sampling.seed + index  # else equal first turns have equal second ones
        [found] = await engines.generate((*prompt, *begun.response_ids, *between.token_ids),
                                         replace(sampling, max_new_tokens=rest, seed=seed), 1)
        return replace(found, segments=(*begun.segments, between, *found.segments))

    return await asyncio.gather(*(second(index, begun) for index, begun in enumerate(first)))
