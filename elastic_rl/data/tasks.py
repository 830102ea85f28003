"""Generated tasks with verifiable answers. Pure: the same settings and seed give the same problems."""

from __future__ import annotations

import random
from dataclasses import dataclass

from elastic_rl.config import DataConfig
from elastic_rl.data.tokenizer import EOS_ID, PAD_ID, encode


@dataclass(frozen=True)
class Problem:
    """A prompt with one right answer."""

    prompt_ids: list[int]
    answer_ids: list[int]
    """The right response, including the end-of-sequence token."""
    text: str
    """Prompt and answer as text, such as ``07+35=24`` (reversed)."""


class Addition:
    """``a+b=`` with both operands in [0, ``operand_below``), zero-padded so that all prompts have one length, and all
    answers. Answers have their least significant digit first unless ``answer_order`` is ``normal``.

    All pairs are shuffled by the seed and split once: eval problems are never trained on, in any phase. ``train`` and
    ``eval`` are lists of Problem, the same in every process with the same configuration.
    """

    eos_id = EOS_ID
    pad_id = PAD_ID

    def __init__(self, cfg: DataConfig, seed: int) -> None:
        below = cfg.operand_below
        self._operand_width = len(str(below - 1))
        self._reversed = cfg.answer_order == "reversed"
        self._answer_width = len(str(2 * (below - 1)))
        pairs = [(a, b) for a in range(below) for b in range(below)]
        random.Random(f"addition-split-{seed}").shuffle(pairs)
        cut = max(1, round(len(pairs) * cfg.eval_fraction))
        self.eval: list[Problem] = [self._problem(a, b) for a, b in pairs[:cut]]
        self.train: list[Problem] = [self._problem(a, b) for a, b in pairs[cut:]]

    @property
    def prompt_len(self) -> int:
        """Tokens of every prompt."""
        return 2 * self._operand_width + 2

    @property
    def response_len(self) -> int:
        """Tokens of every right answer, including the end-of-sequence token."""
        return self._answer_width + 1

    def _problem(self, a: int, b: int) -> Problem:
        prompt = f"{a:0{self._operand_width}d}+{b:0{self._operand_width}d}="
        answer = f"{a + b:0{self._answer_width}d}"
        if self._reversed:
            answer = answer[::-1]
        return Problem(encode(prompt), [*encode(answer), EOS_ID], prompt + answer)
