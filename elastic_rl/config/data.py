"""Prompts and their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Section


class DataConfig(Section):
    task: Literal["addition"] = "addition"
    """Source of the prompts. ``addition``: generated sums of two numbers, whose answers can be verified."""
    operand_below: Annotated[int, Field(ge=5, le=500)] = 100
    """Operands are drawn from 0 up to this number, exclusive."""
    answer_order: Literal["reversed", "normal"] = "reversed"
    """Order of the digits in an answer. ``reversed``: least significant digit first, so that each carry is known when
    it is needed; easier to learn."""
    eval_fraction: Annotated[float, Field(gt=0, lt=0.9)] = 0.1
    """Fraction of all problems that is held out for evaluation and never trained on. With far fewer than 9,000 problems
    to train on, some seeds memorise those and stay near 0.85 on the held-out ones."""
