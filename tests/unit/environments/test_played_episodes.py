"""Episodes in an environment of the user's own, with an engine over HTTP: turns, limits, and failures in the middle of
an episode. Their process is tested in ``tests/integration/environments/test_episode_processes.py``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_plugin import local_plugins  # noqa: F401
from support.scripted_engine import Engine, outcome, prompt_request
from support.text_model import make_tokenizer_folder

from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import EPISODE
from elastic_rl.engine.own_generate import ClientOptions, EnvironmentJob, OwnGenerate
from elastic_rl.errors import ConfigError, PluginAway, PluginFailed

MODULE = '''
import asyncio, sys
from elastic_rl.environments.base import Message, Observation
from elastic_rl.errors import PluginAway

class Own:
    def __init__(self, what): self.what, self.turns = what, 0
    async def step(self, text):
        self.turns += 1
        if self.what == "exit": sys.exit(3)
        if self.what == "hang": await asyncio.sleep(60)
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


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(ModelTokenizer(make_tokenizer_folder(tmp_path / "model")))
    yield made
    made.close()


@pytest.fixture
def played(engine: Engine, tmp_path: Path, local_plugins: Path) -> Callable[..., OwnGenerate]:  # noqa: F811
    (local_plugins / "own_environment.py").write_text(MODULE)

    def make(name: str, seconds: float) -> OwnGenerate:
        job = EnvironmentJob(name, {}, str(tmp_path / "model"), 4, 10_000, seconds, {})
        return OwnGenerate(job, ClientOptions(engine.url, 30.0, 1, 1000))

    return make


def test_environment_that_fails_costs_its_own_group(engine: Engine, played: Callable[..., OwnGenerate]) -> None:
    own = played("own_environment:make", seconds=0.5)

    async def play(*whats: str) -> list[Any]:
        return await asyncio.gather(*(outcome(own, prompt_request(engine, what)) for what in whats))

    good, left, hangs, silent, away, again = asyncio.run(play("", "exit", "hang", "nothing", "away", ""))
    assert good == again and [s.metadata[EPISODE]["reward"] for s in good] == [1.5, 1.5]
    for found, named in ((left, "SystemExit: 3"), (hangs, "rollout.generate_timeout_s"), (silent, "no message")):
        assert type(found) is PluginFailed
        assert named in str(found)
    assert isinstance(away, PluginAway)
    asyncio.run(own.check(prompt_request(engine).prompt))
    with pytest.raises(PluginFailed, match="no such level"):
        asyncio.run(own.check(prompt_request(engine, "no begin").prompt))


def test_time_of_the_engines_is_none_of_the_environment(engine: Engine, played: Callable[..., OwnGenerate]) -> None:
    """The engine takes half a second in each of three turns; the environment has one second for all."""
    own = played("own_environment:make", seconds=1.0)
    pause = threading.Event()
    engine.before_turn = lambda turn, _: bool(pause.wait(0.5)) and None
    found = asyncio.run(outcome(own, prompt_request(engine), 1.0))
    assert isinstance(found, list) and found[0].metadata[EPISODE]["turns"] == 3


def test_what_begins_no_episode_is_a_wrong_setting(played: Callable[..., OwnGenerate]) -> None:
    with pytest.raises(ConfigError, match="of other parameters"):
        played("own_environment:one_parameter", 60.0)
