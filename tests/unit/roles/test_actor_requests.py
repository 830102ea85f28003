"""Requests to a role end with the actor that sent them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pytest import MonkeyPatch

from elastic_rl import config
from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.generation import GenerateFault, PromptRequest
from elastic_rl.engine.own_generate import ClientOptions, OwnGenerate
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.roles import actor_requests
from elastic_rl.roles.actor_requests import ActorRequests
from elastic_rl.roles.genrm import GenRmRole
from elastic_rl.roles.rollout import GenerationRequest, RolloutRole, decoded, encoded
from elastic_rl.roles.teacher import TeacherRole

MODULE = '''
import asyncio, pathlib

async def generate(request, engines):
    folder = pathlib.Path(request.prompt.text)
    (folder / "begun").touch()
    try:
        await asyncio.Event().wait()
    finally:
        (folder / "cancelled").touch()
'''


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.roles.actor_requests._LOOK_S", 0.01)


class Work:
    """Goes on until it is cancelled, which it takes some time for, or told to end."""

    def __init__(self, clean_up: bool = False) -> None:
        self.begun, self.ends, self.cleaned = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.cancels, self._clean_up = 0, clean_up

    async def __call__(self) -> str:
        self.begun.set()
        try:
            await self.ends.wait()
            return "done"
        except asyncio.CancelledError:
            self.cancels += 1
            try:
                if self._clean_up:
                    await self.cleaned.wait()
            except asyncio.CancelledError:
                self.cancels += 1
            raise


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def test_requests_of_a_predecessor_are_cancelled_once_when_etcd_says_so() -> None:
    async def test() -> None:
        terms = [1]
        reads: list[int] = []

        def read() -> int:
            reads.append(terms[0])
            if len(reads) % 2:
                raise EtcdUnavailable("no member answers")
            return terms[0]

        requests = ActorRequests(read)
        old, slow, newer = Work(), Work(clean_up=True), Work()
        running = [asyncio.ensure_future(requests.run(term, work())) for term, work in ((1, old), (1, slow), (2, newer))
                   if term == 1]
        await asyncio.gather(old.begun.wait(), slow.begun.wait())
        while len(reads) < 4:
            await asyncio.sleep(0.01)
        assert not any(one.done() for one in running), "it is their term"
        terms[0] = 2
        with pytest.raises(Fenced, match="term 1 of the actor is over; the run is in term 2"):
            await running[0]
        successor = asyncio.ensure_future(requests.run(2, newer()))
        before = len(reads)
        while len(reads) < before + 4:
            await asyncio.sleep(0.01)
        assert (slow.cancels, running[1].done(), newer.cancels) == (1, False, 0)
        slow.cleaned.set()
        with pytest.raises(Fenced):
            await running[1]
        newer.ends.set()
        assert await successor == "done"
        requests.close()

    run(test)


def test_request_of_a_successor_ends_those_before_and_refuses_later_ones() -> None:
    async def test() -> None:
        requests = ActorRequests(lambda: 0)  # a read that was made before the successor began
        old, new, late = Work(), Work(), Work()
        first = asyncio.ensure_future(requests.run(3, old()))
        await old.begun.wait()
        second = asyncio.ensure_future(requests.run(4, new()))
        with pytest.raises(Fenced):
            await first
        with pytest.raises(Fenced, match="term 3"):
            await requests.run(3, late())
        assert not late.begun.is_set()
        new.ends.set()
        assert await second == "done"
        requests.close()

    run(test)


def test_request_that_its_caller_cancels_is_cancelled() -> None:
    async def test() -> None:
        requests, work = ActorRequests(lambda: 1), Work()
        call = asyncio.ensure_future(requests.run(1, work()))
        await work.begun.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert work.cancels == 1
        requests.close()

    run(test)


def test_stream_gives_at_once_what_came_while_its_reader_was_busy() -> None:
    async def test() -> None:
        requests, goes_on = ActorRequests(lambda: 1), asyncio.Event()

        async def work(give: Callable[[int], None]) -> None:
            give(0)
            await goes_on.wait()
            for i in (1, 2, 3):
                give(i)
                await asyncio.sleep(0)

        found = []
        async for some in requests.stream(1, work):
            found.append(some)
            goes_on.set()
            for _ in range(9):
                await asyncio.sleep(0)
        assert found == [[0], [1, 2, 3]]
        requests.close()

    run(test)


def test_stream_says_that_it_lives_while_its_work_may_wait_for_its_turn(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(actor_requests, "QUEUES_S", 0.001)

    async def test() -> None:
        requests, goes_on, full = ActorRequests(lambda: 1), asyncio.Event(), True

        async def work(give: Callable[[int], None]) -> None:
            await goes_on.wait()
            give(0)

        stream = requests.stream(1, work, lambda: full)
        assert await anext(stream) == [] == await anext(stream)
        full = False
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.01)
        goes_on.set()
        assert await reading == [0], "what has begun has the reader's limit"
        assert await all_of(stream) == []
        requests.close()

    run(test)


def test_samples_that_cannot_be_read_cost_their_own_group_only() -> None:
    good, bad = (Sample((Segment((5,), (-0.5,), version=3),), reward=reward) for reward in (1.0, math.nan))
    [(first, fault), (second, samples)] = decoded([(4, encoded([bad])), (2, encoded([good]))])
    assert (first, second, samples) == (4, 2, [good])
    assert isinstance(fault, GenerateFault) and "a finite number belongs" in fault.why and not fault.shared


def test_stream_gives_what_it_has_before_it_raises() -> None:
    async def test() -> None:
        requests, found = ActorRequests(lambda: 1), list[list[int]]()

        async def work(give: Callable[[int], None]) -> None:
            give(0)
            raise ValueError("x")

        with pytest.raises(ValueError, match="x"):
            async for some in requests.stream(1, work):
                found.append(some)
        assert found == [[0]]
        requests.close()

    run(test)


@pytest.mark.parametrize("how", ["closed", "cancelled", "term over"])
def test_stream_that_ends_early_has_cancelled_its_work(how: str) -> None:
    async def test() -> None:
        requests, work = ActorRequests(lambda: 1), Work(clean_up=True)

        async def given(give: Callable[[int], None]) -> None:
            give(0)
            await work()

        stream = requests.stream(1, given)
        assert await anext(stream) == [0]
        await work.begun.wait()
        assert isinstance(stream, AsyncGenerator)
        reading = asyncio.ensure_future(anext(stream) if how != "closed" else stream.aclose())
        await asyncio.sleep(0)
        if how == "cancelled":
            reading.cancel()
        elif how == "term over":
            successor = asyncio.ensure_future(requests.run(2, Work()()))
        while not work.cancels:
            await asyncio.sleep(0)
        assert not reading.done(), "it ends with its work"
        work.cleaned.set()
        with contextlib.suppress(asyncio.CancelledError) if how != "term over" else pytest.raises(Fenced):
            await reading
        assert work.cancels == 1
        if how == "term over":
            successor.cancel()
        requests.close()

    run(test)


# -- the roles ---------------------------------------------------------------------------------------------------------
class Engines:
    """Requests under way at the engines, of which none is answered."""

    def __init__(self) -> None:
        self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError

    def client(self) -> GenerateClient:
        client = GenerateClient("http://router", timeout_s=600, retries=1)
        client._http = httpx.MockTransport(self.handle)
        return client


def made(cls: Any, terms: list[int]) -> Any:
    role = cls.__new__(cls)
    role.requests = ActorRequests(lambda: terms[0])
    role.working = lambda count=1: contextlib.nullcontext()
    return role


async def all_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [one async for one in stream]


def rollout(role: Any, client: GenerateClient) -> Coroutine[Any, Any, Any]:
    role.ctx, role.client, role._vocabulary = SimpleNamespace(config=config.Config()), client, 50
    role.generate_fn = lambda prompt, engines: engines.generate(prompt.prompt.token_ids, prompt.sampling, 2)
    return all_of(role.generate(GenerationRequest(tuple(
        PromptRequest(i, Prompt((5,)), Sampling(12), 2) for i in range(3)), 1), 1))


def judge(role: Any, client: GenerateClient) -> Coroutine[Any, Any, Any]:
    pool = SimpleNamespace(client=client, tokenizer=SimpleNamespace(eos_ids=(1,)), prompts=SimpleNamespace(
        of=lambda request: ([], [])))
    role._pool = lambda name: pool
    return role.judge(SimpleNamespace(options=SimpleNamespace(pool="judge")), 1)  # type: ignore[no-any-return]


def teach(role: Any, client: GenerateClient) -> Coroutine[Any, Any, Any]:
    role._client = client
    return role.score([SimpleNamespace(token_ids=(1, 2, 3), first=1)], 2, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("cls", "ask"), [(RolloutRole, rollout), (GenRmRole, judge), (TeacherRole, teach)])
def test_what_engines_do_for_a_predecessor_ends(cls: Any, ask: Callable[..., Any]) -> None:
    async def test() -> None:
        terms, engines = [1], Engines()
        role = made(cls, terms)
        asked = asyncio.ensure_future(ask(role, engines.client()))
        await engines.begun.wait()
        terms[0] = 2
        with pytest.raises(Fenced):
            await asked
        await engines.cancelled.wait()
        role.requests.close()

    run(test)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: MonkeyPatch) -> Iterator[OwnGenerate]:
    (tmp_path / "waits_forever.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    generate = OwnGenerate("waits_forever:generate", ClientOptions("http://127.0.0.1:9", 5.0, 1, 50))
    yield generate
    generate.close()


def test_what_a_function_of_the_users_does_for_a_predecessor_ends(own: OwnGenerate, tmp_path: Path) -> None:
    """As does an environment, which runs in such a process too."""
    async def test() -> None:
        terms = [1]
        role = made(RolloutRole, terms)
        role.ctx, role.client, role._vocabulary, role.generate_fn = SimpleNamespace(config=config.load(overrides=[
            "--rollout.generate=waits_forever:generate", "--rollout.generate_timeout_s=3600"])), None, 50, own
        asked = asyncio.ensure_future(all_of(role.generate(GenerationRequest((
            PromptRequest(0, Prompt((5,), str(tmp_path)), Sampling(12), 2),), 1), 1)))
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        terms[0] = 2
        with pytest.raises(Fenced):
            await asked
        assert (tmp_path / "cancelled").exists()
        role.requests.close()

    run(test)
