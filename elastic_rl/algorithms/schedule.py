"""Learning-rate schedule. Pure: a function of the settings and the step only, so a resumed run needs no state of it."""

from __future__ import annotations

from elastic_rl.config import TrainConfig


def learning_rate(cfg: TrainConfig, step: int) -> float:
    """Learning rate of RL step ``step``, counted from 1: with linear decay a line from ``cfg.lr``
    at the first to ``cfg.lr * cfg.lr_final_fraction`` at step ``cfg.steps`` and after it, else ``cfg.lr``; either is
    scaled by ``step / cfg.lr_warmup_steps`` before that many steps are done. Raises ValueError for a step below 1."""
    if step < 1:
        raise ValueError(f"RL steps count from 1, got {step}")
    rise = min(1.0, step / max(cfg.lr_warmup_steps, 1))
    if cfg.lr_decay == "constant":
        return cfg.lr * rise
    done = min((step - 1) / max(cfg.steps - 1, 1), 1.0)
    return cfg.lr * rise * (1 - done * (1 - cfg.lr_final_fraction))
