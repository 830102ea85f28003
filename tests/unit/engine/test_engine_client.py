"""The generation client: batches of prompt groups, versions of samples, retries, failures as EngineFailed."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import tracemalloc

import httpx
import pytest

from elastic_rl.engine import packed_answers
from elastic_rl.engine.client import (
    BATCH,
    Caller,
    GenerateClient,
    Sampling,
    answer_limit,
    parse_sample,
    sequences_of_request,
    share_requests,
)
from elastic_rl.engine.scoring import ScoreRequest
from elastic_rl.engine.sglang.seeds import derived_seeds
from elastic_rl.errors import EngineFailed, PluginFailed, RequestRefused


def answer(tokens, versions=("3",), finish="stop"):
    return {"output_ids": tokens, "meta_info": {
        "finish_reason": {"type": finish}, "weight_version": versions[-1],
        "output_token_logprobs": [[-0.5, t, None] for t in tokens],
        "weight_versions": [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)]}}


def client_over(handler, **kwargs):
    client = GenerateClient("http://router", timeout_s=5, retries=kwargs.pop("retries", 3), **kwargs)
    client._http = httpx.MockTransport(handler)
    return client


def echo(bodies):
    def handle(request):
        body = json.loads(request.content)
        bodies.append(body)
        return httpx.Response(200, json=[answer([p[0]]) for p in body["input_ids"]])
    return handle


def packed(content):
    return httpx.Response(200, content=content, headers={"Content-Type": packed_answers.MEDIA_TYPE})


def ask(client, prompts, n=2, max_new_tokens=4):
    async def run():
        return await asyncio.gather(*(client.generate(p, Sampling(max_new_tokens, stop_token_ids=(1,), seed=5), n)
                                      for p in prompts))
    return asyncio.run(run())


@pytest.mark.parametrize(("tokens", "versions", "finish"), [
    ([5, 6], ("3", "4"), "length"), ([5], ("default",), "stop"), ([], (), "stop")])
def test_engines_of_this_release_answer_packed_and_others_as_sglang_does(tokens, versions, finish):
    given = answer(tokens, versions or ("3",), finish)
    given["meta_info"]["weight_versions"] = given["meta_info"]["weight_versions"][:len(versions)]
    bodies = []

    def handle(request):
        bodies.append(json.loads(request.content))
        return packed(packed_answers.pack([given] * 2)) if len(bodies) > 1 else httpx.Response(200, json=[given] * 2)

    async def run():
        client = client_over(handle, retries=1)
        return [await client.generate([8], Sampling(4), 2) for _ in range(2)]

    as_json, as_bytes = asyncio.run(run())
    assert as_json == as_bytes and [s.response_ids for s in as_bytes] == [tuple(tokens)] * 2
    assert all(body["return_bytes"] is True for body in bodies)


def test_packed_answers_of_another_number_or_form_fail_the_group():
    raw = packed_answers.pack([answer([5])] * 2)
    for content in (packed_answers.pack([answer([5])]), raw[:-1], raw + b"x", b"", b"{}"):
        with pytest.raises(EngineFailed):
            ask(client_over(lambda _, content=content: packed(content), retries=1), [[5]])


def test_concurrent_groups_share_requests_and_each_gets_its_own_samples():
    bodies = []
    groups = ask(client_over(echo(bodies), batch=8), [[i, 7] for i in range(10)])
    assert [[s.response_ids for s in g] for g in groups] == [[(i,), (i,)] for i in range(10)]
    assert sorted(len(b["input_ids"]) for b in bodies) == [4, 8, 8]
    assert bodies[0]["sampling_params"]["sampling_seed"] == 5
    assert bodies[0]["sampling_params"]["top_p"] == 1.0 and bodies[0]["sampling_params"]["top_k"] == -1


@pytest.mark.parametrize("wrong", [16, -1, 300000, 1.0])
def test_id_that_the_model_does_not_have_reaches_no_engine(wrong):
    bodies = []
    client = client_over(echo(bodies), vocabulary=16)
    with pytest.raises(PluginFailed, match=f"token id {wrong}, and their model has 16 tokens"):
        ask(client, [[1, wrong]])
    with pytest.raises(PluginFailed):
        ask(client_over(echo(bodies)), [[2**31]])
    assert not bodies
    assert len(ask(client_over(echo(bodies), vocabulary=16), [[1, 15]])[0]) == 2


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


def test_aborted_sample_goes_on_from_its_tokens_with_each_parts_version():
    bodies = []
    replies = [[answer([5, 6], versions=("3", "3"), finish="abort"), answer([9], versions=("3",))],
               [answer([], versions=("4",), finish="abort")],
               [answer([7], versions=("4",), finish="abort")],
               [answer([1], versions=("5",))]]

    def handle(request):
        bodies.append(json.loads(request.content))
        return httpx.Response(200, json=replies.pop(0))

    client = client_over(handle)
    sampling = Sampling(4, stop_token_ids=(1,), resume=True)
    first, second = asyncio.run(client.generate([8], sampling, 2))
    assert [(s.token_ids, s.version) for s in first.segments if s.token_ids] == [
        ((5,), 3), ((6,), 3), ((7,), 4), ((1,), 5)]
    assert first.finish_reason == "stop" and (first.oldest_version, first.versions) == (3, (3, 4, 5))
    assert second.response_ids == (9,)
    assert [b["input_ids"] for b in bodies[1:]] == [[[8, 5, 6]], [[8, 5, 6]], [[8, 5, 6, 7]]]
    assert [b["sampling_params"]["max_new_tokens"] for b in bodies] == [4, 2, 2, 1]


def test_samples_that_were_aborted_alike_do_not_become_copies_of_one_another():
    """An engine gives back without a token what still waited in it."""
    seeds = []

    def handle(request):
        body = json.loads(request.content)
        of_each = derived_seeds(body["sampling_params"]["sampling_seed"], body["input_ids"])
        seeds.append(of_each)
        finish = "abort" if len(seeds) == 1 else "stop"
        return httpx.Response(200, json=[
            answer([9] if i % 2 and finish == "abort" else [] if finish == "abort" else [seed], finish=finish)
            for i, seed in enumerate(of_each)])

    async def run():
        return await client_over(handle).generate([1, 2], Sampling(8, seed=5, resume=True), 6)

    samples = asyncio.run(run())
    assert len({s.response_ids for s in samples}) == 6
    first, *rest = seeds
    assert len({seed for [seed] in rest}) == 6 and not {seed for [seed] in rest} & set(first[1:])
    seeds.clear()
    assert asyncio.run(run()) == samples, "they follow from the seed"


def test_sample_that_was_aborted_at_its_limit_is_complete():
    client = client_over(lambda _: httpx.Response(200, json=[answer([5, 6], versions=("3", "4"), finish="abort")]))
    [sample] = asyncio.run(client.generate([8], Sampling(2, resume=True), 1))
    assert sample.response_ids == (5, 6) and sample.finish_reason == "length"


@pytest.mark.parametrize("last", [1, 2, 16])
def test_aborted_sample_is_not_continued_after_an_end_token_or_an_id_that_the_model_does_not_have(last):
    """1 is the request's end token, 2 the model's own, and 16 an id beyond its vocabulary: an engine that aborts does
    not look at its last token."""
    bodies = []
    replies = [[answer([5], finish="abort")], [answer([6, last], versions=("4", "4"), finish="abort")]]

    def handle(request):
        bodies.append(json.loads(request.content)["input_ids"])
        return httpx.Response(200, json=replies.pop(0))

    client = client_over(handle, vocabulary=16, end_ids=(2,))
    [sample] = asyncio.run(client.generate([8], Sampling(8, stop_token_ids=(1,), resume=True), 1))
    assert (sample.response_ids, sample.finish_reason) == ((5, 6, last), "stop")
    assert bodies == [[[8]], [[8, 5]]]


def test_samples_of_a_request_end_with_the_one_that_fails():
    """Two are continued; the engine refuses the one while it works at the other."""
    both, ended = asyncio.Event(), []

    async def handle(request):
        prompts = json.loads(request.content)["input_ids"]
        if len(prompts) == 2:
            return httpx.Response(200, json=[answer([5], finish="abort"), answer([6], finish="abort")])
        if prompts == [[8, 5]]:
            await both.wait()
            return httpx.Response(400, text="refused")
        both.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(prompts)

    async def run():
        with pytest.raises(RequestRefused):
            await client_over(handle).generate([8], Sampling(8, resume=True), 2)
        assert ended == [[[8, 6]]]

    asyncio.run(run())


def test_sample_that_gets_no_further_token_fails_in_the_end():
    client = client_over(lambda _: httpx.Response(200, json=[answer([], finish="abort")]), retries=2)
    with pytest.raises(EngineFailed, match="without a further token"):
        asyncio.run(client.generate([8], Sampling(2, resume=True), 1))


def test_unreachable_pool_raises_engine_failed_for_every_group():
    def down(request):
        raise httpx.ConnectError("refused")
    async def run():
        client = client_over(down, retries=2)
        return await asyncio.gather(*(client.generate([i], Sampling(1), 1)
                                      for i in range(3)), return_exceptions=True)
    assert all(isinstance(e, EngineFailed) and "2 attempts" in str(e) for e in asyncio.run(run()))


def test_sample_over_a_weight_change_counts_as_the_older_version():
    sample = parse_sample(answer([5, 6], versions=("3", "4")))
    assert (sample.oldest_version, sample.versions) == (3, (3, 4))
    assert [(s.token_ids, s.logprobs, s.version) for s in sample.segments] == [((5,), (-0.5,), 3), ((6,), (-0.5,), 4)]


def test_versions_that_do_not_cover_the_tokens_count_as_the_oldest():
    broken = answer([5, 6, 7], versions=("4", "3"))
    assert parse_sample(broken).segments[0].version == 3 and len(parse_sample(broken).segments) == 1


@pytest.mark.parametrize("spans", [[(0, 2 * 10**7)], [(0, 10**15)], [(0, 3), (3, 1), (1, 3)], [(1, 3)], [(0, 2)],
                                   [(0, 1), (2, 3)], [(0, 2), (1, 3)], [(-1, 3)]])
def test_bounds_of_versions_are_compared_and_not_counted_through(spans):
    given = answer([5, 6, 7], versions=("4",) * 3)
    given["meta_info"]["weight_versions"] = [
        {"start": start, "end": end, "version": str(9 - i)} for i, (start, end) in enumerate(spans)]
    tracemalloc.start()
    sample = parse_sample(given)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [len(s.token_ids) for s in sample.segments] == [3]
    assert sample.oldest_version == 10 - len(spans) and peak < 1 << 20


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


def test_prompt_that_is_refused_fails_alone():
    def handle(request):
        prompts = json.loads(request.content)["input_ids"]
        return httpx.Response(400, text="too long") if [9] in prompts else httpx.Response(
            200, json=[answer([p[0]]) for p in prompts])

    async def run():
        client = client_over(handle)
        return await asyncio.gather(*(client.generate([i], Sampling(1), 1) for i in (8, 9, 10)), return_exceptions=True)

    first, refused, last = asyncio.run(run())
    assert [s.response_ids for s in (*first, *last)] == [(8,), (10,)]
    assert isinstance(refused, RequestRefused) and "too long" in str(refused)


def test_request_that_nobody_waits_for_any_more_is_cancelled():
    begun, cancelled = asyncio.Event(), []

    async def handle(request):
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def run():
        client = client_over(handle)
        both = [asyncio.ensure_future(client.generate([i], Sampling(1), 1)) for i in (8, 9)]
        await begun.wait()
        both[0].cancel()
        await asyncio.sleep(0.05)
        assert not cancelled, "one waits"
        both[1].cancel()
        await asyncio.gather(*both, *client._sending, return_exceptions=True)

    asyncio.run(run())
    assert cancelled == [1]


def test_seeded_groups_of_one_prompt_are_in_different_requests():
    """A server derives the seed of a sample from how often its prompt came before in the request."""
    groups = [([1, 2], 2, None), ([3], 2, None), ([1, 2], 2, None)]
    assert [len(b) for b in share_requests(groups, 128, apart=False)] == [3]
    assert [[g[0] for g in b] for b in share_requests(groups, 128, apart=True)] == [[[1, 2], [3]], [[1, 2]]]
    assert [len(b) for b in share_requests(groups, 4, apart=False)] == [2, 1]


def test_turns_of_a_conversation_name_their_route_until_it_fails():
    """The router keeps sending them to one engine until it knows that this one is gone."""
    seen = []

    def handle(request):
        seen.append((json.loads(request.content)["input_ids"], request.headers.get("X-SMG-Routing-Key")))
        if seen[-1][1] == "b":
            return httpx.Response(500)
        return httpx.Response(200, json=[answer([1]) for _ in seen[-1][0]])

    async def run():
        client = client_over(handle)
        await asyncio.gather(*(client.generate([i], Sampling(4, seed=5), 2, route) for i, route in enumerate("aab")),
                             client.generate([3], Sampling(4, seed=5), 1))
    asyncio.run(run())
    assert sorted(seen, key=str) == sorted([
        ([[0], [0], [1], [1]], "a"), ([[2], [2]], "b"), ([[2], [2]], None), ([[3]], None)], key=str)


@pytest.mark.parametrize(("reply", "why"), [
    (lambda: httpx.Response(200, content=b" " * (1 << 20)), "more than"),
    (lambda: httpx.Response(503, content=b"x" * (1 << 20)), "more than"),
    (lambda: httpx.Response(200, content=gzip.compress(b" " * 1000), headers={"Content-Encoding": "gzip"}),
     "compressed")])
def test_answer_that_is_too_long_is_not_read_to_its_end(reply, why):
    seen = []

    def handle(request):
        seen.append(request.headers["Accept-Encoding"])
        return reply()

    with pytest.raises(EngineFailed, match=why):
        ask(client_over(handle, retries=2), [[1]])
    assert seen == ["identity"] * 2


def test_limit_of_an_answer_grows_with_what_is_asked_for():
    body = {"input_ids": [[1] * 8] * 2, "sampling_params": {"max_new_tokens": 24}}
    assert answer_limit(body) == 3 * 65536 + 64 * 1024
    assert answer_limit({**body, "top_logprobs_num": 20}) == 3 * 65536 + 64 * (1024 + 20 * 128)
    full = [{**answer(list(range(100_000, 132_768)), versions=("1234567",) * 32_768), "text": "\\u0000" * 32_768}]
    assert len(json.dumps(full)) * 3 < answer_limit({"input_ids": [[1]], "sampling_params": {"max_new_tokens": 32_768}})


def test_answer_that_comes_in_drops_ends_with_the_time_of_a_request():
    """Each piece comes well within the limit of one read."""
    async def handle(reader, writer):
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = GenerateClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=0.5, retries=1)
        try:
            async with asyncio.timeout(60):
                await client.generate([1], Sampling(4), 1)
        finally:
            await client.close()
            server.close()

    with pytest.raises(EngineFailed, match="no whole answer within 0.5 s"):
        asyncio.run(run())


def test_wrong_key_is_told_from_engines_that_are_away():
    with pytest.raises(EngineFailed) as refused:
        ask(client_over(lambda _: httpx.Response(401, text="Unauthorized"), retries=2), [[1]])
    assert "HTTP 401" in refused.value.message and "elastic-rl restart job" in refused.value.hint
    with pytest.raises(EngineFailed) as away:
        ask(client_over(lambda _: httpx.Response(503), retries=1), [[1]])
    assert "elastic-rl engines" in away.value.hint


def test_requests_that_wait_for_a_connection_are_no_failure(monkeypatch):
    """As hundreds of conversations are: each of their turns is a request."""
    monkeypatch.setattr("elastic_rl.engine.client._CONNECTIONS", 3)
    now, most, asked, seen, first, last = 0, 0, 0, [], Caller(), Caller()

    async def handle(reader, writer):
        nonlocal now, most, asked
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(size))
                now, asked = now + 1, asked + 1
                most = max(most, now)
                seen.append((first.is_waiting, last.is_waiting))
                await asyncio.sleep(0.7)  # all of them in turn take longer than timeout_s
                now -= 1
                out = json.dumps([answer([1]) for _ in body["input_ids"]]).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(out) + out)
                await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        client = GenerateClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=2.0, retries=1)

        async def asked_by(caller, numbers):
            with caller.asks():
                await asyncio.gather(*(client.generate([i], Sampling(4 + i, seed=i), 1) for i in numbers))

        await asyncio.gather(asked_by(first, range(3)), asked_by(last, range(3, 12)))
        await client.close()
        server.close()
    asyncio.run(run())
    assert (most, asked) == (3, 12)
    assert not any(waits for waits, _ in seen), "all that it has asked for is with engines"
    assert any(waits for _, waits in seen) and not last.is_waiting


@pytest.mark.parametrize("meta", [
    None, [1], {"finish_reason": 5}, {"finish_reason": {"type": "stop"}, "weight_versions": [5]},
    {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0]],
     "weight_versions": [{"start": 0, "end": 1e400, "version": "1"}]}])
@pytest.mark.parametrize("resume", [False, True])
def test_answer_of_another_form_fails_the_group_and_nobody_waits_for_ever(meta, resume):
    def handle(_request):
        text = json.dumps([{"output_ids": [3], "meta_info": meta}] * 2)
        return httpx.Response(200, content=text, headers={"content-type": "application/json"})

    async def run():
        client = client_over(handle, retries=1)
        async with asyncio.timeout(30):
            await client.generate([5], Sampling(4, resume=resume), 2)

    with pytest.raises(EngineFailed):
        asyncio.run(run())


@pytest.mark.parametrize("body", [5, ["x"], [None], {}, [{"meta_info": {"input_token_logprobs": 1e400}}]])
def test_scores_of_another_form_fail(body):
    async def run():
        client = client_over(lambda _: httpx.Response(200, content=json.dumps(body)), retries=1)
        await client.score([ScoreRequest((5, 6, 7), 1)])

    with pytest.raises(EngineFailed):
        asyncio.run(run())
