"""Episodes in the process of the user's code, with an engine over HTTP: tools, and processes that die or hang in the
middle of episodes. What episodes are is tested in ``tests/unit/environments``."""

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
from support.scripted_engine import Engine, outcome, prompt_request
from support.text_model import make_tokenizer_folder
from support.tiers import parametrize

from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import EPISODE
from elastic_rl.engine.own_generate import ClientOptions, EnvironmentJob, OwnGenerate
from elastic_rl.errors import EngineFailed, PluginAway
from elastic_rl.plugins.process import CallLost

MODULE = '''
import asyncio, sys, threading
from elastic_rl.environments.base import Message, Observation
from elastic_rl.errors import PluginAway

class Own:
    def __init__(self, what): self.what = what
    async def step(self, text):
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
        return Observation((Message("tool", "go on"),), 0.5, done=True)
    async def close(self): pass

def make(options, context): return lambda prompt, seed: Own(prompt.metadata["what"])
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


def test_policy_calls_tools_and_its_whole_last_turn_is_its_answer(engine: Engine, played: Callable[..., OwnGenerate]
                                                                  ) -> None:
    """Also when the process is killed in the middle, and the samples are made again; and engines that fail then are no
    fault of the tools."""
    own = played("tools", tools=["calculator"])
    engine.says = lambda turn, _: LONG if turn else CALL
    asked = prompt_request(engine)
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


@parametrize("what", ["task", "stuck", "block"],
             proved_in="tests/integration/environments/test_episode_processes.py",
             why="further ways to be lost with the process")
def test_environment_that_ends_its_process_names_nobody(engine: Engine, played: Callable[..., OwnGenerate], what: str
                                                        ) -> None:
    """One process after another: it is replaced after a loss, and once it knew of a service that is away."""
    own = played("own_environment:make", seconds=1.0)

    async def play(*whats: str) -> list[Any]:
        return await asyncio.gather(*(outcome(own, prompt_request(engine, what), 2.0) for what in whats))

    found = asyncio.run(play("hang", what))
    assert isinstance(found[1], CallLost | TimeoutError)
    assert any(isinstance(one, CallLost) for one in found)
    assert what != "task" or all(isinstance(one, CallLost) for one in found), "the other did not fail itself"
    own.start()
    before = own._process._process
    good, away = asyncio.run(play("", "away"))
    assert isinstance(good, list) and isinstance(away, PluginAway)
    own.start()
    assert own._process._process is not before and asyncio.run(play("")) == [good]
    assert "own_environment" not in sys.modules
