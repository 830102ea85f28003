"""An evaluation in the loop: every evaluation set of the data source, ``eval.samples`` of each prompt."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from elastic_rl.data.samples import Group
from elastic_rl.data.sources import CheckedSource

log = logging.getLogger(__name__)

PIECE = 1024
"""Prompts whose samples are in memory at once: a set may have a million. More would not keep the engines busier: this
is 64 requests of the default size, which is as many as are in flight."""
_PARTS = 64
"""Names of reward parts that a score has; samples may each have others."""
_NAMED = 64
"""Sets that records of etcd have, and characters of a set's name there: a new job has no longer ones."""

EvaluatePiece = Callable[[str, range], Sequence[Group]]
"""Returns the group of each of these prompts, given by the name of a set and their indices. It waits for whatever is
away."""


@dataclass
class SetScore:
    """What is known of one evaluation set."""

    prompts: int = 0
    rewards: float = 0.0
    """Sum over the prompts, of each the mean of its samples."""
    squares: float = 0.0
    """Sum of the squares of these means."""
    parts: dict[str, float] = field(default_factory=dict)
    """The same sum of each named part of the reward, of the first so many."""
    newest_version: int = 0
    """Newest policy version that made a sample."""

    @property
    def accuracy(self) -> float:
        """Mean reward."""
        return self.rewards / self.prompts

    @property
    def error(self) -> float:
        """Standard error of the mean reward, over the prompts; 0 for a single one."""
        variance = max(0.0, self.squares / self.prompts - self.accuracy ** 2)
        return math.sqrt(variance / (self.prompts - 1)) if self.prompts > 1 else 0.0

    @property
    def reward_parts(self) -> dict[str, float]:
        """Mean of each part, such as what a part of ``mix`` with the weight 0 says of a policy that another one
        trains."""
        return {name: value / self.prompts for name, value in self.parts.items()}

    def add(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self.prompts += 1  # also one that could not be generated, which has no sample
            reward = sum(sample.reward for sample in group.samples) / max(len(group.samples), 1)
            self.rewards += reward
            self.squares += reward ** 2
            for name, value in (part for sample in group.samples for part in sample.reward_parts.items()):
                if name in self.parts or len(self.parts) < _PARTS:
                    self.parts[name] = self.parts.get(name, 0.0) + value / len(group.samples)
            self.newest_version = max(self.newest_version, 0, *(v for s in group.samples for v in s.versions))


def evaluate_sets(source: CheckedSource, evaluate: EvaluatePiece) -> dict[str, SetScore]:
    """The score of each set that has a prompt, in the order of ``source.evals``. A main set that consists of others is
    not generated a second time."""
    scores = {name: SetScore() for name, prompts in source.evals.items() if len(prompts)}
    for name in generated_sets(source):
        total = len(source.evals[name])
        for begin in range(0, total, PIECE):
            groups = evaluate(name, range(begin, min(begin + PIECE, total)))
            scores[name].add(groups)
            if name in source.eval_parts:
                scores[source.eval_name].add(groups)
            if total > PIECE:
                log.info("evaluation set %s: %d of %d prompts", name, scores[name].prompts, total)
    return scores


def generated_sets(source: CheckedSource) -> list[str]:
    """The sets whose prompts are all prompts, each once, without those that have none. The parts of the main set come
    in their order: its sum then adds its rewards in the order of its prompts."""
    main = [*source.eval_parts] or [source.eval_name]
    others = [name for name in source.evals if name not in (source.eval_name, *main)]
    return [name for name in [*main, *others] if len(source.evals[name])]


def further_sets(scores: Mapping[str, SetScore], main: str) -> dict[str, float]:
    """Accuracies of the sets beside the main one, by name."""
    return {name: score.accuracy for name, score in scores.items() if name != main}


def bounded(accuracies: Mapping[str, float]) -> dict[str, float]:
    """The sets as records of etcd have them: the first so many, with names of a bounded length."""
    return {name[:_NAMED]: accuracy for name, accuracy in list(accuracies.items())[:_NAMED]}
