"""The result of an evaluation, from the lines of its samples, which are read one by one. Pure but for
``read_rows``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from elastic_rl.errors import OutputFailed

_PARTS = 64
"""Parts of the reward that a summary has; samples may each have others."""
_ALIVE_EVERY = 10_000
"""Lines between two signs of life."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimates the probability that at least one of ``k`` samples of a prompt is right, without bias, from ``samples``
    of which ``right`` are: 1 - C(samples - right, k) / C(samples, k) (arXiv 2107.03374, equation 1). Raises ValueError
    unless 1 <= k <= samples and 0 <= right <= samples."""
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} of {samples} samples, {right} of them right")
    # It is computed as a product: the binomials of thousands of samples have thousands of digits.
    return 1.0 - math.prod(1.0 - k / n for n in range(samples - right + 1, samples + 1))


def ks(samples: int) -> list[int]:
    """The k for which pass@k is reported: powers of two, and the number of samples; none of a single sample."""
    powers = [1 << n for n in range(samples.bit_length()) if 1 << n <= samples]
    return sorted({*powers, samples}) if samples > 1 else []


@dataclass
class SetSummary:
    """Sums over one evaluation set, prompt by prompt."""

    samples_per_prompt: int
    pass_reward: float
    prompts: int = 0
    samples: int = 0
    mean: float = 0.0
    """Mean of the prompts' mean rewards so far."""
    squares: float = 0.0
    """Sum of the squared differences from it (B. P. Welford, Technometrics 4, 1962)."""
    passed: dict[int, float] = field(default_factory=dict)
    truncated: int = 0
    tokens: int = 0
    longest: int = 0
    failed: int = 0
    """Prompts whose reward failed; it counts as 0."""
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number of each named part of the reward."""

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """The samples of one prompt."""
        rewards = [float(row["reward"]) for row in rows]
        reward = sum(rewards) / len(rewards)
        self.prompts += 1
        self.samples += len(rows)
        before = reward - self.mean
        self.mean += before / self.prompts
        self.squares += before * (reward - self.mean)
        # The 0 of a failed reward says nothing of the sample, and might be enough.
        right = sum(r >= self.pass_reward and not row.get("failed") for r, row in zip(rewards, rows, strict=True))
        for k in ks(self.samples_per_prompt):
            self.passed[k] = self.passed.get(k, 0.0) + pass_at_k(len(rows), right, k)
        self.failed += any(row.get("failed") for row in rows)
        for row in rows:
            tokens = int(row["response_tokens"])
            self.truncated += row["finish_reason"] == "length"
            self.tokens += tokens
            self.longest = max(self.longest, tokens)
            for name, value in row["reward_parts"].items():
                if name in self.parts or len(self.parts) < _PARTS:
                    total, count = self.parts.get(name, (0.0, 0))
                    self.parts[name] = total + value, count + 1

    def to_json(self) -> dict[str, Any]:
        """``standard_error``: of the mean reward over the prompts, the samples of one counting as one; None of fewer
        than two. ``truncated``: share of the samples that reached the limit of their length."""
        n = self.prompts
        return {"prompts": n, "samples": self.samples, "reward_mean": self.mean,
                "standard_error": math.sqrt(self.squares / (n - 1) / n) if n > 1 else None,
                "pass_at": {str(k): passed / n for k, passed in sorted(self.passed.items())},
                "truncated": self.truncated / self.samples,
                "response_tokens": {"mean": self.tokens / self.samples, "max": self.longest},
                "reward_parts": {name: total / count for name, (total, count) in self.parts.items()},
                "failed_rewards": self.failed}


def summarise_rows(rows: Iterable[Mapping[str, Any]], *, samples: int, pass_reward: float, main: str,
                   parts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The summary of each set, by name, the main one first. ``rows``: the samples of a prompt one after the other;
    ``samples``: of each prompt; ``parts``: sets whose prompts belong to the main one too."""
    found: dict[str, SetSummary] = {}
    for (name, _), of_prompt in groupby(rows, key=lambda row: (str(row["set"]), int(row["index"]))):
        own = list(of_prompt)
        for belongs in (main, name) if name in parts else (name,):
            found.setdefault(belongs, SetSummary(samples, pass_reward)).add(own)
    return {name: found[name].to_json() for name in sorted(found, key=lambda name: name != main)}


def read_rows(path: Path, alive: Callable[[], None] = lambda: None) -> Iterator[dict[str, Any]]:
    """The lines of a file of samples. ``alive``: called now and then; may raise. Raises OutputFailed."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if number % _ALIVE_EVERY == 0:
                    alive()
                yield json.loads(line)
    except (OSError, ValueError) as e:
        raise OutputFailed(f"{path} cannot be read: {e}", hint="see whether its disk is sound") from e
