"""Rewards of mathematical results: ``math_verify``, and ``deepscaler``, which also looks at how the answer is given."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import ConfigError
from elastic_rl.plugins.worker_pool import MAX_MEMORY_MB, CallGivenUp, WorkerPool, values
from elastic_rl.rewards.base import Reward, RewardContext, gold_answers, rounds
from elastic_rl.rewards.final_answer import THINK_END, boxed, final_answer
from elastic_rl.rewards.math_text import spelled
from elastic_rl.rewards.worker_sandbox import WorkerSandbox

log = logging.getLogger(__name__)

GIVEN_UP = "given_up"
"""Part of a reward: 1.0 where the check was killed, which makes the reward 0."""
_START_S = 10.0
"""What the start of a worker, in place of one that was killed, takes on a busy machine."""
_GRADE = "elastic_rl.rewards.math_grading:grade"
UNREAD = "unread"
"""Part of a reward: 1.0 where no answer could be read in the response, which makes the reward 0."""


class WorkerOptions(Options):
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """Seconds that the check of one response may take. What takes longer is killed and tried once more; then the
    reward is 0 and has the part ``given_up``."""
    processes: Annotated[int, Field(ge=1, le=256)] = 2
    """Number of processes that check responses."""
    memory_mb: Annotated[int, Field(ge=256, le=MAX_MEMORY_MB)] = 4096
    """Address space of such a process in MiB."""
    unsandboxed: bool = False
    """Whether the processes have the rights and the environment of the run, rather than to be in a sandbox."""


class MathVerifyOptions(WorkerOptions):
    last_characters: Annotated[int, Field(ge=100, le=1_000_000)] = 20_000
    """Characters at the end of a response in which its result is looked for."""


class DeepScalerOptions(MathVerifyOptions):
    require_think: bool = False
    """Whether a response without ``</think>`` gets 0: it did not finish thinking."""
    format_weight: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Weight of the format, which is 1 for an answer in ``\\boxed{}`` or ``<answer>`` tags behind the thinking; the
    right result has the rest."""


class CheckedCalls:
    """Checks of single responses in worker processes, where a call that is given up is tried once more: the machine
    may have been busy."""

    def __init__(self, function: str, options: WorkerOptions, sandbox: WorkerSandbox | None) -> None:
        self._pool = WorkerPool(function, options.processes, memory_mb=options.memory_mb, sandbox=sandbox)
        self._timeout_s, self._processes = options.timeout_s, options.processes

    def least_timeout_s(self, calls: int) -> float:
        """Seconds for so many calls, if each hangs, both times."""
        return 2 * rounds(calls, self._processes) * (self._timeout_s + _START_S)

    async def __call__(self, jobs: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The result of each; for a call that was given up twice, ``CallGivenUp``. Raises PluginFailed."""
        found = await self._pool.calls(jobs, self._timeout_s)
        again = [i for i, outcome in enumerate(found) if isinstance(outcome, CallGivenUp)]
        for i, outcome in zip(again, await self._pool.calls([jobs[i] for i in again], self._timeout_s), strict=True):
            found[i] = outcome
        values([outcome for outcome in found if not isinstance(outcome, CallGivenUp)])
        return found

    def close(self) -> None:
        self._pool.close()


def _sandbox(options: WorkerOptions) -> WorkerSandbox | None:
    """None where there is none: math-verify parses text, and does not run it."""
    if not options.unsandboxed:
        try:
            return WorkerSandbox("math_verify")
        except ConfigError as e:
            log.warning("results are compared without a sandbox: %s", e)
    return None


def require_package(module: str, package: str, reward: str) -> None:
    """Raises ConfigError where a package is missing."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"the reward {reward!r} needs the package {package}, which is not installed",
                          hint=f"pip install {package}")


class MathVerify:
    """1.0 for a response whose answer (``answer_of``) is worth the prompt's answer, as math-verify compares them, else
    0.0."""

    def __init__(self, options: Mapping[str, Any], context: RewardContext) -> None:
        """Raises ConfigError."""
        self._options = read_options(MathVerifyOptions, options, of="the reward 'math_verify'", setting=context.setting)
        require_package("math_verify", "math-verify", "math_verify")
        self._decode = context.decode
        self._grade = CheckedCalls(_GRADE, self._options, _sandbox(self._options))

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        right = gold_answers(prompt, self._decode)
        return [checked(found) for found in await self._grade(
            [{"text": sample.text[-self._options.last_characters:], "right": right} for sample in samples])]

    def least_timeout_s(self, samples: int) -> float:
        return self._grade.least_timeout_s(samples)

    def close(self) -> None:
        self._grade.close()


def checked(found: Any) -> Reward:
    """The reward of a check: its result, a number or None where it could read nothing; 0 where it was given up."""
    given_up = isinstance(found, CallGivenUp)
    return Reward(0.0 if given_up or found is None else float(found),
                  {GIVEN_UP: float(given_up), UNREAD: float(found is None)})


class DeepScaler:
    """The reward of DeepScaleR: ``math_verify``, and with ``format_weight`` a reward for an answer that is marked."""

    def __init__(self, options: Mapping[str, Any], context: RewardContext) -> None:
        """Raises ConfigError."""
        self._options = read_options(DeepScalerOptions, options, of="the reward 'deepscaler'", setting=context.setting)
        require_package("math_verify", "math-verify", "deepscaler")
        self._decode = context.decode
        self._grade = CheckedCalls(_GRADE, self._options, _sandbox(self._options))

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        right = gold_answers(prompt, self._decode)
        same = {spelled(boxed(text) or text) for text in right}
        answers = [final_answer(sample.text, self._options.last_characters) for sample in samples]
        found: dict[int, Any] = {}
        for i, (sample, (answer, _)) in enumerate(zip(samples, answers, strict=True)):
            if self._options.require_think and THINK_END not in sample.text:
                found[i] = False
            elif not answer:
                found[i] = None
            elif spelled(answer) in same:
                found[i] = True
        left = [i for i in range(len(samples)) if i not in found]
        jobs = [{"text": samples[i].text.rpartition(THINK_END)[2][-self._options.last_characters:], "right": right}
                for i in left]
        found |= zip(left, await self._grade(jobs), strict=True)
        return [self._reward(sample.text, marked, checked(found[i]))
                for i, (sample, (_, marked)) in enumerate(zip(samples, answers, strict=True))]

    def _reward(self, text: str, marked: bool, of_result: Reward) -> Reward:
        """``of_result``: the reward of its result alone."""
        chosen = self._options
        formatted = marked and (THINK_END in text or not chosen.require_think)
        value = 0.0 if of_result.parts[GIVEN_UP] else (
            (1.0 - chosen.format_weight) * of_result.value + chosen.format_weight * formatted)
        return Reward(value, {"correct": of_result.value, "format": float(formatted), **of_result.parts})

    def least_timeout_s(self, samples: int) -> float:
        return self._grade.least_timeout_s(samples)

    def close(self) -> None:
        self._grade.close()
