"""What episodes wait for a thread is no time of theirs. The time of the event loop is the test's own, and passes only
where a test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from elastic_rl.data.samples import Prompt, Sample, Segment
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.environments.base import Message, NewEpisode, Observation
from elastic_rl.environments.episode_time import WAITS
from elastic_rl.environments.episodes import EpisodeLimits, Episodes
from elastic_rl.environments.threads import OwnThreads
from elastic_rl.environments.tool_parser import ToolCall
from elastic_rl.environments.tools import Tool, Tools, ToolsOptions
from elastic_rl.errors import PluginAway, PluginFailed
from elastic_rl.runtime.abandonable import CallTookTooLong

_LIMIT_S = 60.0
_CALL_S = 3000.0
"""Limit in seconds of a call, which the tool has by itself."""


class OwnTime(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self) -> float:
        return self.now


def run(work: Callable[[OwnTime], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=OwnTime) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, OwnTime)
        runner.run(work(loop))


async def after(loop: OwnTime, seconds: float) -> None:
    """All that is to happen before and at once has happened."""
    for _ in range(20):
        await asyncio.sleep(0)
    loop.now += seconds
    for _ in range(20):
        await asyncio.sleep(0)


class Held:
    """Work of a thread that ends when it is told to."""

    def __init__(self) -> None:
        self.began, self.ends = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.began.set()
        assert self.ends.wait(60)
        return "over"


class Parser:
    def calls(self, text: str) -> list[ToolCall]:
        return [ToolCall("asks", {})] if text == "call" else []


class Writer:
    def text_of(self, ids: Sequence[int]) -> str:
        return "end" if ids[0] else "call"

    def plain_text_of(self, ids: Sequence[int]) -> str:
        return ""

    def may_fit(self, messages: Sequence[Message], room: int) -> bool:
        return True

    def between(self, messages: Sequence[Message]) -> list[int]:
        return [9]


class Engines:
    """Answers at once with a token that is 0 in the first turns, and 1 in the last."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def generate(self, ids: Sequence[int], sampling: Sampling, n: int, route: str = "") -> list[Sample]:
        last = int(list(ids).count(9) >= self._turns - 1)
        return [Sample((Segment((last,), (-0.1,), version=1),))] * n


def played(new: NewEpisode, samples: int = 1, turns: int = 2) -> asyncio.Future[list[Sample]]:
    episodes = Episodes(new, Writer(), EpisodeLimits(8, 100, _LIMIT_S))  # type: ignore[arg-type]
    request = PromptRequest(0, Prompt((1,)), Sampling(1000), samples)
    return asyncio.ensure_future(episodes(request, Engines(turns)))  # type: ignore[arg-type]


def asking(work: Held, threads: int = 1) -> Tools:
    def asks() -> str:
        """Asks."""
        return work()

    return Tools({"asks": Tool.of(asks)}, Parser(), ToolsOptions(  # type: ignore[arg-type]
        tools=["x:asks"], timeout_s=_CALL_S, threads=threads))


def test_calls_that_wait_for_a_thread_cost_their_episodes_nothing() -> None:
    async def play(loop: OwnTime) -> None:
        before, own = Held(), Held()
        tools = asking(own)
        other = asyncio.ensure_future(tools.threads["asks"].run(before))
        group = played(tools, samples=3)
        await after(loop, 10 * _LIMIT_S)
        assert before.began.is_set() and not group.done()
        own.ends.set()
        before.ends.set()
        assert len(await group) == 3 and await other == "over"

    run(play)


def test_an_episode_that_waits_too_long_is_no_fault_of_its_environment() -> None:
    async def play(loop: OwnTime) -> None:
        before = Held()
        tools = asking(Held())
        other = asyncio.ensure_future(tools.threads["asks"].run(before))
        group = played(tools)
        await after(loop, WAITS * _LIMIT_S + 1)
        with pytest.raises(PluginAway, match="waited too long for one of the 1 threads of the tool 'asks'"):
            await group
        before.ends.set()
        assert await other == "over"
        assert await tools.threads["asks"].run(lambda: 5) == 5, "who was given up holds no place"

    run(play)


class Slow:
    """An environment of a user's own: its threads are its own business."""

    def __init__(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._step = step

    async def step(self, text: str) -> Observation:
        await self._step()
        return Observation((Message("user", "go on"),), done=text == "end")

    async def close(self) -> None: ...


@pytest.mark.parametrize(("steps_s", "ends"), [((40, 10), True), ((40, 30), False), ((61,), False)])
def test_time_of_the_environment_itself_counts_over_all_steps(steps_s: Sequence[float], ends: bool) -> None:
    async def play(loop: OwnTime) -> None:
        threads = OwnThreads("it", 1, _CALL_S)

        async def step() -> None:
            held = Held()
            other = asyncio.ensure_future(threads.run(held))
            await asyncio.sleep(0)
            waits = asyncio.ensure_future(threads.run(lambda: None))  # in a task of its own
            await after(loop, 5 * _LIMIT_S)
            held.ends.set()
            await asyncio.gather(other, waits)
            await asyncio.sleep(next(lasts))

        lasts = iter(steps_s)
        group = played(lambda prompt, seed: Slow(step), turns=len(steps_s))
        while not group.done():
            await after(loop, 0.5)
            await asyncio.to_thread(lambda: None)
        if ends:
            assert len(await group) == 1
        else:
            with pytest.raises(PluginFailed, match="rollout.generate_timeout_s") as failed:
                await group
            assert type(failed.value) is PluginFailed

    run(play)


def test_calls_get_their_threads_in_order() -> None:
    async def play(loop: OwnTime) -> None:
        threads, first, order = OwnThreads("it", 1, _CALL_S), Held(), list[int]()
        calls = [asyncio.ensure_future(threads.run(first))]
        await after(loop, 1)
        for number in range(5):
            calls.append(asyncio.ensure_future(threads.run(lambda n=number: order.append(n))))  # type: ignore[misc]
            await after(loop, 1)
        calls[2].cancel()
        await asyncio.wait([calls[2]])  # it leaves the line when the loop runs it; the thread would not wait for that
        first.ends.set()
        await asyncio.gather(*calls, return_exceptions=True)
        assert order == [0, 2, 3, 4]

    run(play)


def test_abandoned_call_still_holds_its_thread_beyond_its_time() -> None:
    async def play(loop: OwnTime) -> None:
        threads, held = OwnThreads("it", 1, _CALL_S), Held()
        given_up = asyncio.ensure_future(threads.run(held))
        await after(loop, 1)
        given_up.cancel()
        waits = asyncio.ensure_future(threads.run(lambda: 5))
        await after(loop, _CALL_S / 2)
        assert not waits.done(), "until then it may be as fast as any"
        await after(loop, _CALL_S / 2)
        with pytest.raises(PluginAway, match="all of its 1 threads run calls that took longer"):
            await waits
        held.ends.set()
        while True:
            try:
                assert await threads.run(lambda: 5) == 5
                return
            except PluginAway:
                await asyncio.sleep(0)

    run(play)


def test_call_that_takes_too_long_is_left_in_its_thread() -> None:
    async def play(loop: OwnTime) -> None:
        threads, held = OwnThreads("it", 2, _CALL_S), Held()
        call = asyncio.ensure_future(threads.run(held))
        await after(loop, _CALL_S + 1)
        with pytest.raises(CallTookTooLong):
            await call
        assert await threads.run(lambda: 5) == 5
        held.ends.set()

    run(play)
