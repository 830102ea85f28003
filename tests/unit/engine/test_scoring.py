"""Tokens that a model is asked about: the request, and its answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest

from elastic_rl.engine.client import GenerateClient
from elastic_rl.engine.scoring import LEAST_LOGPROB, ScoreRequest, TokenScores, parse_scores, request_body
from elastic_rl.errors import EngineFailed

SEQUENCE = ScoreRequest((5, 6, 7, 8), 2)


def answer(ids: tuple[int, ...] = (6, 7, 8), logprob: float = -0.5) -> dict[str, Any]:
    """The answer of SGLang, from the token before the first one that is scored on."""
    entries = [[None if i == 0 else logprob * i, token, None] for i, token in enumerate(ids)]
    tops = [None if i == 0 else [[-0.1 * i, 3, None], [-2.0, token, None]] for i, token in enumerate(ids)]
    return {"meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": entries,
                          "input_top_logprobs": tops}}


def test_scores_are_of_the_tokens_from_the_first_one_on() -> None:
    found = parse_scores(answer(), SEQUENCE, 2)
    assert found.logprobs.tolist() == [-0.5, -1.0] and found.top_ids.tolist() == [[3, 7], [3, 8]]
    np.testing.assert_allclose(found.top_logprobs, [[-0.1, -2.0], [-0.2, -2.0]])
    plain = parse_scores(answer(), SEQUENCE, 0)
    assert plain.top_ids.shape == plain.top_logprobs.shape == (2, 0)


def test_scores_from_before_the_first_token_are_left_out() -> None:
    assert parse_scores(answer((5, 6, 7, 8)), SEQUENCE, 2).logprobs.tolist() == [-1.0, -1.5]
    assert request_body([SEQUENCE, ScoreRequest((5, 6), 1)], 2)["logprob_start_len"] == 0


def test_sequence_with_tokens_that_the_model_does_not_have_has_no_scores() -> None:
    assert parse_scores(answer((6, 7, 0)), SEQUENCE, 2) is None


@pytest.mark.parametrize("wrong", [answer(logprob=float("nan")), {"meta_info": {}}])
def test_answer_that_cannot_be_read_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse_scores(wrong, SEQUENCE, 2)


def test_tokens_that_the_model_rules_out_have_finite_scores() -> None:
    assert parse_scores(answer(logprob=float("-inf")), SEQUENCE, 2).logprobs.tolist() == [LEAST_LOGPROB] * 2


@pytest.mark.parametrize("first", [0, 4, -1])
def test_first_token_has_something_before_it(first: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 3"):
        ScoreRequest((5, 6, 7, 8), first)


def test_client_asks_for_scores_and_generates_nothing() -> None:
    bodies = []

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        unreadable = {"meta_info": {"finish_reason": {"type": "length"}}}
        return httpx.Response(200, json=[answer() if len(bodies) > 1 else unreadable] * 2)

    async def ask() -> list[TokenScores | None]:
        client = GenerateClient("http://router", timeout_s=5, retries=1)
        client._http = httpx.MockTransport(handle)
        return await client.score([SEQUENCE, SEQUENCE], 2)

    with pytest.raises(EngineFailed, match="cannot be read"):
        asyncio.run(ask())
    assert [one.logprobs.tolist() for one in asyncio.run(ask())] == [[-0.5, -1.0]] * 2
    assert bodies[1] == request_body([SEQUENCE, SEQUENCE], 2)
    assert bodies[1]["logprob_start_len"] == 1 and bodies[1]["sampling_params"]["max_new_tokens"] == 0


def test_sequence_with_tokens_that_the_model_does_not_have_reaches_no_engine() -> None:
    bodies = []

    def handle(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=[answer()])

    async def ask(*sequences: ScoreRequest) -> list[TokenScores | None]:
        client = GenerateClient("http://router", timeout_s=5, retries=1, vocabulary=9)
        client._http = httpx.MockTransport(handle)
        return await client.score(sequences, 2)

    foreign = ScoreRequest((5, 9, 7), 1)
    assert asyncio.run(ask(foreign)) == [None] and not bodies
    first, second = asyncio.run(ask(foreign, SEQUENCE))
    assert first is None and second is not None and bodies == [request_body([SEQUENCE], 2)]
