"""Prompts and samples: what a data source gives, what engines generate, and what is trained on. Pure.

A sample's tokens are its prompt and then its segments. Nothing assumes one contiguous response: a multi-turn or
tool-using sample alternates segments that the policy generated, which have log-probs and a loss, with segments that
the environment wrote, which have neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

EPISODE = "episode"
"""Key in the metadata of a sample that an environment took part in: ``{"reward": …, "rewards": [… of each turn],
"parts": {…}, "turns": …}``."""
_NO_TURNS: Mapping[str, Any] = {EPISODE: {"reward": 0.0, "rewards": [], "parts": {}, "turns": 0}}
MAX_TOKEN_IDS = 1 << 31
"""Every token id is below: what tensors and engines hold."""


@dataclass(frozen=True)
class Prompt:
    """One problem of a data source. ``metadata`` holds what JSON has (``runtime.json_values``)."""

    token_ids: tuple[int, ...]
    text: str = ""
    """The response's text, for people."""
    answer_ids: tuple[int, ...] | None = None
    """A right response, including its end-of-sequence token: what supervised fine-tuning imitates and a reward may
    compare with. None where the source has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the reward needs besides: passed on unchanged."""
    question: str = ""
    """What ``text`` asks, without what a chat template wrote around it; "" where that is ``text`` itself."""
    identity: str = field(default="", compare=False)
    """A digest of what the prompt is made from, for ``order.fingerprint``: another day, and another release of the
    library that renders a chat template, may make other tokens of the same. "" where the tokens are the prompt."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a sample that have one origin. One that is made of arrays has tuples of them once somebody
    asks for those: a step passes on millions of numbers that only the trainer reads."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = field(default_factory=tuple)
    """Natural log of the probability with which each token was sampled, under the distribution that it was sampled
    from; empty where no policy sampled them."""
    loss: bool = True
    """Whether the policy is trained on these tokens."""
    version: int = 0
    """Policy version that generated them; 0 where none did."""

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"a segment of {len(self.token_ids)} tokens has {len(self.logprobs)} log-probs")

    @classmethod
    def of_arrays(cls, token_ids: np.ndarray, logprobs: np.ndarray, loss: bool = True, version: int = 0) -> Segment:
        """``token_ids``: [T] int32; ``logprobs``: [T] or [0] of floats. Nobody changes them any more. Raises
        ValueError."""
        if len(logprobs) not in (0, len(token_ids)):
            raise ValueError(f"a segment of {len(token_ids)} tokens has {len(logprobs)} log-probs")
        made = cls.__new__(cls)
        made.__dict__.update(loss=loss, version=version, _arrays=(token_ids, logprobs))
        return made

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Token ids and log-probs, of one that was made of arrays."""
        return self.__dict__.get("_arrays")

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self.token_ids if self.arrays is None else self.arrays[0])

    if not TYPE_CHECKING:  # it would hide wrong names
        def __getattr__(self, name: str) -> Any:
            arrays = self.__dict__.get("_arrays")
            if arrays is None or name not in ("token_ids", "logprobs"):
                raise AttributeError(f"{type(self).__name__} has no attribute {name}")
            found = self.__dict__[name] = tuple(arrays[name == "logprobs"].tolist())
            return found


@dataclass(frozen=True)
class Sample:
    """One answer to a prompt."""

    segments: tuple[Segment, ...]
    finish_reason: str = "stop"
    """stop, length or abort."""
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, by name; for people."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    """What the reward reads: what the ``GenerateFn`` says that it is, as the last turn of several; else what the policy
    wrote, without special tokens. "" before it is rewarded, and where the data source has no tokenizer."""
    turn_rewards: tuple[float, ...] = ()
    """What of the reward is of each turn, in order; the rest of it is of the end."""

    @property
    def response_ids(self) -> tuple[int, ...]:
        """The tokens of all segments."""
        return tuple(t for s in self.segments for t in s.token_ids)

    @property
    def written_ids(self) -> tuple[int, ...]:
        """The tokens that a policy wrote, trained on or not: no reward shall take what a tool says for its answer."""
        return tuple(t for s in self.segments if s.loss or s.logprobs for t in s.token_ids)

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """The place within ``response_ids`` of the last token of each turn: what a policy wrote on end, whatever the
        number of its segments."""
        ends: list[int] = []
        place, own = 0, False
        for s in self.segments:
            if not s.size:
                continue
            place += s.size
            goes_on, own = own, s.loss or bool(s.logprobs)
            if own and goes_on:
                ends.pop()
            if own:
                ends.append(place - 1)
        return tuple(ends)

    @property
    def lacks_text(self) -> bool:
        """Whether ``text`` is to be made from ``written_ids``. That of an episode is its last turn, also if empty."""
        return not self.text and EPISODE not in self.metadata

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that generated it, ascending."""
        return tuple(sorted({s.version for s in self.segments if s.version}))

    @property
    def oldest_version(self) -> int:
        """The oldest of ``versions``; 0 when a loss segment has none: its engine had no version yet."""
        trained = [s.version for s in self.segments if s.loss]
        return min(trained, default=0)

    def rewarded(self, reward: float, parts: Mapping[str, float], turns: Sequence[float] = ()) -> Sample:
        """The sample with its reward. ``turns``: see ``turn_rewards``."""
        return replace(self, reward=reward, reward_parts=dict(parts), turn_rewards=tuple(turns))


REWARD_FAILED, GENERATE_FAILED, FILTER_FAILED = "reward failed", "generate failed", "filter failed"
"""Why groups are dropped whose reward failed, or for which the user's function to generate, an engine, or a filter did.
"""
TRAIN_FAILED = "train failed"
"""Why groups are dropped that the trainer cannot compute with."""
TRAINER_REFUSED = "refused by the trainer"
"""Why groups are dropped whose samples the trainer has refused again and again, for their versions."""
FAILED = frozenset({REWARD_FAILED, GENERATE_FAILED, FILTER_FAILED, TRAIN_FAILED, TRAINER_REFUSED})
"""Reasons for which a group is never trained on, so that ``max_dropped_groups``, which is for filters that work, does
not count it: the sampling has limits of its own for them. No filter may give one of them (``rewards.own``)."""


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, which are compared with one another. ``ordinal``: identifies it for the whole run."""

    ordinal: int
    prompt: Prompt
    samples: tuple[Sample, ...]
    failed: str = ""
    """Why the reward failed for it or, when it has no samples, the user's function to generate them; "" when it has
    rewards. Such a group is never trained on."""

    @property
    def failure(self) -> str:
        """The reason to drop the group, if it has failed; else ""."""
        return "" if not self.failed else REWARD_FAILED if self.samples else GENERATE_FAILED

    @property
    def rewards(self) -> list[float]:
        return [s.reward for s in self.samples]

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions of what is trained on, ascending; 0 as ``Sample.oldest_version`` has it."""
        return tuple(sorted({v for s in self.samples for v in (
            s.oldest_version, *(segment.version for segment in s.segments if segment.loss))}))

    @property
    def oldest_version(self) -> int:
        return min((s.oldest_version for s in self.samples), default=0)


def demonstration(prompt: Prompt) -> Sample:
    """The sample that supervised fine-tuning imitates. Raises ValueError for a prompt without an answer."""
    if prompt.answer_ids is None:
        raise ValueError("the prompt has no answer to imitate")
    return Sample((Segment(prompt.answer_ids),))


def as_episode(sample: Sample) -> Sample:
    """A sample that no environment took part in as one that had no turn with it, which every reward takes."""
    return replace(sample, metadata={**sample.metadata, **_NO_TURNS})
