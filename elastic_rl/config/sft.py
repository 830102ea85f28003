"""The supervised fine-tuning (SFT) phase before RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Section


class SftConfig(Section):
    target_eval_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.4
    """The SFT phase ends once the eval accuracy reaches this value; RL improves on it."""
    max_steps: Annotated[int, Field(ge=0)] = 3000
    """Largest number of SFT steps; RL starts after them even below the target. 0: no SFT phase."""
    batch_size: Positive = 64
    """Number of problems in an SFT step."""
    lr: float = 1e-3
    """Learning rate of the SFT phase."""
    eval_every_steps: Positive = 5
    """Number of steps between two evaluations. The accuracy can rise by 0.1 within five steps, so a larger value
    overshoots the target."""
