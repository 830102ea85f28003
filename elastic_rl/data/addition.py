"""The source ``addition``: generated sums of two numbers, whose answers can be verified. Pure: the same options and
seed give the same prompts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import Prompt
from elastic_rl.data.tokenizer import EOS_ID, CharacterTokenizer, encode


class AdditionOptions(Options):
    """``data.options`` of this source."""

    operand_below: Annotated[int, Field(ge=5, le=500)] = 100
    """Operands are drawn from 0 up to this number, exclusive."""
    answer_order: Literal["reversed", "normal"] = "reversed"
    """Order of the digits in an answer. ``reversed``: least significant digit first, so that each carry is known when
    it is needed; easier to learn."""


class Addition:
    """``a+b=`` with both operands in [0, ``operand_below``), zero-padded so that all prompts have one length, and all
    answers.

    All pairs are shuffled by the seed and split once: what is in ``eval`` is never in ``train``.
    """

    stop_token_ids = (EOS_ID,)
    tokenizer = CharacterTokenizer()

    def __init__(self, options: Mapping[str, Any], *, seed: int, eval_fraction: float) -> None:
        """Raises ConfigError for unknown or wrong options."""
        chosen = read_options(AdditionOptions, options, of="the data source 'addition'", setting="data.options")
        below = chosen.operand_below
        self._operand_width = len(str(below - 1))
        self._reversed = chosen.answer_order == "reversed"
        self._answer_width = len(str(2 * (below - 1)))
        pairs = [(a, b) for a in range(below) for b in range(below)]
        random.Random(f"addition-split-{seed}").shuffle(pairs)
        cut = max(1, round(len(pairs) * eval_fraction))
        self.eval = [self._prompt(a, b) for a, b in pairs[:cut]]
        self.train = [self._prompt(a, b) for a, b in pairs[cut:]]

    @property
    def max_prompt_tokens(self) -> int:
        return 2 * self._operand_width + 2

    @property
    def max_response_tokens(self) -> int:
        return self._answer_width + 1

    def _prompt(self, a: int, b: int) -> Prompt:
        text = f"{a:0{self._operand_width}d}+{b:0{self._operand_width}d}="
        answer = f"{a + b:0{self._answer_width}d}"
        if self._reversed:
            answer = answer[::-1]
        return Prompt(tuple(encode(text)), text, (*encode(answer), EOS_ID), {"answer": answer})
