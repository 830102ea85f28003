"""Learning-rate schedule. Pure: a function of the settings and the step only, so a resumed run needs no state of it."""

from __future__ import annotations

import math

from elastic_rl.config import Config
from elastic_rl.config.section import LrDecay


def learning_rate(cfg: Config, phase: str, step: int) -> float:
    """Learning rate of a step, counted from 1 in its phase: ``lr`` of the phase's section times ``warmup`` times
    ``decay``, by the settings of that section, over ``train.steps`` or ``sft.max_steps`` steps. Raises ValueError for a
    step below 1."""
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
    section, steps = (cfg.sft, cfg.sft.max_steps) if phase == "sft" else (cfg.train, cfg.train.steps)
    return section.lr * warmup(step, section.lr_warmup_steps) * decay(
        section.lr_decay, step, steps, warmup_steps=section.lr_warmup_steps, final=section.lr_final_fraction,
        fraction=section.lr_decay_fraction)


def warmup(step: int, steps: int) -> float:
    """``step / steps`` before that many steps are done, then 1."""
    return min(1.0, step / max(steps, 1))


def decay(kind: LrDecay, step: int, steps: int, *, warmup_steps: int, final: float, fraction: float) -> float:
    """The part of the peak that a schedule of ``steps`` steps has left at one of them: 1 at the last step of the
    warm-up, or the first step where there is none, or the last but one of all; ``final`` at the last and after it.
    ``linear`` and ``cosine`` (arXiv 1608.03983) fall all the way; ``wsd`` (arXiv 2404.06395) stays at 1 and falls along
    a line over the last ``fraction`` of the steps; ``constant`` stays.
    """
    if kind == "constant":
        return 1.0
    first = float(max(min(warmup_steps, steps - 1), 1))
    if kind == "wsd":
        first = max(first, min(steps * (1 - fraction), steps - 1.0))
    done = min(max(step - first, 0.0) / max(steps - first, 1.0), 1.0)
    if kind == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return 1 - done * (1 - final)
