"""What an environment is: the seam ``Environment``, and what it says after each turn of the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastic_rl.data.samples import Prompt
from elastic_rl.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Message:
    """A message of a conversation, as chat templates take it."""

    role: str
    """``user`` or ``tool``; or whatever else the model's chat template knows."""
    content: str
    name: str = ""
    """Name of the tool whose result it is: some templates ask for it. "" is left out."""
    tool_call_id: str = ""
    """Id of the call whose result it is: some templates ask for 9 letters or digits. "" is left out."""


@dataclass(frozen=True)
class Observation:
    """What an environment says after a turn of the policy."""

    messages: tuple[Message, ...] = ()
    """What the policy reads before its next turn; one at least, unless the episode is over."""
    reward: float = 0.0
    """Reward of this turn; the reward of the sample is the sum over all turns (``rollout.reward: environment``)."""
    done: bool = False
    """Whether the episode is over: the policy has no further turn."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, by name, for people; added up over the turns."""


class Environment(Protocol):
    """One episode: it begins with a prompt of the data source and the policy's first turn."""

    async def step(self, text: str) -> Observation:
        """The answer to a turn of the policy. ``text``: with its special tokens, but for the one that ends it. What it
        raises fails the whole group of samples."""

    async def close(self) -> None:
        """Called once, when no more turns come, however the episode ended; given up after a few seconds. It is not
        called when the process ends, as one that blocks does: give what you hold elsewhere a lease."""


NewEpisode = Callable[[Prompt, int], Environment]
"""``(prompt, seed)`` → an episode. The seed is another one for each sample of each prompt, and the same when the sample
is made again. It may not block.

It may have an attribute ``examples``: of each turn that the environment may answer with another form of messages, the
messages. Whether the chat template takes them is tried at the start; without it, one message of the role ``user``."""


@dataclass(frozen=True)
class EnvironmentContext:
    """What an environment is made with, besides its options."""

    setting: str
    """Setting of its options, for the texts of errors."""
    tokenizer: Tokenizer
    """Tokenizer of the policy."""


EnvironmentFactory = Callable[[Mapping[str, Any], EnvironmentContext], NewEpisode]
"""Makes from options what begins episodes; called once in a process. Raises ConfigError."""
