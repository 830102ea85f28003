"""The supervised fine-tuning (SFT) phase before RL."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import LrDecay, Positive, Section


class SftConfig(Section):
    target_eval_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    """The SFT phase ends once the accuracy on ``eval_problems`` held-out problems reaches this value. null: 0.4, which
    RL improves on; with ``mode: sft`` none, so that it ends after ``max_steps``."""
    max_steps: Annotated[int, Field(ge=0)] = 3000
    """Largest number of SFT steps; RL starts after them even below the target. 0: no SFT phase."""
    batch_size: Positive = 64
    """Number of demonstrations in an SFT step."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate of the SFT phase."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of SFT steps over which the learning rate rises linearly to ``lr``."""
    lr_decay: LrDecay = "constant"
    """Schedule of the learning rate after the warm-up. ``constant``: ``lr`` throughout. ``linear`` and ``cosine``: down
    to ``lr_final_fraction`` of ``lr`` at step ``max_steps``, along a line or half a cosine. ``wsd``: ``lr``, then a
    line down over the last ``lr_decay_fraction`` of ``max_steps`` (arXiv 2404.06395)."""
    lr_decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of ``max_steps`` over which the learning rate falls, with ``lr_decay: wsd``."""
    lr_final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of ``lr`` at step ``max_steps``, unless ``lr_decay`` is ``constant``."""
    eval_problems: Positive = 256
    """Number of held-out problems that an evaluation of the SFT phase takes: the same random subset every time. With
    256 its standard error is 0.03 at an accuracy of 0.4. The evaluation at the start of RL takes all of them."""
    eval_every_steps: Positive = 20
    """Number of SFT steps between two evaluations while the accuracy is below a quarter of the target, and without a
    target."""
    eval_every_steps_near_target: Positive = 2
    """Number of SFT steps between two evaluations from a quarter of the target on. The accuracy can then rise by 0.1
    within five steps, so a larger value overshoots the target."""

    state_every_steps: Positive = 500
    """Number of SFT steps between two commits of the trainer's state; a recovery repeats at most this many."""
