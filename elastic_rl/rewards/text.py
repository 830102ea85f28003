"""Rewards that compare a response with the right answer: exact match and the token F1 of SQuAD. Pure."""

from __future__ import annotations

import functools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import PluginFailed
from elastic_rl.rewards.base import Decode, Reward, RewardContext, RewardFn, gold_answers

_ARTICLES = {"a", "an", "the"}
_MAX_MARKS, _JOINER = 30, "\u034f"
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactMatchOptions(Options):
    compare: Literal["tokens", "text"] = "tokens"
    """``tokens``: the response's token ids must equal the prompt's ``answer_ids``, including the end-of-sequence token,
    so that a response which continues or was cut off is wrong; of several right answers, each with that end is.
    ``text``: the decoded response must equal the answer,
    in Unicode's form NFKC and with each run of white space as one space."""
    ignore_case: bool = False
    """Whether upper and lower case are the same; with ``compare=text``."""


def exact_match(options: Mapping[str, Any], context: RewardContext) -> RewardFn:
    """1.0 for a response that equals the prompt's answer, else 0.0. Raises ConfigError."""
    chosen = read_options(ExactMatchOptions, options, of="the reward 'exact_match'", setting=context.setting)
    if chosen.compare == "tokens":
        return functools.partial(same_tokens, decode=context.decode)

    def normalised(text: str) -> str:
        return normalised_text(text, ignore_case=chosen.ignore_case)

    async def same_text(prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        right = set(map(normalised, gold_answers(prompt, context.decode)))
        return [Reward(float(normalised(sample.text) in right)) for sample in samples]

    return same_text


async def same_tokens(prompt: Prompt, samples: Sequence[Sample], *, decode: Decode | None = None) -> list[Reward]:
    """1.0 if the response equals the prompt's answer token for token, else 0.0. Of several right answers ``answer_ids``
    are the first: a response that is another of them has its text, and ends with the same token. Raises PluginFailed
    where there are others and no tokenizer."""
    answer = prompt.metadata.get("answer")
    if not isinstance(answer, list | tuple) or len(answer) < 2 or prompt.answer_ids is None:
        return [Reward(float(sample.response_ids == prompt.answer_ids)) for sample in samples]
    if decode is None:
        raise PluginFailed("the prompt has several right answers, which only a tokenizer can compare with a response",
                           hint="give the data source a tokenizer, or its prompts one answer")
    right, end = set(gold_answers(prompt, decode)), prompt.answer_ids[-1]

    def is_right(ids: tuple[int, ...]) -> bool:
        return ids == prompt.answer_ids or (end in ids and ids.index(end) == len(ids) - 1 and decode(ids[:-1]) in right)

    return [Reward(float(is_right(sample.response_ids))) for sample in samples]


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
