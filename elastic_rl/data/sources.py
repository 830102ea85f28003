"""Where prompts come from: the ``DataSource`` seam, and the sources that the project has."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from elastic_rl.config import Config
from elastic_rl.data.addition import Addition
from elastic_rl.data.file_source import FileSource, jsonl, parquet
from elastic_rl.data.generated_tasks import ReasoningGym
from elastic_rl.data.mix import Mix
from elastic_rl.data.mixing import Concatenated
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.order import Order, PromptOrder, sft_order
from elastic_rl.data.samples import MAX_TOKEN_IDS, Prompt
from elastic_rl.data.tokenizer import VOCAB_SIZE, CharacterTokenizer, Tokenizer
from elastic_rl.data.values import plain_json
from elastic_rl.errors import ConfigError, SourceFailed
from elastic_rl.host.paths import JobPaths
from elastic_rl.models.arch import vocabulary_of
from elastic_rl.plugins.user_code import describe, plain, resolve, text_of
from elastic_rl.runtime.json_values import is_unicode


class DataSource(Protocol):
    """Prompts by index, tokenized. The same options, seed and files give the same prompts in every process: a prompt
    group is known by the position of its prompt alone, over every restart.

    A source may have, besides: ``evals``, its evaluation sets by name, where ``eval`` is not the only one;
    ``order(seed)``, an ``Order`` of its own over the indices of ``train``; and ``tokenizer``, a ``Tokenizer``, with
    which rewards get texts."""

    @property
    def train(self) -> Sequence[Prompt]:
        """What is trained on; indexed, and not iterated, so it may be lazy."""

    @property
    def eval(self) -> Sequence[Prompt]:
        """The prompts that are held out: never trained on."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Tokens that end a response."""

    @property
    def max_prompt_tokens(self) -> int: ...

    @property
    def max_response_tokens(self) -> int:
        """Longest response that is generated."""


SOURCES: dict[str, Callable[..., DataSource]] = {
    "addition": Addition, "jsonl": jsonl, "parquet": parquet, "reasoning_gym": ReasoningGym, "mix": Mix}
"""Factories by name: ``factory(options, …)`` with those keywords of ``OFFERED`` that it takes."""
OFFERED = ("seed", "eval_fraction", "tokenizer", "folder", "make_part")
"""Keywords for factories: the job's seed, ``data.eval_fraction``, the ``Tokenizer`` of the job's model, the folder for
what is derived from the data and kept, and ``make_part(source, options, seed)``, which makes another source."""


class _Counted(Sequence[Prompt]):
    """The prompts of a source, whose number is read once: it may be lazy, and ordinals of groups stand for prompts by
    their number."""

    def __init__(self, prompts: Any) -> None:
        self._prompts, self._count = prompts, len(prompts)
        self.fingerprint_indices = getattr(prompts, "fingerprint_indices", None)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return (self._prompts[i] for i in range(self._count))


@dataclass(frozen=True)
class CheckedSource:
    """A source as it was when it was made: nothing but reading a prompt calls the user's code again."""

    train: Sequence[Prompt]
    """Empty where the job does not use them."""
    eval: Sequence[Prompt]
    stop_token_ids: tuple[int, ...]
    max_prompt_tokens: int
    max_response_tokens: int
    evals: Mapping[str, Sequence[Prompt]]
    """Evaluation sets by name; ``eval`` is one of them."""
    eval_name: str
    """Name of ``eval`` among them."""
    eval_parts: tuple[str, ...]
    """Names of the sets that ``eval`` consists of, one after the other; empty where it has prompts of its own."""
    tokenizer: Tokenizer | None
    """The source's tokenizer; None for a source of the user's without one."""
    order: Callable[[int], Order]
    """Makes the order of ``train`` from the seed."""
    vocabulary: int
    """Number of the model's tokens; ids of prompts are below it."""
    rows_left_out: Sequence[str] = ()
    """What the options leave out, in words."""


def make_source(cfg: Config) -> CheckedSource:
    """The source that ``data`` describes. Raises ConfigError, also for a source whose first prompts or limits are not
    what they must be."""
    named = cfg.data.source
    tokenizer = ModelTokenizer(cfg.model.path, date=cfg.data.template_date) if cfg.model.path else CharacterTokenizer()
    try:
        source = _check(_made(named, cfg.data.options, cfg.seed, cfg, tokenizer), train=cfg.uses_training_prompts,
                        vocabulary=(vocabulary_of(Path(cfg.model.path).expanduser()) or MAX_TOKEN_IDS)
                        if cfg.model.path else VOCAB_SIZE)
        first = [(part, prompts[0]) for part, prompts in (("train", source.train), ("eval", source.eval)) if prompts]
        fault = _fault_of_limits(source) or next(
            (f"gives {part}[0] {reason}" for part, prompt in first
             if (reason := prompt_fault(prompt, source.vocabulary))), "")
        if source.train:
            for order in (source.order(cfg.seed), *([sft_order(source, cfg.seed)] if cfg.imitates_answers else ())):
                read_order(order, [0], len(source.train), named=named)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # whatever a user's source raises: also SystemExit
        if isinstance(e, ConfigError | SourceFailed) and named in SOURCES:
            raise ConfigError(e.message, hint=e.hint) from e
        if isinstance(e, ConfigError):
            raise ConfigError(text_of(e)) from e
        raise ConfigError(f"data.source={named!r} cannot be made: {describe(e)}",
                          hint=f"it is called as factory(options) with those of the keywords {', '.join(OFFERED)} that "
                          "it takes, and returns a DataSource") from e
    if fault:
        raise ConfigError(f"data.source={named!r} {fault}", hint="DataSource in elastic_rl/data/sources.py says what "
                          "a source has")
    for part, what, needed in ((source.eval, "evaluate", True), (source.train, "train", cfg.uses_training_prompts)):
        if needed and not part:
            raise ConfigError(f"the data source {named!r} has no prompt to {what} on",
                              hint="check data.options, such as paths, and data.eval_fraction")
    if cfg.imitates_answers and any(prompt.answer_ids is None for _, prompt in first):
        raise ConfigError(f"the data source {named!r} has no answers to imitate",
                          hint="set sft.max_steps to 0, or give the source's prompts answer_ids")
    return source


def _made(named: str, options: Mapping[str, Any], seed: int, cfg: Config, tokenizer: Tokenizer) -> Any:
    """What the factory of this name returns. Raises ConfigError for a name or keywords that do not fit, and whatever
    the factory raises."""
    factory = resolve(named, SOURCES, setting="data.source")
    # A copy of the options: a factory that takes some out of the dict would change the settings of the run.
    given = {"seed": seed, "eval_fraction": cfg.data.eval_fraction, "tokenizer": tokenizer,
             "folder": JobPaths.of(cfg).data, "make_part": lambda part, own, part_seed: _made(
                 part, own, part_seed, cfg, tokenizer)}
    return factory(copy.deepcopy(dict(options)), **{name: given[name] for name in _taken(named, factory)})


def _taken(named: str, factory: Callable[..., Any]) -> list[str]:
    """The keywords that a factory takes. Raises ConfigError for one that needs others."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # it does not say
        return ["seed", "eval_fraction"]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return list(OFFERED)
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    options = positional[0].name if positional else ""
    unknown = [p.name for p in by_name if p.name != options and p.name not in OFFERED and p.default is p.empty]
    if unknown:
        raise ConfigError(f"data.source={named!r} wants the arguments {', '.join(unknown)}, which there are not",
                          hint=f"its first argument is the options, and it may take {', '.join(OFFERED)} besides: "
                          "rename or remove the others, or give them defaults")
    return [p.name for p in by_name if p.name != options and p.name in OFFERED]


def _check(made: Any, *, train: bool, vocabulary: int) -> CheckedSource:
    """``train``: whether the prompts to train on are used. ``vocabulary``: number of the model's tokens. Raises
    whatever the attributes of a user's source raise."""
    main = made.eval
    held_out, sets = _Counted(main), {str(k): v for k, v in dict(getattr(made, "evals", None) or {}).items()}
    eval_name = next((name for name, prompts in sets.items() if prompts is main), "eval")
    evals = {eval_name: held_out, **{k: _Counted(v) for k, v in sets.items() if k != eval_name}}
    named = {id(prompts): name for name, prompts in sets.items()}
    parts = [named.get(id(part), "") for part in main.parts] if isinstance(main, Concatenated) else []
    own = getattr(made, "order", None)
    trained = _Counted(made.train) if train else ()
    left_out = made.rows_left_out if isinstance(made, FileSource | Mix) else ()
    return CheckedSource(trained, held_out, tuple(made.stop_token_ids), made.max_prompt_tokens,
                         made.max_response_tokens, evals, eval_name, tuple(parts) if all(parts) else (),
                         getattr(made, "tokenizer", None),
                         own if own is not None else lambda seed: PromptOrder(len(trained), seed), vocabulary,
                         tuple(left_out))


def read_order(order: Order, ordinals: Sequence[int], count: int, *, named: str) -> list[tuple[int, int]]:
    """Index of the prompt and pass over the data for each ordinal, in a source of ``count`` prompts. Raises
    SourceFailed for whatever the source's own order raises, and for what is no index."""
    read = []
    for ordinal in ordinals:
        try:
            index, data_pass = order.problem(ordinal)
        except BaseException as e:  # whatever a user's order raises: also SystemExit
            raise SourceFailed(f"data.source={named} failed for the order of ordinal {ordinal}: {describe(e)}") from e
        if type(index) is not int or not 0 <= index < count or type(data_pass) is not int or data_pass < 0:
            raise SourceFailed(f"data.source={named} orders no prompt and pass for ordinal {ordinal}, but "
                               f"{plain(repr((index, data_pass)), 100)}")
        read.append((index, data_pass))
    return read


def read_prompts(prompts: Sequence[Prompt], indices: Sequence[int], *, named: str, answers: bool,
                 vocabulary: int = MAX_TOKEN_IDS) -> list[Prompt]:
    """These prompts of the source ``named``, with metadata as JSON has them (``as_json``). ``answers``: each must have
    one. ``vocabulary``: number of the model's tokens. Raises SourceFailed, with the index, for whatever the source
    raises and for what is no prompt of that model. Call it in no main thread: there KeyboardInterrupt is not the
    source's."""
    read = []
    for i in indices:
        try:
            prompt = prompts[i]
            fault = prompt_fault(prompt, vocabulary, answers=answers)
        except BaseException as e:  # whatever a user's source raises: also SystemExit
            raise SourceFailed(f"data.source={named} failed for prompt {i}: {describe(e)}") from e
        if fault:
            raise SourceFailed(f"data.source={named} gives prompt {i} {fault}")
        odd = f"data.source={named} gives prompt {i} with metadata that are not passed on"
        try:
            metadata = plain_json(prompt.metadata, odd)
        except SourceFailed:
            raise
        except BaseException as e:  # they may be a mapping, or hold values, of the user's own kinds
            raise SourceFailed(f"{odd}: {describe(e)}") from e
        read.append(replace(prompt, metadata=metadata))
    return read


def prompt_fault(prompt: object, vocabulary: int = MAX_TOKEN_IDS, *, answers: bool = False) -> str:
    """What is wrong with a source's prompt; "" for nothing. ``vocabulary``: number of the model's tokens: an id beyond
    them ends the engine that is given it. ``answers``: it must have an answer."""
    if not isinstance(prompt, Prompt):
        return f"as {plain(type(prompt).__name__, 100)}, not as Prompt"
    if not _are_token_ids(prompt.token_ids) or not prompt.token_ids:
        return "without token_ids, a tuple of one int >= 0 or more"
    if not isinstance(prompt.text, str) or not isinstance(prompt.question, str) or (
            not isinstance(prompt.metadata, Mapping)):
        return "with a text or question that is no str, or metadata that are no mapping"
    if not (is_unicode(prompt.text) and is_unicode(prompt.question)):
        return "with a text that holds half of a surrogate pair, which no other process could read"
    if prompt.answer_ids is None and answers:
        return "without answer_ids, which supervised steps imitate"
    if prompt.answer_ids is not None and (not _are_token_ids(prompt.answer_ids) or not prompt.answer_ids):
        return "with answer_ids that are no tuple of one int >= 0 or more"
    for name, ids in (("token_ids", prompt.token_ids), ("answer_ids", prompt.answer_ids or (0,))):
        if (largest := max(ids)) >= vocabulary:
            return (f"with the id {largest} in its {name}, and the model has {vocabulary} tokens: it must be tokenized "
                    "with the model's own tokenizer")
    return ""


def _are_token_ids(ids: object) -> bool:
    return isinstance(ids, tuple) and all(type(t) is int and 0 <= t < MAX_TOKEN_IDS for t in ids)


def _fault_of_limits(source: CheckedSource) -> str:
    """What is wrong with what a source says of its prompts and responses; "" for nothing."""
    if not _are_token_ids(source.stop_token_ids):
        return "has stop_token_ids that are no ints >= 0"
    for name in ("max_prompt_tokens", "max_response_tokens"):
        limit = getattr(source, name)
        if type(limit) is not int or limit < 1:
            return f"has a {name} that is no int >= 1, but {plain(repr(limit), 100)}"
    return ""
