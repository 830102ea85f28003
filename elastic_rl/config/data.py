"""Prompts and their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Section


class DataConfig(Section):
    task: Literal["addition"] = "addition"
    """Generated prompts with a verifiable answer."""
    operand_below: Annotated[int, Field(ge=5, le=500)] = 100
    """Operands are drawn from [0, this)."""
    answer_order: Literal["reversed", "normal"] = "reversed"
    """``reversed``: answers are written least significant digit first, so that a carry is known when it is needed."""
    eval_fraction: Annotated[float, Field(gt=0, lt=0.9)] = 0.1
    """Share of all problems that is never trained on. With many fewer than 9,000 to train on, some seeds learn those by
    heart and stay near 0.85 on the others."""
