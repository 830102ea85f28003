"""Rewards that compare a response with the right answer: exact match and the token F1 of SQuAD. Pure."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.rewards.base import Reward, RewardContext, RewardFn, gold_answers

_ARTICLES = {"a", "an", "the"}
_MAX_MARKS, _JOINER = 30, "\u034f"
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatchOptions(Options):
    compare: Literal["tokens", "text"] = "tokens"
    """``tokens``: the response's token ids must equal the prompt's ``answer_ids``, including the end-of-sequence token,
    so that a response which continues or was cut off is wrong. ``text``: the decoded response must equal the answer,
    in Unicode's form NFKC and with each run of white space as one space."""
    ignore_case: bool = False
    """Whether upper and lower case are the same; with ``compare=text``."""


def exact_match(options: Mapping[str, Any], context: RewardContext) -> RewardFn:
    """1.0 for a response that equals the prompt's answer, else 0.0. Raises ConfigError."""
    chosen = read_options(ExactMatchOptions, options, of="the reward 'exact_match'", setting=context.setting)
    if chosen.compare == "tokens":
        return same_tokens

    def normalised(text: str) -> str:
        return normalised_text(text, ignore_case=chosen.ignore_case)

    async def same_text(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        right = set(map(normalised, gold_answers(prompt, context.decode)))
        return [Reward(float(normalised(sample.text) in right)) for sample in samples]

    return same_text


async def same_tokens(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
    """1.0 if the response equals the prompt's answer token for token, else 0.0."""
    return [Reward(float(sample.response_ids == prompt.answer_ids)) for sample in samples]


def normalised_text(text: str, *, ignore_case: bool) -> str:
    """The text in NFKC, each run of white space as one space, none around it."""
    text = unicodedata.normalize("NFKC", _stream_safe(text))
    return " ".join((text.casefold() if ignore_case else text).split())


def _stream_safe(text: str) -> str:
    """The text with a joiner after each 30 combining marks in a row, as Unicode's stream-safe format has it (UAX #15):
    to put a run of marks in order takes time that grows with the square of its length."""
    marks = re.escape("".join(c for c in set(text) if unicodedata.combining(unicodedata.normalize("NFKD", c)[0])))
    return re.sub(f"[{marks}]{{{_MAX_MARKS}}}(?=[{marks}])", f"\\g<0>{_JOINER}", text) if marks else text


class F1Options(Options):
    """The reward has no options."""


def f1(options: Mapping[str, Any], context: RewardContext) -> RewardFn:
    """The token F1 of the response and the nearest right answer, in [0, 1]. Raises ConfigError."""
    read_options(F1Options, options, of="the reward 'f1'", setting=context.setting)

    async def best_f1(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        right = [squad_tokens(answer) for answer in gold_answers(prompt, context.decode)]
        return [Reward(max(token_f1(squad_tokens(sample.text), one) for one in right)) for sample in samples]

    return best_f1


def squad_tokens(text: str) -> list[str]:
    """Words in lower case, without ASCII punctuation and English articles (SQuAD, arXiv:1606.05250, its evaluation)."""
    return [word for word in text.lower().translate(_PUNCTUATION).split() if word not in _ARTICLES]


def token_f1(given: Sequence[str], right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of two bags of words. Of empty bags it is 1.0 if both are empty, else 0.0.
    """
    if not given or not right:
        return float(not given and not right)
    common = sum((Counter(given) & Counter(right)).values())
    return 2.0 * common / (len(given) + len(right))
