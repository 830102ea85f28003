"""A job whose responses have widely different lengths, of up to 256 tokens, and a model of 22 million parameters.

The weights are random, so that each of the 112 tokens is about as probable as any other at each position. A response
ends at each token with a probability of about 1/127, whoever samples it: lengths are geometric, with a mean of about
110, and an eighth of them is cut at 256. The learning rate is that of a real model, and changes this by nothing that a
few steps could show. Answers for supervised steps have lengths of the same distribution.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_rl import config
from elastic_rl.bench.loop import job
from elastic_rl.bench.options import Options
from elastic_rl.config import Config
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.data.tokenizer import EOS, PAD, UNKNOWN, Tokenizer
from elastic_rl.errors import ConfigError
from elastic_rl.rewards.base import Reward

MAX_RESPONSE = 256
_END = 1 / 127
"""Probability that a response ends at a token. The model's own is so in the mean."""
_PROMPT, _EVALUATED, _TRAINED = 32, 4, 4096
_CHARACTERS = "".join(map(chr, (*range(0x21, 0x7F), *range(0xC0, 0xCF))))
_VOCABULARY = {token: i for i, token in enumerate([PAD, EOS, *_CHARACTERS, UNKNOWN])}
_SHAPE = {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 7, "num_heads": 8, "num_kv_heads": 4,
          "head_dim": 64, "max_positions": 320}
_SETTINGS = (f"--data.source={__name__}:make_source", f"--rollout.reward={__name__}:even_tokens",
             f"--dcs.arena_bytes={1 << 30}", f"--dcs.disk_bytes={4 << 30}")


def configure_rl(folder: Path, options: Options, steps: int, more: Sequence[str] = ()) -> Config:
    """GRPO with so many steps, and ``more`` settings. ``folder``: the folder of the run; the model is made in it.
    Raises ConfigError."""
    return _configure(folder, options, [
        "--sft.max_steps=0", "--train.prompts_per_step=8", "--train.group_size=4", "--train.lr=1e-6",
        f"--train.steps={steps}", f"--train.eval_every_steps={steps}", "--train.stop_eval_accuracy=null", *more])


def configure_sft(folder: Path, options: Options, steps: int, every: int) -> Config:
    """Supervised fine-tuning alone, with an evaluation, of next to nothing, after ``every`` steps: its record has the
    time. Raises ConfigError."""
    return _configure(folder, options, [
        "--mode=sft", "--sft.batch_size=32", "--sft.lr=1e-6", f"--sft.max_steps={steps}", "--sft.eval_problems=2",
        "--sft.target_eval_accuracy=1.0", f"--sft.eval_every_steps={every}",
        f"--sft.eval_every_steps_near_target={every}"])


def _configure(folder: Path, options: Options, settings: Sequence[str]) -> Config:
    folder.mkdir()
    given = [*job.place(folder, options), f"--model.path={folder / 'model'}", *_SETTINGS, *settings, *options.settings]
    cfg = config.load(None, given)
    if cfg.model.path == str(folder / "model"):
        make_model(folder)
    return cfg


def make_model(folder: Path, shape: Mapping[str, int] = _SHAPE) -> Path:
    """A model with random weights, and its tokenizer, of one token for each character, in ``folder / "model"``.
    ``shape``: settings of ``model``."""
    from elastic_rl.data.tiny_model import make_model_dir  # it imports torch
    from elastic_rl.data.tokenizer import make_tokenizer

    make_tokenizer(_VOCABULARY).save_pretrained(folder / "tokenizer")
    return make_model_dir(folder / "model", config.parse({"model": dict(shape)}), folder / "tokenizer")


class LongResponses:
    """Prompts of 32 random tokens, with random answers."""

    max_prompt_tokens, max_response_tokens = _PROMPT, MAX_RESPONSE

    def __init__(self, seed: int, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.stop_token_ids = tokenizer, tokenizer.eos_ids
        draw = random.Random(f"long-responses-{seed}")
        self.eval = [self._prompt(draw) for _ in range(_EVALUATED)]
        self.train = [self._prompt(draw) for _ in range(_TRAINED)]

    def _prompt(self, draw: random.Random) -> Prompt:
        characters = range(2, 2 + len(_CHARACTERS))
        answer = draw.choices(characters, k=answer_tokens(draw) - 1)
        return Prompt(tuple(draw.choices(characters, k=_PROMPT)), "", (*answer, self.stop_token_ids[0]))


def answer_tokens(draw: random.Random) -> int:
    """Length of an answer, with the token that ends it. Pure but for ``draw``."""
    return next((n for n in range(1, MAX_RESPONSE) if draw.random() < _END), MAX_RESPONSE)


def make_source(options: Mapping[str, Any], *, seed: int, tokenizer: Tokenizer) -> LongResponses:
    """``data.source`` of this job. Raises ConfigError."""
    if options:
        raise ConfigError("the data source of this bench takes no data.options")
    return LongResponses(seed, tokenizer)


async def even_tokens(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
    """``rollout.reward`` of this job: the fraction of the tokens of a response that have even ids, which says nothing
    about its length."""
    return [Reward(even_fraction(sample.response_ids)) for sample in samples]


def even_fraction(token_ids: Sequence[int]) -> float:
    return sum(token % 2 == 0 for token in token_ids) / max(len(token_ids), 1)
