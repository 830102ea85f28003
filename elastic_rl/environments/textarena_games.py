"""The environment ``textarena``: games of one player of the PyPI package textarena."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import Prompt
from elastic_rl.environments.base import EnvironmentContext, Message, NewEpisode, Observation
from elastic_rl.environments.threads import OwnThreads
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins.user_code import describe, did_you_mean
from elastic_rl.runtime.abandonable import CallTookTooLong

log = logging.getLogger(__name__)

_MOVE_S = 60.0
"""Limit for an answer of a game, and for making it."""
_KEPT = 256
"""Games that were made and are kept, for further samples of their prompts."""


class TextArenaOptions(Options):
    game: str
    """Name of a game of one player, as ``GuessTheNumber-v0``."""
    game_options: dict[str, Any] = {}
    """Options of the game, as ``max_number``."""
    brackets: bool = False
    """Whether a turn without a bracket is a move as a whole: most games look for moves in brackets, as ``[5]``."""
    invalid_reward: Annotated[float, Field(le=0)] = 0.0
    """Added for each move that the game does not accept."""


def textarena(options: Mapping[str, Any], context: EnvironmentContext) -> NewEpisode:
    """Episodes of a game. Its seed is ``metadata["seed"]`` of the prompt, so that all samples of a prompt play the same
    one. Raises ConfigError."""
    chosen = read_options(TextArenaOptions, options, of="the environment 'textarena'", setting=context.setting)
    Game(chosen, 0)
    return Games(chosen)


def opening(game: str, seed: int, game_options: Mapping[str, Any] | None = None) -> str:
    """What a game says before the first move, for prompts of a data source. Raises ConfigError."""
    return Game(TextArenaOptions(game=game, game_options=dict(game_options or {})), seed).opening


class Games:
    """Begins episodes. All games run in one thread: they use the random states of modules, and some take long."""

    def __init__(self, options: TextArenaOptions) -> None:
        self._options = options
        self.thread = OwnThreads(f"the game {options.game!r}", 1, _MOVE_S)
        self._made: dict[int, Game] = {}
        """Games by seed, the oldest first. Used by the thread alone."""

    def __call__(self, prompt: Prompt, seed: int) -> GameEpisode:
        """Raises PluginFailed for a prompt without a seed of the game."""
        return GameEpisode(self, _seed(prompt))

    def begun(self, seed: int) -> Game:
        """A game at its begin. It is made once for all samples of a prompt: that may take seconds."""
        if seed not in self._made:
            if len(self._made) >= _KEPT:
                del self._made[next(iter(self._made))]
            self._made[seed] = Game(self._options, seed)
        return copy.deepcopy(self._made[seed])


class GameEpisode:
    """One episode: the game answers each move, and rewards the whole at its end."""

    def __init__(self, games: Games, seed: int) -> None:
        self._games, self._seed = games, seed
        self._game: Game | None = None

    async def step(self, text: str) -> Observation:
        """See ``Environment``. Raises PluginFailed for a game that takes too long, and PluginAway while one does."""
        try:
            return await self._games.thread.run(lambda: self._answer(text))
        except CallTookTooLong:
            raise PluginFailed(f"the game took longer than {_MOVE_S:g} s for a move, or to begin",
                               hint="choose another game, or smaller game_options") from None

    async def close(self) -> None:
        """There is nothing to close."""

    def _answer(self, text: str) -> Observation:
        if self._game is None:
            self._game = self._games.begun(self._seed)
        return self._game.step(text)


class Game:
    """One game."""

    def __init__(self, options: TextArenaOptions, seed: int) -> None:
        """Raises ConfigError for a game that there is not, that has several players, or whose options are wrong."""
        self._options = options
        self._random = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())
        with self._own_random():
            self._game = _made(options, seed)
            self.opening = "\n".join(self._said())

    def step(self, text: str) -> Observation:
        """The answer to a move."""
        move = f"[{text}]" if self._options.brackets and "[" not in text else text
        errors = self._errors
        try:
            with self._own_random():
                done, _ = self._game.step(action=move)
                rewards, info = self._game.close() if done else ({}, {})
                said = [] if done else self._said()
            reward = float((rewards or {}).get(0, 0.0))  # some put a text there
        except Exception as e:  # some games raise for moves that are none: that is the policy's, and the game is over
            log.info("the game %s is over with a move that it cannot take: %s", self._options.game, describe(e))
            return Observation(reward=self._options.invalid_reward, done=True, parts={"invalid_moves": 1.0})
        invalid = self._errors > errors or bool(info.get(0, {}).get("invalid_move"))
        parts = {"invalid_moves": float(invalid)}
        reward += self._options.invalid_reward * invalid
        if done:
            return Observation(reward=reward, done=True, parts=parts)
        return Observation((Message("user", "\n".join(said) or "…"),), reward, parts=parts)

    @property
    def _errors(self) -> int:
        return int(getattr(self._game.state, "error_count", 0))

    def _said(self) -> list[str]:
        """What the game has said since the last call."""
        _, found = self._game.get_observation()
        return [str(text) for sender, text, _ in found if sender == -1]

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Inside, the modules ``random`` and ``numpy.random``, which the games use, have this episode's states: others
        run in turn with it, and its moves must not depend on theirs."""
        before = random.getstate(), np.random.get_state()
        self._set_random(self._random)
        try:
            yield
        finally:
            self._random = random.getstate(), np.random.get_state()
            self._set_random(before)

    @staticmethod
    def _set_random(states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _made(options: TextArenaOptions, seed: int) -> Any:
    try:
        import textarena as package
        from textarena.envs.registration import ENV_REGISTRY
        from textarena.state import SinglePlayerState
    except ImportError as e:
        raise ConfigError(f"the package textarena cannot be imported: {describe(e)}",
                          hint="install elastic-rl with the extra `games`") from e
    name = f"{options.game}-raw"  # without what adds the whole conversation to each observation
    if name not in ENV_REGISTRY:
        near = did_you_mean(options.game, [key.removesuffix("-raw") for key in ENV_REGISTRY])
        raise ConfigError(f"textarena has no game {options.game!r}{near}")
    try:
        game = package.make(name, **options.game_options)
        game.reset(num_players=1, seed=seed)
    except Exception as e:  # whatever a game raises for its options, or for a single player: also AssertionError
        raise ConfigError(f"the game {options.game!r} cannot begin with one player: {describe(e)}",
                          hint="name a game of one player, and check game_options") from e
    if not isinstance(game.state, SinglePlayerState):  # some take one player, and wait for the others
        raise ConfigError(f"the game {options.game!r} is none of one player", hint="name a game of one player")
    return game


def _seed(prompt: Prompt) -> int:
    found = prompt.metadata.get("seed")
    if isinstance(found, float) and found.is_integer():
        found = int(found)  # as in a column of whole numbers in which some were missing
    if type(found) is not int:
        raise PluginFailed('the prompt has no metadata["seed"] that is a whole number',
                           hint="name the column of the game's seed in data.options.metadata_keys")
    return found
