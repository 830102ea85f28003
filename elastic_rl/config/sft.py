"""The supervised phase before RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Section

_NEAR = 0.25
"""Share of the target accuracy from which on evaluations are frequent."""


class SftConfig(Section):
    target_eval_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.4
    """The SFT phase ends once the accuracy on ``eval_problems`` held-out problems reaches this; RL does the rest."""
    max_steps: Annotated[int, Field(ge=0)] = 3000
    """Supervised steps at most, whatever the accuracy."""
    batch_size: Positive = 64
    """Problems of one supervised step."""
    lr: float = 1e-3
    """Learning rate of the SFT phase; constant."""
    eval_problems: Positive = 256
    """Held-out problems that an evaluation of the SFT phase takes, the same random ones every time. With 256 its
    standard error is 0.03 at an accuracy of 0.4; the evaluation at the start of RL takes all of them."""
    eval_every_steps: Positive = 20
    """Supervised steps between evaluations while the accuracy is below a quarter of the target."""
    eval_every_steps_near_target: Positive = 2
    """Supervised steps between evaluations from a quarter of the target on. The accuracy can then rise by 0.1 in five
    steps, so that rarer evaluations overshoot the target."""

    def steps_to_next_eval(self, eval_accuracy: float | None) -> int:
        """Supervised steps until the next evaluation after one of ``eval_accuracy``; None: it is not known."""
        far = eval_accuracy is not None and eval_accuracy < _NEAR * self.target_eval_accuracy
        return self.eval_every_steps if far else min(self.eval_every_steps_near_target, self.eval_every_steps)
