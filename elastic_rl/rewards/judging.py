"""What a judge model is asked about the responses to a prompt, and what its verdicts are worth. Pure.

One prompt of the judge is a ``Question``; the same question may be asked several times (``votes``), and its verdicts
are averaged. ``scalar``: a question for each response, answered with a number. ``pairwise``: a question for each pair
of responses, in both orders, since judges prefer the one that they see first (arXiv:2306.05685, section 3.3).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import regex
from pydantic import Field, field_validator, model_validator

from elastic_rl.config.options import Options
from elastic_rl.config.pools import PoolName
from elastic_rl.config.sampling import SamplingOptions
from elastic_rl.data.templates import Template
from elastic_rl.errors import ConfigError

NO_VERDICT = "no_verdict"
"""Part of a reward: the fraction of its questions to which the judge gave no verdict."""
_SCALAR = """Rate how well the response answers the question, with an integer from {low} to {high}; {high} is best. The
marks with {mark} show where each begins and ends.

[Question {mark}]
{question}

[Response {mark}]
{response}

[End {mark}]
End with a line of the form: Rating: NUMBER"""
_PAIRWISE = """Which of the two responses answers the question better? The marks with {mark} show where each begins
and ends.

[Question {mark}]
{question}

[Response A {mark}]
{response}

[Response B {mark}]
{other}

[End {mark}]
End with a line of the form: Verdict: A, or Verdict: B, or Verdict: tie"""
_SEPARATOR = r"[ \t*_:=\"'$]*(?:\[\[|\\boxed\{(?:\\text\{)?)?[ \t*_\"']*"
"""What may be between the word and the verdict, which judges also write as ``[[A]]`` or ``\\boxed{A}``."""
_RATING = (rf"(?i)\brating\b(?:[ \t]*\([^)\n]*\))?{_SEPARATOR}(-?\d+(?:\.\d+)?(?P<exponent>e[-+]?\d+)?)"
           r"[ \t*_\]}$]*(?:(?:/|(?:out[ \t]+)?of\b)[^\d\n]{0,20}(?P<best>\d+(?:\.\d+)?))?")
_VERDICT = rf"(?i:\bverdict\b){_SEPARATOR}(?:[Aa] (?=(?i:tie)))?((?i:tie)|A|B)\b"
_FIELDS = {"scalar": ("question", "response", "answer", "mark", "low", "high"),
           "pairwise": ("question", "response", "other", "answer", "mark")}
_MAX_PATTERN = 500
_PATTERN_S = 1.0
"""A pattern that takes longer on an answer of the judge finds no verdict in it."""
_WINS = {"a": 1.0, "tie": 0.5, "b": 0.0}


class JudgeOptions(Options, SamplingOptions):
    """``rollout.reward_options`` of the reward ``genrm``."""

    pool: PoolName = "genrm"
    """Pool of the judge's engines; one of ``pools``."""
    mode: Literal["scalar", "pairwise"] = "scalar"
    """``scalar``: each response is rated by itself. ``pairwise``: the responses to a prompt are compared with one
    another; a reward is the fraction of its comparisons that a response wins. One that is alone, as in an evaluation,
    is compared with the prompt's answer."""
    prompt: str = ""
    """Text of a question, with fields in braces: ``{question}`` (the prompt's text), ``{response}``, ``{answer}`` (the
    prompt's answer), ``{mark}`` (letters that no response can know, for the places where one begins and ends);
    ``{low}`` and ``{high}`` with ``scalar``, and ``{other}``, the second response, with ``pairwise``.
    Any other field is that of the prompt's metadata. Empty: a usual one."""
    system_prompt: str = ""
    """Text of a system message before it."""
    chat_template: bool = True
    """Whether the question is made a conversation by the chat template of the judge's tokenizer; if not, the text is
    the prompt."""
    chat_template_options: dict[str, Any] = {}
    """Further variables of the chat template, such as ``enable_thinking``."""
    verdict: Annotated[str, Field(max_length=_MAX_PATTERN)] = ""
    """Regular expression whose first group is the verdict; its last match in the judge's answer counts. A number with
    ``scalar``; ``A`` (the first response), ``B`` or ``tie`` with ``pairwise``. Empty: what follows the word ``Rating``
    or ``Verdict``, also as ``[[A]]`` or ``\\boxed{A}``; a number of another scale (``8 out of 100``) or with an
    exponent is no rating."""
    low: float = 1.0
    """Worst rating with ``scalar``, which is worth 0."""
    high: float = 10.0
    """Best rating with ``scalar``, which is worth 1."""
    opponents: Annotated[int, Field(ge=1, le=64)] = 2
    """Responses that each one is compared with at least, with ``pairwise``."""
    votes: Annotated[int, Field(ge=1, le=64)] = 1
    """Times that each question is asked; more than once only with a ``temperature``."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Temperature of the judge's answers; 0: the most likely tokens."""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    """Longest answer of the judge, in tokens."""
    read_cut_answers: bool = False
    """Whether an answer that ``max_tokens`` cut off may have a verdict, for judges that begin with it. Without it such
    an answer has none: what a judge quotes while it thinks could count."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1 << 24)] = 8192
    """Longest question, in tokens. A longer one is not asked: it counts as one without a verdict, which is worth 0."""
    max_response_characters: Annotated[int, Field(ge=1, le=1 << 24)] = 20_000
    """Characters at the end of a response that the judge sees."""

    @field_validator("verdict")
    @classmethod
    def _check_verdict(cls, pattern: str) -> str:
        try:
            groups = regex.compile(pattern).groups
        except regex.error as e:
            raise ValueError(f"it is no regular expression: {e}") from e
        if pattern and not groups:
            raise ValueError("it has no group, which would be the verdict: put parentheses around that")
        return pattern

    @model_validator(mode="after")
    def _check(self) -> JudgeOptions:
        given, other = self.model_fields_set, "pairwise" if self.mode == "scalar" else "scalar"
        for name, of in (("low", "scalar"), ("high", "scalar"), ("opponents", "pairwise")):
            if name in given and of != self.mode:
                raise ValueError(f"{name} has no effect with mode={self.mode}: it is for mode={other}")
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be less than high={self.high:g}")
        if self.votes > 1 and not self.temperature:
            raise ValueError(f"votes={self.votes} with temperature=0: all answers would be the same")
        try:
            fields = self.template.fields
        except ConfigError as e:
            raise ValueError(e.message) from e
        for needed in ("response", "other")[:2 if self.mode == "pairwise" else 1]:
            if needed not in fields:
                raise ValueError(f"prompt has no field {{{needed}}}, so the judge would not see the response")
        if self.system_prompt and not self.chat_template:
            raise ValueError("system_prompt has no effect without chat_template: write it into prompt")
        return self

    @cached_property
    def template(self) -> Template:
        """Raises ConfigError."""
        return Template.parse(self.prompt or {"scalar": _SCALAR, "pairwise": _PAIRWISE}[self.mode], "prompt")

    @property
    def metadata_fields(self) -> tuple[str, ...]:
        """Fields of ``prompt`` that are of the prompt's metadata."""
        return tuple(name for name in self.template.fields if name not in _FIELDS[self.mode])

    def uses_answer(self, responses: int) -> bool:
        """Whether the judge sees the prompt's answer beside so many responses."""
        return "answer" in self.template.fields or (self.mode == "pairwise" and responses == 1)


@dataclass(frozen=True)
class JudgeRequest:
    """The responses to one prompt, to be judged together."""

    options: JudgeOptions
    question: str
    answer: str
    """"" where the judge does not see it."""
    responses: tuple[str, ...]
    seed: int | None = None
    """Seed of the judge's sampling."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the prompt: what ``JudgeOptions.metadata_fields`` name."""


@dataclass(frozen=True)
class Question:
    """A text for the judge, about one response or two, by their position; the prompt's answer has the one after the
    last."""

    text: str
    response: int
    other: int | None = None


@dataclass(frozen=True)
class Judgement:
    """What a response is worth, from 0 to 1, and the fraction of its questions to which there was no verdict; each of
    these counts 0."""

    value: float
    no_verdict: float


def pairs(count: int, opponents: int) -> list[tuple[int, int]]:
    """Pairs of ``count`` responses so that each is in ``opponents`` of them or more, or in all that there are: each
    with those that follow it in a ring."""
    reach = min(math.ceil(opponents / 2), count // 2)
    return sorted({(min(i, j), max(i, j)) for i in range(count) for step in range(1, reach + 1)
                   if (j := (i + step) % count) != i})


def questions(request: JudgeRequest, plain: Callable[[str], str] = lambda text: text) -> list[Question]:
    """What the judge is asked; nothing without a response. ``plain``: makes a text that others wrote one without the
    judge's control tokens."""
    options = request.options
    if not request.responses:
        return []
    texts = [*request.responses, request.answer]
    responses = [plain(text[-options.max_response_characters:]) for text in texts]
    shared = {**{name: plain(text) for name, text in request.metadata.items()}, "question": plain(request.question),
              "answer": plain(request.answer)}
    if "mark" in options.template.fields:
        shared["mark"] = hashlib.blake2b(repr((request.seed, texts, shared)).encode(), digest_size=4).hexdigest()
    if options.mode == "scalar":
        shared |= {"low": f"{options.low:g}", "high": f"{options.high:g}"}

    def ask(response: int, other: int | None = None) -> Question:
        row = {**shared, "response": responses[response], **({"other": responses[other]} if other is not None else {})}
        return Question(options.template.render(row, "the judge's prompt"), response, other)

    if options.mode == "scalar":
        return [ask(i) for i in range(len(request.responses))]
    compared = pairs(len(request.responses), options.opponents) if len(request.responses) > 1 else [(0, 1)]
    return [ask(*order) for pair in compared for order in (pair, pair[::-1])]


def verdict(options: JudgeOptions, text: str) -> float | None:
    """What an answer of the judge says of the response, or of the first of two, from 0 to 1; None if nothing."""
    pattern = options.verdict or {"scalar": _RATING, "pairwise": _VERDICT}[options.mode]
    try:
        found = [match for match in regex.finditer(pattern, text, timeout=_PATTERN_S) if match[1] is not None]
    except TimeoutError:
        return None
    if not found:
        return None
    last = found[-1]
    if options.mode == "pairwise":
        return _WINS.get(last[1].strip().lower())
    if not options.verdict and (last["exponent"] or (last["best"] and float(last["best"]) != options.high)):
        return None  # a rating on another scale than the one that was asked for
    try:
        rating = float(last[1])
    except ValueError:
        return None
    return (rating - options.low) / (options.high - options.low) if options.low <= rating <= options.high else None


def judgements(request: JudgeRequest, asked: Sequence[Question], answers: Sequence[Sequence[str]]) -> list[Judgement]:
    """What each response is worth: the mean of the verdicts of its questions. ``answers``: the answers of the judge,
    for each question one or more; none for a question that could not be asked.

    A missing verdict counts 0, for both responses of a pair: else one that derails the judge wherever it would lose
    would get the full reward. Which of the two did it is unknown, but it does so in all its comparisons, and each of
    the others in one."""
    count = len(request.responses) + 1  # with the prompt's answer
    won, missed, total = [0.0] * count, [0] * count, [0] * count
    for question, texts in zip(asked, answers, strict=True):
        about = [question.response] + ([question.other] if question.other is not None else [])
        for value in [verdict(request.options, text) for text in texts] or [None]:
            for i in about:
                total[i] += 1
                if value is None:
                    missed[i] += 1
                else:
                    won[i] += value if i == question.response else 1.0 - value
    return [Judgement(won[i] / total[i], missed[i] / total[i]) if total[i] else Judgement(0.0, 1.0)
            for i in range(count - 1)]
