"""Finds the groups of a step that the trainer cannot compute with: their gradient is not finite, their pass needs too
much memory, or the user's loss fails for them.

A step fails as one, whichever of its groups is to blame, so ``FaultIsolation`` is told what it is told of groups whose
process has ended: any of them may be it. The trainer then checks half of them, which changes nothing, and so on down to
single groups. One that fails alone, again and again, while the trainer computes with others in between, is dropped. If
it computes with none, or too many were dropped, the trainer or the loss is at fault, and the run waits for a person.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

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

    def __init__(self, cfg: Config, waits: Waits) -> None:
        self._attempts, self._limit, self._waits = cfg.rollout.reward_attempts, DropLimit.of(cfg), waits

    def made(self, groups: int) -> None:
        """A step was made of so many groups."""
        self._limit.kept(groups)

    def failed(self, ordinals: Sequence[int], check: Check) -> dict[int, str]:
        """The groups that are to be dropped, of those with which a step failed, and why; none when each of them can be
        computed with. Raises Fenced, and as ``check``."""
        # Of this step alone: the samples of earlier ones, with which the trainer is known to work, are gone.
        isolation: FaultIsolation[int] = FaultIsolation(
            attempts=self._attempts, limit=self._limit, retry_s=_RETRY_S, halves=True)
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
            error = checked([trial.groups[0] for trial in trials])
            verdicts = isolation.settle(Lane.PROBATION, [
                (trial, [None if error is None else Failure.PROCESS]) for trial in trials], time.monotonic())
            if error is None:
                has_worked, held = True, None
                self._waits.works()
                continue
            for trial, [verdict] in zip(trials, verdicts, strict=True):
                if verdict is Verdict.DROP:
                    dropped[trial.groups[0]] = str(error)
                    log.warning("group %d is dropped since the trainer cannot compute with it: %s", trial.groups[0],
                                error)
            if Verdict.DROP not in (verdict for [verdict] in verdicts):
                kind = "plugin" if isinstance(error, PluginFailed) else "trainer"
                since = held[2] if held is not None and held[0] == kind else time.monotonic()
                held = kind, verdicts[0][0].reason(str(error), _CORRECT), since
                with self._waits.holding(*held):
                    self._waits.works()  # but for what is held
            if len(trials) == 1 and not has_worked:  # it may be none of the groups, and there may be a thousand
                again.failed(time.monotonic())
                self._waits.pause(again.left_s(time.monotonic()))
        return dropped


def _no_other(number: int) -> int:
    raise SourceFailed("no group is known with which the trainer works")
