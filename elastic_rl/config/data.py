"""Prompts and their answers."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from pydantic import Field, field_validator

from elastic_rl.config.options import require_options
from elastic_rl.config.section import Section


class DataConfig(Section):
    source: str = "addition"
    """Source of the prompts: ``jsonl`` or ``parquet`` (rows of files), ``reasoning_gym`` (problems that the package of
    this name generates without end), ``mix`` (several sources by weight), ``addition`` (generated sums of two numbers,
    whose answers can be verified), or your own as ``package.module:factory``, which is called as ``factory(options)``
    with those of the keywords ``seed``, ``eval_fraction``, ``tokenizer`` and ``folder`` that it takes, and returns a
    ``DataSource``."""
    options: dict[str, Any] = {}
    """Options of the source, of what JSON has: text, numbers, true, false, null, lists and mappings. ``jsonl`` and
    ``parquet`` need ``paths``, one of ``prompt_key``, ``messages_key`` and ``template``, ``max_prompt_tokens`` and
    ``max_response_tokens``; ``reasoning_gym`` needs ``tasks`` and both lengths; ``mix`` needs ``parts``; the page
    docs/data.md has all of theirs. ``addition`` has ``operand_below`` (operands are drawn from 0 up to this number,
    exclusive; 100) and ``answer_order`` (``reversed``: least significant digit first, which is easier to learn, or
    ``normal``)."""
    eval_fraction: Annotated[float, Field(gt=0, lt=0.9)] = 0.1
    """Fraction of the prompts that is held out for evaluation and never trained on, for sources whose options name no
    evaluation set. With far fewer than 9,000 problems
    to train on, some seeds memorise those and stay near 0.85 on the held-out ones."""

    template_date: date | None = None
    """The day that chat templates write as today's (``strftime_now``), as ``2026-11-25``. null: the one on which the
    job begins; it keeps that, since its prompts are to be the same in every process and after every restart."""

    @field_validator("options")
    @classmethod
    def _require_json(cls, options: dict[str, Any]) -> dict[str, Any]:
        return require_options(options)
