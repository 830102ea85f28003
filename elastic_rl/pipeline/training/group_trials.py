"""Finds the groups of a step that the trainer cannot compute with: their gradient is not finite, their pass needs too
much memory, or the user's loss fails for them.

A step fails as one, whichever of its groups is to blame, so ``FaultIsolation`` is told what it is told of groups whose
process has ended: any of them may be it. The trainer then checks half of them, which changes nothing, and so on down to
single groups. One that fails alone, again and again, while the trainer computes with others in between, is dropped.

Where the groups of the step are no evidence for one another, those of other steps are:

- If the trainer computes with none, which may be only one, either all are to blame or none is. One of them is dropped,
  since the trainer has made the steps before. If it does not compute with what comes in its place either, it has made
  no step since, and no other group is dropped.
- If it computes with each of them and not with all together, in as many trials as a group has attempts, one of those
  that failed together is dropped, of as few as were found.

If too many were dropped, or no step was made since one was dropped for want of evidence, the trainer or the loss is at
fault, and the run waits for a person. What was found until then is dropped before the wait begins.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from elastic_rl.config import Config
from elastic_rl.errors import ElasticRLError, PluginFailed, SourceFailed
from elastic_rl.pipeline.sampling.fault_isolation import DropLimit, Failure, FaultIsolation, Lane, Verdict
from elastic_rl.pipeline.waits import Waits
from elastic_rl.runtime.backoff import RetryBackoff

log = logging.getLogger(__name__)

_RETRY_S = (0.1, 15.0)
"""First and longest pause before a group is checked again that failed."""
_PAUSE_S = 0.5
_CORRECT = "train.lr, the loss, or what the samples are"

Check = Callable[[Sequence[int]], ElasticRLError | None]
"""Has the trainer compute with these groups, and returns why it cannot. Raises what ends the step."""


class GroupTrials:
    """The trials of one actor. Used by one thread."""

    def __init__(self, cfg: Config, waits: Waits, phase: Literal["sft", "rl"] = "rl") -> None:
        self._cfg, self._waits, self._limit = cfg, waits, DropLimit.of(cfg, phase)
        self._without_evidence = 0
        """The step of which a group was dropped although the trainer computed with no other one of it; 0 once a step
        was made."""
        self._unexplained = (0, 0)
        """The last step with which the trainer could not compute although it could with each group, and how often."""

    def made(self, groups: int) -> None:
        """A step was made of so many groups."""
        self._without_evidence = 0
        self._limit.kept(groups)

    def failed(self, step: int, ordinals: Sequence[int], check: Check, why: str) -> dict[int, str]:
        """The groups that are to be dropped, of those with which a step (counted from 1) failed, and why; none when
        each of them can be computed with. ``why``: the trainer has refused them together. Raises Fenced, and as
        ``check``."""
        # Of this step alone: the samples of earlier ones, with which the trainer is known to work, are gone.
        isolation: FaultIsolation[int] = FaultIsolation.of(self._cfg, _RETRY_S, halves=True, limit=self._limit)
        attempts = self._cfg.rollout.reward_attempts
        together, alone = (tuple(ordinals), why), Counter[int]()
        isolation.add(ordinals)
        [whole] = isolation.start(Lane.MAIN, time.monotonic())
        isolation.settle(Lane.MAIN, [(whole, [Failure.PROCESS] * len(ordinals))], time.monotonic())
        dropped: dict[int, str] = {}
        has_worked, again = False, RetryBackoff(*_RETRY_S)
        held: tuple[str, str, float] | None = None
        """Kind, text and begin of the wait for what fails: a check is a stage, which would end it."""

        def checked(some: Sequence[int]) -> ElasticRLError | None:
            with contextlib.nullcontext() if held is None else self._waits.holding(*held):
                return check(some)

        while isolation.is_pending:
            self._waits.pause(0.0)  # raises when the loop is to end
            if (probe := isolation.probe(Lane.PROBATION, _no_other)) is not None:
                isolation.probed(Lane.PROBATION, works=checked([probe]) is None)
                continue
            trials = isolation.start(Lane.PROBATION, time.monotonic())
            if not trials:
                self._waits.pause(min(isolation.left_s(time.monotonic()), _PAUSE_S))
                continue
            tried = tuple(trial.groups[0] for trial in trials)
            error = checked(tried)
            verdicts = isolation.settle(Lane.PROBATION, [
                (trial, [None if error is None else Failure.PROCESS]) for trial in trials], time.monotonic())
            if error is None:
                has_worked, held = True, None
                self._waits.works()
                continue
            if 1 < len(tried) < len(together[0]):
                together = tried, str(error)
            for ordinal, [verdict] in zip(tried, verdicts, strict=True):
                if verdict is Verdict.DROP:
                    dropped[ordinal] = str(error)
            if dropped and any(verdict is Verdict.LIMIT for [verdict] in verdicts):
                break  # without these the step fails again, and the limit is then waited at
            if Verdict.DROP not in (verdict for [verdict] in verdicts):
                kind = "plugin" if isinstance(error, PluginFailed) else "trainer"
                since = held[2] if held is not None and held[0] == kind else time.monotonic()
                held = kind, verdicts[0][0].reason(str(error), _CORRECT), since
                with self._waits.holding(*held):
                    self._waits.works()  # but for what is held
            if len(tried) == 1 and not has_worked:  # it may be none of the groups, and there may be a thousand
                alone.update(tried)
                if alone[tried[0]] >= attempts and step not in (1, self._without_evidence) and self._limit.drop():
                    self._without_evidence = step
                    dropped[tried[0]] = str(error)
                    break
                again.failed(time.monotonic())
                self._waits.pause(again.left_s(time.monotonic()))
        if not dropped and self._is_unexplained(step, attempts) and self._limit.drop():
            dropped[together[0][-1]] = f"with groups {sorted(together[0])} together: {together[1]}"
        for ordinal, reason in dropped.items():
            log.warning("group %d is dropped since the trainer cannot compute with it: %s", ordinal, reason)
        return dropped

    def _is_unexplained(self, step: int, attempts: int) -> bool:
        """Notes that each group of the step can be computed with; whether that was found in so many trials."""
        self._unexplained = step, 1 + (self._unexplained[1] if self._unexplained[0] == step else 0)
        return self._unexplained[1] >= attempts


def _no_other(number: int) -> int:
    raise SourceFailed("no group is known with which the trainer works")
