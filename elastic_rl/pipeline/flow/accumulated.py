"""What the parts of a step have added so far, where gradients of some groups are computed while others are still
generated (``train.prompts_per_part``). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Accumulated:
    """The sum of a step's parts; without an argument that of none, as of a step whose groups are trained together."""

    parts: int = 0
    tokens: int = 0
    """Tokens with a loss."""
    advantages: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """Group → the advantages of its samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the tokens, by the names of ``training_metrics``."""

    def plus(self, advantages: Mapping[int, Sequence[float]], metrics: Mapping[str, float], tokens: int) -> Accumulated:
        """The sum with one more part, which has so many tokens."""
        total = self.tokens + tokens
        return Accumulated(self.parts + 1, total, {**self.advantages, **advantages}, {
            **self.metrics, **{name: (before := self.metrics.get(name, 0.0)) + (mean - before) * tokens / max(total, 1)
                               for name, mean in metrics.items()}})
