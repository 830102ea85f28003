"""What the loop knows of a step's groups without their tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_rl.data.samples import Group, Prompt, Sample


@dataclass(frozen=True)
class SampleSummary:
    """A sample without its tokens, log-probs and texts."""

    prompt_tokens: int
    response_tokens: int
    """Number of response tokens of all segments."""
    loss_tokens: int
    """Number of tokens that the policy is trained on."""
    versions: tuple[int, ...]
    """See ``Sample``, as what follows."""
    oldest_version: int
    finish_reason: str = "stop"
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    turn_ends: tuple[int, ...] = ()
    """Ends of the turns, where there are ``turn_rewards``."""
    turn_rewards: tuple[float, ...] = ()

    @classmethod
    def from_sample(cls, prompt: Prompt, sample: Sample) -> SampleSummary:
        segments = sample.segments
        return cls(
            len(prompt.token_ids), sum(s.size for s in segments),
            sum(s.size for s in segments if s.loss), sample.versions, sample.oldest_version,
            sample.finish_reason, sample.reward, sample.reward_parts,
            sample.turn_ends if sample.turn_rewards else (), sample.turn_rewards)

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class GroupSummary:
    """A group without the tokens, log-probs and texts of its samples."""

    ordinal: int
    samples: tuple[SampleSummary, ...]
    versions: tuple[int, ...] = ()
    """See ``Group``."""
    attempt: int = 0
    """Number of the attempt to put the group into a queue that brought these samples; 0 where the queue holds at most
    one attempt at a group."""

    @classmethod
    def from_group(cls, group: Group, attempt: int = 0) -> GroupSummary:
        return cls(group.ordinal, tuple(SampleSummary.from_sample(group.prompt, s) for s in group.samples),
                   group.versions, attempt)

    @property
    def rewards(self) -> list[float]:
        return [s.reward for s in self.samples]

    @property
    def oldest_version(self) -> int:
        return min((s.oldest_version for s in self.samples), default=0)
