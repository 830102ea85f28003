"""``mode: eval``, and the evaluations between steps of RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.sampling import SamplingOptions
from elastic_rl.config.section import Positive


class EvalConfig(SamplingOptions):
    samples: Positive = 1
    """Number of samples of each prompt, whose reward is their mean. With more than one, ``mode: eval`` reports pass@k
    besides, for k = 1, 2, 4, … up to this number."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature. 0: greedy, so that all samples of a prompt are the same."""
    pass_reward: float = 1.0
    """With ``mode: eval``, reward from which on a sample counts as right in pass@k."""
    prompts_per_step: Positive = 256
    """With ``mode: eval``, number of prompts whose samples are written to disk together; a crash repeats at most so
    many."""
