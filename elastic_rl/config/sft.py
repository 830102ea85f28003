"""The supervised phase before RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Section


class SftConfig(Section):
    target_eval_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.4
    """The SFT phase ends once the eval accuracy reaches this; RL does the rest."""
    max_steps: Annotated[int, Field(ge=0)] = 3000
    batch_size: Positive = 64
    lr: float = 1e-3
    eval_every_steps: Positive = 5
    """Eval accuracy is taken this often; it can jump by 0.1 in five steps, so rarer looks overshoot the target."""
