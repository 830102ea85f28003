"""What environments say, checked and added up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elastic_rl.environments.base import Message, Observation
from elastic_rl.errors import PluginFailed
from elastic_rl.plugins.user_code import encodable, is_name, number_of, plain, scalar

MAX_PARTS = 63
"""Most parts of a reward, besides the number of turns; and characters of a part's name, at most."""
_MAX_REWARD = 1e30
_TURNS = "turns"


def require_observation(given: object) -> Observation:
    """An observation of plain values, whose texts can be encoded. Raises PluginFailed for what is none: it says what is
    wrong while it is known which step said it."""
    if not isinstance(given, Observation):
        raise _fault(f"gave a {plain(type(given).__name__, 100)} instead of an Observation")
    messages = given.messages
    if not isinstance(messages, tuple | list) or not all(isinstance(m, Message) for m in messages):
        raise _fault("gave messages that are no tuple of objects Message")
    if not all(isinstance(text, str) for m in messages for text in (m.role, m.content, m.name, m.tool_call_id)):
        raise _fault("gave a message whose role or content is no text")
    if type(done := scalar(given.done)) is not bool:
        raise _fault("gave an observation whose done is neither True nor False")
    if not messages and not done:
        raise _fault("gave no message though the episode is not over: the policy would have nothing to answer")
    if not isinstance(given.parts, Mapping) or len(given.parts) > MAX_PARTS or not all(
            is_name(name, MAX_PARTS) and name != _TURNS for name in given.parts):
        raise _fault(f"gave parts that are not at most {MAX_PARTS} numbers by name; a name is text of 1 to {MAX_PARTS} "
                     f"printable characters, and not {_TURNS!r}")
    return replace(given, messages=tuple(replace(m, role=encodable(m.role), content=encodable(m.content),
                                                 name=encodable(m.name), tool_call_id=encodable(m.tool_call_id))
                                         for m in messages), reward=_number(given.reward, "reward"), done=done,
                   parts={name: _number(value, f"part {name!r}") for name, value in given.parts.items()})


class EpisodeRewards:
    """The rewards of an episode's turns."""

    def __init__(self) -> None:
        self.turns = 0
        self._rewards: list[float] = []
        self._parts: dict[str, float] = {}

    def add(self, observation: Observation) -> None:
        """Takes one of ``require_observation``. Raises PluginFailed when its turns have too many parts."""
        self.turns += 1
        self._rewards.append(observation.reward)
        for name, value in observation.parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value
        if len(self._parts) > MAX_PARTS:
            raise _fault(f"gave more than {MAX_PARTS} parts in the turns of one episode")

    def record(self) -> dict[str, Any]:
        """See ``EPISODE``; JSON."""
        return {"reward": sum(self._rewards), "rewards": list(self._rewards), "parts": dict(self._parts),
                _TURNS: self.turns}


def _number(given: Any, what: str) -> float:
    number = number_of(given)
    if number is None or not abs(number) <= _MAX_REWARD:
        raise _fault(f"gave a {what} that is no finite number")
    return number


def _fault(what: str) -> PluginFailed:
    return PluginFailed(f"rollout.environment {what}", hint="Observation in elastic_rl/environments/base.py says what "
                        "step returns")
