"""The supervised fine-tuning (SFT) phase before RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Section

_NEAR = 0.25
"""Share of the target accuracy from which on evaluations are frequent."""


class SftConfig(Section):
    target_eval_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.4
    """The SFT phase ends once the accuracy on ``eval_problems`` held-out problems reaches this value; RL improves on
    it."""
    max_steps: Annotated[int, Field(ge=0)] = 3000
    """Largest number of SFT steps; RL starts after them even below the target. 0: no SFT phase."""
    batch_size: Positive = 64
    """Number of problems in an SFT step."""
    lr: float = 1e-3
    """Learning rate of the SFT phase, constant."""
    eval_problems: Positive = 256
    """Number of held-out problems that an evaluation of the SFT phase takes: the same random subset every time. With
    256 its standard error is 0.03 at an accuracy of 0.4. The evaluation at the start of RL takes all of them."""
    eval_every_steps: Positive = 20
    """Number of SFT steps between two evaluations while the accuracy is below a quarter of the target."""
    eval_every_steps_near_target: Positive = 2
    """Number of SFT steps between two evaluations from a quarter of the target on. The accuracy can then rise by 0.1
    within five steps, so a larger value overshoots the target."""

    def steps_to_next_eval(self, eval_accuracy: float | None) -> int:
        """Number of SFT steps until the evaluation after one that found ``eval_accuracy`` (None: not known)."""
        far = eval_accuracy is not None and eval_accuracy < _NEAR * self.target_eval_accuracy
        return self.eval_every_steps if far else min(self.eval_every_steps_near_target, self.eval_every_steps)
