"""Episodes in the process of the user's code, with engines over HTTP: turns, parsers, tools, limits, and what fails in
the middle of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted_engine import Engine
from support.text_model import make_tokenizer_folder

from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import EPISODE, Prompt, Sample
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.engine.own_generate import ClientOptions, EnvironmentJob, OwnGenerate
from elastic_rl.errors import ConfigError, EngineFailed, PluginAway, PluginFailed
from elastic_rl.plugins.process import CallLost

MODULE = '''
import asyncio, sys, threading
from elastic_rl.environments.base import Message, Observation
from elastic_rl.errors import PluginAway

class Own:
    def __init__(self, what): self.what, self.turns = what, 0
    async def step(self, text):
        self.turns += 1
        if self.what == "exit": sys.exit(3)
        if self.what == "task":
            async def leave(): sys.exit(3)
            asyncio.create_task(leave())
            await asyncio.sleep(60)
        if self.what == "hang": await asyncio.sleep(60)
        if self.what == "stuck":
            while True:
                try: await asyncio.sleep(60)
                except asyncio.CancelledError: pass
        if self.what == "block": threading.Event().wait()
        if self.what == "away": raise PluginAway("the service is away", replace=True)
        if self.what == "nothing": return Observation()
        return Observation((Message("tool", "go on"),), 0.5, done=self.turns == 3)
    async def close(self): pass

def make(options, context):
    def new(prompt, seed):
        if prompt.metadata["what"] == "no begin": raise ValueError("no such level")
        return Own(prompt.metadata["what"])
    return new

def one_parameter(options, context): return lambda prompt: Own("")
'''
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call>'
LONG = "so it is, " * 400 + "and the answer is 42"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(ModelTokenizer(make_tokenizer_folder(tmp_path / "model")))
    yield made
    made.close()


@pytest.fixture
def played(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., OwnGenerate]]:
    (tmp_path / "own_environment.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("elastic_rl.plugins.process.CANCEL_S", 1.0)
    made = []

    def make(name: str, seconds: float = 60.0, **options: Any) -> OwnGenerate:
        job = EnvironmentJob(name, options, str(tmp_path / "model"), 4, 10_000, seconds, {})
        made.append(OwnGenerate(job, ClientOptions(engine.url, 30.0, 1, 1000)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def request(engine: Engine, what: str = "", samples: int = 2) -> PromptRequest:
    [ids] = engine.tokenizer.encode_batch(["<|user|>go<|end|><|assistant|>"], special_tokens=False)
    return PromptRequest(0, Prompt(tuple(ids), metadata={"what": what}),
                         Sampling(20_000, stop_token_ids=engine.tokenizer.eos_ids, seed=7), samples)


async def outcome(own: OwnGenerate, asked: PromptRequest, limit_s: float = 60.0) -> list[Sample] | Exception:
    try:
        async with own.within(limit_s):
            return await own(asked, None)  # type: ignore[arg-type]
    except Exception as e:
        return e


def test_policy_calls_tools_and_its_whole_last_turn_is_its_answer(engine: Engine, played: Callable[..., OwnGenerate]
                                                                  ) -> None:
    """Also when the process is killed in the middle, and the samples are made again; and engines that fail then are no
    fault of the tools."""
    own = played("tools", tools=["calculator"])
    engine.says = lambda turn, _: LONG if turn else CALL
    asked = request(engine)
    samples = asyncio.run(own(asked, None))  # type: ignore[arg-type]
    for sample in samples:
        call, result, last = sample.segments
        assert engine.tokenizer.decode(list(result.token_ids), skip_special_tokens=False) == (
            "<|tool|>42<|end|><|assistant|>")
        assert (call.loss, result.loss, last.loss, last.version) == (True, False, True, 3)
        assert sample.text == LONG and len(LONG) > 2000
        assert sample.metadata[EPISODE] == {"reward": 0.0, "rewards": [0.0, 0.0], "turns": 2,
                                                "parts": {"tool_calls": 1.0, "tool_errors": 0.0}}
    before = [*asked.prompt.token_ids, *samples[0].segments[0].token_ids, *samples[0].segments[1].token_ids]
    assert [ids for ids, _ in engine.asked] == [list(asked.prompt.token_ids)] * 2 + [before] * 2
    assert len({route for _, route in engine.asked} - {""}) == 1

    in_turn, killed = threading.Event(), threading.Event()

    def hold(turn: int, _: str) -> None:
        if turn:
            in_turn.set()
            killed.wait(60)

    async def kill() -> None:
        playing = asyncio.create_task(outcome(own, asked))
        assert await asyncio.to_thread(in_turn.wait, 60)
        process = own._process._process
        assert process is not None
        os.killpg(process._child.pid, signal.SIGKILL)
        assert isinstance(await playing, CallLost)

    engine.before_turn = hold
    asyncio.run(kill())
    killed.set()
    engine.before_turn = lambda turn, _: None
    own.start()
    assert asyncio.run(outcome(own, asked)) == samples
    engine.status = 500
    assert isinstance(asyncio.run(outcome(own, asked)), EngineFailed)


def test_environment_that_fails_costs_its_own_group(engine: Engine, played: Callable[..., OwnGenerate]) -> None:
    own = played("own_environment:make", seconds=0.5)

    async def play(*whats: str) -> list[Any]:
        return await asyncio.gather(*(outcome(own, request(engine, what)) for what in whats))

    good, left, hangs, silent, away, again = asyncio.run(play("", "exit", "hang", "nothing", "away", ""))
    assert good == again and [s.metadata[EPISODE]["reward"] for s in good] == [1.5, 1.5]
    for found, named in ((left, "SystemExit: 3"), (hangs, "rollout.generate_timeout_s"), (silent, "no message")):
        assert type(found) is PluginFailed
        assert named in str(found)
    assert isinstance(away, PluginAway)
    asyncio.run(own.check(request(engine).prompt))
    with pytest.raises(PluginFailed, match="no such level"):
        asyncio.run(own.check(request(engine, "no begin").prompt))
    own.start()
    assert asyncio.run(play("")) == [good], "in another process: the one that knew of a service away was replaced"


@pytest.mark.parametrize("what", ["task", "stuck", "block"])
def test_environment_that_ends_its_process_names_nobody(engine: Engine, played: Callable[..., OwnGenerate], what: str
                                                        ) -> None:
    own = played("own_environment:make", seconds=1.0)

    async def play() -> list[Any]:
        return await asyncio.gather(*(outcome(own, request(engine, one), 2.0) for one in ("hang", what)))

    found = asyncio.run(play())
    assert isinstance(found[1], CallLost | TimeoutError)
    assert any(isinstance(one, CallLost) for one in found)
    assert what != "task" or all(isinstance(one, CallLost) for one in found), "the other did not fail itself"
    own.start()
    assert isinstance(asyncio.run(outcome(own, request(engine))), list)


def test_time_of_the_engines_is_none_of_the_environment(engine: Engine, played: Callable[..., OwnGenerate]) -> None:
    own = played("own_environment:make", seconds=0.4)
    pause = threading.Event()
    engine.before_turn = lambda turn, _: bool(pause.wait(0.5)) and None
    found = asyncio.run(outcome(own, request(engine), 0.4))
    assert isinstance(found, list) and found[0].metadata[EPISODE]["turns"] == 3


def test_what_begins_no_episode_is_a_wrong_setting(played: Callable[..., OwnGenerate]) -> None:
    with pytest.raises(ConfigError, match="of other parameters"):
        played("own_environment:one_parameter")
    assert "own_environment" not in sys.modules
