"""Samples of two turns, as the scenario ``turns`` makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from chaos_tests.traffic.turns import generate
from elastic_rl.data.samples import Sample, Segment
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.errors import ConfigError

PROMPT = (5, 6, 7)


class Engines:
    """Answers with the tokens 11, 12 and so on."""

    def __init__(self) -> None:
        self.asked = list[tuple[tuple[int, ...], int, int | None]]()

    async def generate(self, tokens: Sequence[int], sampling: Sampling, samples: int) -> list[Sample]:
        made = []
        for _ in range(samples):
            self.asked.append((tuple(tokens), sampling.max_new_tokens, sampling.seed))
            made.append(Sample((Segment((10 + len(self.asked),) * sampling.max_new_tokens),)))
        return made


def made(most: int) -> tuple[Engines, Sequence[Sample]]:
    engines, request = Engines(), SimpleNamespace(prompt=SimpleNamespace(token_ids=PROMPT), samples=2,
                                                  sampling=Sampling(most, seed=3))
    return engines, asyncio.run(generate(cast(PromptRequest, request), cast(GenerateClient, engines)))


def test_second_turn_goes_on_from_the_first_and_what_stands_between() -> None:
    engines, samples = made(4)
    first, second = engines.asked[:2], engines.asked[2:]
    assert first == [(PROMPT, 1, 3), (PROMPT, 1, 3)]
    assert second == [((*PROMPT, 11, 7), 2, 3), ((*PROMPT, 12, 7), 2, 4)], "equal first turns get other second ones"
    assert [sample.response_ids for sample in samples] == [(11, 7, 13, 13), (12, 7, 14, 14)]
    assert [[segment.loss for segment in sample.segments] for sample in samples] == [[True, False, True]] * 2


def test_response_without_room_for_two_turns_is_refused() -> None:
    with pytest.raises(ConfigError, match="two turns"):
        made(2)
