"""The generation client: batches of prompt groups, versions of samples, retries, failures as EngineFailed."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from elastic_rl.engine.client import BATCH, GenerateClient, Sampling, parse_sample, sequences_of_request, share_requests
from elastic_rl.errors import EngineFailed


def answer(tokens, versions=("3",), finish="stop"):
    return {"output_ids": tokens, "meta_info": {
        "finish_reason": {"type": finish}, "weight_version": versions[-1],
        "output_token_logprobs": [[-0.5, t, None] for t in tokens],
        "weight_versions": [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)]}}


def client_over(handler, **kwargs):
    client = GenerateClient("http://router", timeout_s=5, retries=kwargs.pop("retries", 3), **kwargs)
    client._http = httpx.AsyncClient(transport=httpx.MockTransport(handler))
    return client


def echo(bodies):
    def handle(request):
        body = json.loads(request.content)
        bodies.append(body)
        return httpx.Response(200, json=[answer([p[0]]) for p in body["input_ids"]])
    return handle


def ask(client, prompts, n=2, max_new_tokens=4):
    async def run():
        return await asyncio.gather(*(client.generate(p, Sampling(max_new_tokens, stop_token_ids=(1,), seed=5), n)
                                      for p in prompts))
    return asyncio.run(run())


def test_concurrent_groups_share_requests_and_each_gets_its_own_samples():
    bodies = []
    groups = ask(client_over(echo(bodies), batch=8), [[i, 7] for i in range(10)])
    assert [[s.response_ids for s in g] for g in groups] == [[(i,), (i,)] for i in range(10)]
    assert sorted(len(b["input_ids"]) for b in bodies) == [4, 8, 8]
    assert bodies[0]["sampling_params"]["sampling_seed"] == 5
    assert bodies[0]["sampling_params"]["top_p"] == 1.0 and bodies[0]["sampling_params"]["top_k"] == -1


def test_long_responses_are_shared_out_in_smaller_requests():
    """All samples of a request go to one engine."""
    bodies = []
    ask(client_over(echo(bodies)), [[i] for i in range(8)], n=4, max_new_tokens=256)
    assert [len(b["input_ids"]) for b in bodies] == [16, 16]
    bodies.clear()
    ask(client_over(echo(bodies)), [[1], [2]], n=4, max_new_tokens=100_000)
    assert [len(b["input_ids"]) for b in bodies] == [4, 4], "a group is in one request, however long"
    assert sequences_of_request(4) == sequences_of_request(32) == BATCH


def test_aborted_or_failed_request_is_retried():
    replies = [httpx.Response(503), httpx.Response(200, json=[answer([5], finish="abort"), answer([5])]),
               httpx.Response(200, json=[answer([5]), answer([6])])]
    [group] = ask(client_over(lambda _: replies.pop(0)), [[1]])
    assert [s.response_ids for s in group] == [(5,), (6,)] and not replies


def test_unreachable_pool_raises_engine_failed_for_every_group():
    def down(request):
        raise httpx.ConnectError("refused")
    async def run():
        client = client_over(down, retries=2)
        return await asyncio.gather(*(client.generate([i], Sampling(1), 1)
                                      for i in range(3)), return_exceptions=True)
    assert all(isinstance(e, EngineFailed) and "2 attempts" in str(e) for e in asyncio.run(run()))


def test_sample_over_a_weight_change_names_both_versions_and_counts_as_the_older():
    sample = parse_sample(answer([5, 6], versions=("3", "4")))
    assert (sample.oldest_version, sample.versions) == (3, (3, 4))
    assert [(s.token_ids, s.logprobs, s.version) for s in sample.segments] == [((5,), (-0.5,), 3), ((6,), (-0.5,), 4)]


def test_versions_that_do_not_cover_the_tokens_count_as_the_oldest():
    broken = answer([5, 6, 7], versions=("4", "3"))
    assert parse_sample(broken).segments[0].version == 3 and len(parse_sample(broken).segments) == 1


def test_sample_of_an_engine_without_a_version_has_version_zero():
    assert parse_sample(answer([5], versions=("default",))).oldest_version == 0


@pytest.mark.parametrize("status", [400])
def test_refused_request_is_not_retried(status):
    calls = []
    def refuse(request):
        calls.append(1)
        return httpx.Response(status, text="too long")
    with pytest.raises(EngineFailed, match="refused"):
        ask(client_over(refuse), [[1]])
    assert len(calls) == 1


def test_groups_of_one_prompt_are_in_different_requests_when_they_are_sampled_by_seeds():
    """A server derives the seed of a sample from how often its prompt came before in the request."""
    groups = [([1, 2], 2, None), ([3], 2, None), ([1, 2], 2, None)]
    assert [len(b) for b in share_requests(groups, 128, apart=False)] == [3]
    assert [[g[0] for g in b] for b in share_requests(groups, 128, apart=True)] == [[[1, 2], [3]], [[1, 2]]]
    assert [len(b) for b in share_requests(groups, 4, apart=False)] == [2, 1]
