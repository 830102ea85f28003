"""Games of textarena as episodes."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import threading
from typing import Any

import numpy as np
import pytest

from elastic_rl.data.samples import Prompt
from elastic_rl.environments import textarena_games
from elastic_rl.environments.base import Environment
from elastic_rl.environments.registry import make_environment
from elastic_rl.environments.textarena_games import opening
from elastic_rl.errors import ConfigError, PluginFailed

pytestmark = pytest.mark.skipif(importlib.util.find_spec("textarena") is None, reason="textarena is not installed")
GUESS = {"game": "GuessTheNumber-v0", "game_options": {"max_number": 8}}


def begin(seed: int | None = 3, **options: Any) -> Environment:
    new = make_environment("textarena", {**GUESS, **options}, None)  # type: ignore[arg-type]
    return new(Prompt((), metadata={} if seed is None else {"seed": seed}), 0)


def numbers(seed: int) -> list[str]:
    """What a game answers to the guesses 1 to 8, up to its end."""
    game, found = begin(seed), []
    for guess in range(1, 9):
        observation = asyncio.run(game.step(f"I say [{guess}]"))
        found.append("right" if observation.done else observation.messages[0].content)
        if observation.done:
            assert observation.reward == 1.0
            break
    return found


def test_game_answers_moves_and_rewards_its_end() -> None:
    found = numbers(3)
    assert found[-1] == "right" and set(found[:-1]) <= {"The target number is higher."}
    assert found == numbers(3) and len({len(numbers(seed)) for seed in range(12)}) > 3, "the seed decides"


def test_games_that_run_side_by_side_have_a_random_state_each() -> None:
    random.seed(5)
    expected = random.Random(5).random()
    games = [begin(seed) for seed in (1, 2)]
    assert random.random() == expected, "that of others is as it was"
    alone = begin(1)
    for move in ("[1]", "[2]"):
        texts = [asyncio.run(game.step(move)) for game in (*games, alone)]
        assert texts[0] == texts[2]


def test_move_that_is_none_is_answered_and_counted() -> None:
    observation = asyncio.run(begin(invalid_reward=-0.25).step("five"))
    assert not observation.done and "invalid move" in observation.messages[0].content
    assert (observation.reward, observation.parts) == (-0.25, {"invalid_moves": 1.0})
    assert asyncio.run(begin(brackets=True).step("1")).parts == {"invalid_moves": 0.0}


def test_opening_is_for_prompts() -> None:
    assert "between 1 and 8" in opening("GuessTheNumber-v0", 3, {"max_number": 8})


@pytest.mark.parametrize(("options", "named"), [
    ({"game": "GuessTheNumbr-v0"}, "did you mean 'GuessTheNumber-v0'"), ({"game": "Chess-v0"}, "one player"),
    ({"game": "QuantumTicTacToe-v0", "game_options": {}}, "one player"),
    ({"game_options": {"smallest": 1}}, "cannot begin"), ({"games": 1}, "no such option")])
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        begin(**options)


def test_prompt_without_a_seed_is_refused() -> None:
    with pytest.raises(PluginFailed, match="metadata"):
        begin(seed=None)


def test_move_that_a_game_raises_for_ends_it() -> None:
    """As a second one in Countdown: the other samples of the prompt are none the worse."""
    game = begin(invalid_reward=-0.5)
    asyncio.run(game.step("[1]"))
    playing: Any = game

    def raises(action: str) -> None:
        raise ValueError("no such move")

    playing._game._game.step = raises
    found = asyncio.run(game.step("[2]"))
    assert found.done and (found.reward, found.parts) == (-0.5, {"invalid_moves": 1.0})
    countdown = begin(game="Countdown-v0", game_options={})
    for _ in range(5):
        if (found := asyncio.run(countdown.step("nonsense"))).done:
            break
    assert found.done


def test_game_is_made_once_for_the_samples_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = textarena_games._made

    def counted(options: Any, seed: int) -> Any:
        made.append(seed)
        assert seed == 0 or threading.current_thread() is not threading.main_thread()
        return real(options, seed)

    monkeypatch.setattr(textarena_games, "_made", counted)
    new = make_environment("textarena", GUESS, None)  # type: ignore[arg-type]

    async def play(seed: int) -> list[Any]:
        games = [new(Prompt((), metadata={"seed": seed}), i) for i in range(4)]
        return [await asyncio.gather(*(game.step(f"[{guess}]") for game in games)) for guess in (1, 2)]

    async def both() -> list[Any]:
        return [*await play(3), *await play(4)]

    for answers in asyncio.run(both()):
        assert all(answer == answers[0] for answer in answers)
    assert made == [0, 3, 4]


def test_random_state_of_numpy_is_of_the_game(monkeypatch: pytest.MonkeyPatch) -> None:
    game = textarena_games.Game(textarena_games.TextArenaOptions(game="GuessTheNumber-v0"), 3)
    with game._own_random():
        first = np.random.random()
    np.random.seed(1)
    expected = np.random.RandomState(1).random()
    other = textarena_games.Game(textarena_games.TextArenaOptions(game="GuessTheNumber-v0"), 3)
    with other._own_random():
        assert np.random.random() == first
    assert np.random.random() == expected
