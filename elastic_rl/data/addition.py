"""The source ``addition``: generated sums of two numbers, whose answers can be verified. Pure: the same options and
seed give the same prompts."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
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
        self._answer_width = len(str(2 * (below - 1)))
        step = -1 if chosen.answer_order == "reversed" else 1
        self._operands = _encoded(f"{n:0{self._operand_width}d}" for n in range(below))
        self._answers = _encoded(f"{n:0{self._answer_width}d}"[::step] for n in range(2 * below - 1))
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
        (left, left_ids), (right, right_ids), (answer, answer_ids) = (
            self._operands[a], self._operands[b], self._answers[a + b])
        return Prompt((*left_ids, _PLUS, *right_ids, _EQUALS), f"{left}+{right}=", (*answer_ids, EOS_ID),
                      {"answer": answer})


_PLUS, _EQUALS = encode("+=")


def _encoded(numbers: Iterable[str]) -> list[tuple[str, list[int]]]:
    """Each number with its tokens: there are many more prompts than numbers."""
    return [(number, encode(number)) for number in numbers]
