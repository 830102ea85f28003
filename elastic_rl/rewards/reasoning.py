"""The reward ``reasoning_gym``: each task of that package has a verifier of its own, which may be slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rl.config.options import read_options
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import PluginFailed
from elastic_rl.rewards.base import Reward, RewardContext
from elastic_rl.rewards.final_answer import final_answer
from elastic_rl.rewards.math_rewards import CheckedCalls, WorkerOptions, checked, require_package
from elastic_rl.rewards.worker_sandbox import WorkerSandbox

_ANSWER_CHARACTERS = 20_000
_SCORE = "elastic_rl.rewards.reasoning_scorer:score"
"""The scorer by its name: only the workers import it, and the package with it."""


class ReasoningGymOptions(WorkerOptions):
    extract: bool = True
    """Whether the answer is taken out of the response: ``<answer>`` tags or ``\\boxed{}`` behind ``</think>``, or all
    that is behind it. Else the whole response is the answer."""


class ReasoningGym:
    """The score in [0, 1] of the task's verifier. A prompt has ``metadata``: ``task``, the name of the task, and
    ``entry``, the entry of its dataset."""

    def __init__(self, options: Mapping[str, Any], context: RewardContext) -> None:
        """Raises ConfigError, also where no sandbox works."""
        self._options = read_options(ReasoningGymOptions, options, of="the reward 'reasoning_gym'",
                                     setting=context.setting)
        require_package("reasoning_gym", "reasoning-gym", "reasoning_gym")
        # Several verifiers evaluate the answer as Python; which ones is another matter in each release.
        sandbox = None if self._options.unsandboxed else WorkerSandbox("reasoning_gym")
        self._score = CheckedCalls(_SCORE, self._options, sandbox)

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        task, entry = prompt.metadata.get("task"), prompt.metadata.get("entry")
        if not isinstance(task, str) or not isinstance(entry, Mapping) or "answer" not in entry:
            raise PluginFailed('the prompt has no metadata {"task": NAME, "entry": {…, "answer": …}} of reasoning_gym')
        answers = [final_answer(sample.text, _ANSWER_CHARACTERS)[0] if self._options.extract else sample.text
                   for sample in samples]
        found = await self._score([{"task": task, "entry": dict(entry), "answer": answer} for answer in answers])
        return [checked(score if answer.strip() or score else None)  # a verifier says 0 of no answer, as of a wrong one
                for answer, score in zip(answers, found, strict=True)]

    def least_timeout_s(self, samples: int) -> float:
        return self._score.least_timeout_s(samples)

    def close(self) -> None:
        self._score.close()
