"""The source ``reasoning_gym``: problems that the package reasoning-gym generates, with a seed and without end."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.conversations import Asked
from elastic_rl.data.mixing import Concatenated, WeightedOrder
from elastic_rl.data.order import Order, PromptOrder
from elastic_rl.data.prompts import LazyPrompts, PromptMaker, contains, hashes
from elastic_rl.data.samples import Prompt
from elastic_rl.data.templates import Template
from elastic_rl.data.text_options import PromptOptions
from elastic_rl.data.tokenizer import Tokenizer
from elastic_rl.data.values import plain_json
from elastic_rl.errors import ConfigError, SourceFailed
from elastic_rl.plugins.user_code import describe, did_you_mean

ENDLESS = 1 << 40
"""Number of prompts of a task without a size: more than any job takes."""
_CHUNK = 500
"""Problems of one dataset of the package: some tasks prepare all of a dataset's problems at once."""
_DATASETS = 16
"""Datasets that are kept."""
_TRIES = 32
"""Problems that are generated for one prompt until one can be trained on."""
_PROBED = 2
"""Prompts of a task in the fingerprint: some tasks take seconds to generate one."""


class Task(Options):
    """A task of the package, as in ``reasoning_gym.create_dataset``."""

    name: str
    """Name of the task, such as ``leg_counting``."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the prompts, relative to the other tasks."""
    size: Annotated[int, Field(ge=1, le=ENDLESS)] | None = None
    """Number of different training problems; null: no end."""
    config: dict[str, Any] = {}
    """Settings of the task, as its difficulty; not ``seed`` and ``size``."""


class TaskOptions(PromptOptions):
    """``data.options`` of this source."""

    tasks: Annotated[list[Task], Field(min_length=1)]
    """Tasks that problems are taken from."""
    template: str = "{question}"
    """Text of a prompt, with ``{question}``."""
    eval_prompts: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Number of problems to evaluate, over all tasks by their weights; at least one of each."""

    @model_validator(mode="after")
    def _check_tasks(self) -> TaskOptions:
        names = [task.name for task in self.tasks]
        if len(set(names)) != len(names):
            raise ValueError("tasks must have different names")
        if own := next((key for task in self.tasks for key in ("seed", "size") if key in task.config), ""):
            raise ValueError(f"the config of a task has {own!r}, which follows from the job's: leave it out")
        return self


class ReasoningGym:
    """Problems of some tasks, mixed by weight. Those to evaluate come from seeds of their own, and no problem with the
    text of one of them is trained on."""

    def __init__(self, options: Mapping[str, Any], *, seed: int, tokenizer: Tokenizer) -> None:
        """Raises ConfigError for unknown tasks and wrong options, and SourceFailed for a task that fails."""
        self._options = chosen = read_options(
            TaskOptions, options, of="the data source 'reasoning_gym'", setting="data.options")
        template = Template.parse(chosen.template, "data.options.template")
        if template.fields != ("question",):
            raise ConfigError(f"data.options.template has the fields {', '.join(template.fields)}",
                              hint="the only field is {question}")
        self.tokenizer = tokenizer
        maker = PromptMaker(chosen, tokenizer)
        self._tasks = [_Problems(task, chosen, seed, maker, template) for task in chosen.tasks]
        self.stop_token_ids = tokenizer.eos_ids
        self.max_prompt_tokens, self.max_response_tokens = chosen.max_prompt_tokens, chosen.max_response_tokens
        total = sum(task.weight for task in chosen.tasks)
        parts = [problems.evaluated(max(1, round(chosen.eval_prompts * problems.task.weight / total)))
                 for problems in self._tasks]
        self.eval = Concatenated(parts)
        self.evals = {"eval": self.eval} | (
            {problems.task.name: part for problems, part in zip(self._tasks, parts, strict=True)}
            if len(parts) > 1 else {})
        self._excluded = np.zeros(0, np.uint64)

    @cached_property
    def held_out(self) -> np.ndarray:
        """Sorted hashes of the texts that are evaluated. Generates them all when it is first read."""
        return np.unique(hashes([prompt.text for prompt in self.eval]))

    def exclude(self, held_out: np.ndarray) -> None:
        """Excludes problems that other sources evaluate. ``held_out``: sorted hashes of texts. Call it before
        ``train`` is read."""
        self._excluded = held_out

    @cached_property
    def train(self) -> Concatenated:
        """The problems that are trained on."""
        held_out = np.unique(np.concatenate([self.held_out, self._excluded]))
        return Concatenated([problems.trained(held_out) for problems in self._tasks])

    def order(self, seed: int) -> Order:
        """Tasks by weight."""
        parts: list[tuple[Order, int]] = [(PromptOrder(p.size, seed), p.size) for p in self._tasks]
        return WeightedOrder(parts, [p.task.weight for p in self._tasks], seed)


class _Problems:
    """The problems of one task. Each is a function of the seed and its number."""

    def __init__(self, task: Task, options: TaskOptions, seed: int, maker: PromptMaker, template: Template) -> None:
        self.task, self.size = task, task.size or ENDLESS
        self._options, self._seed, self._maker, self._template = options, seed, maker, template
        self._gym = _package()
        names = self._gym.factory.DATASETS
        if task.name not in names:
            raise ConfigError(f"reasoning-gym {_version()} has no task {task.name!r}{did_you_mean(task.name, names)}",
                              hint="`python -c 'import reasoning_gym.factory as f; print(*f.DATASETS)'` lists them")
        # The cache belongs to the object, so that it is freed with it.
        self._dataset = lru_cache(maxsize=_DATASETS)(self._make_dataset)
        try:
            self._dataset("train", 0, 0)
        except SourceFailed as e:
            raise ConfigError(e.message, hint=f"check data.options.tasks: the config of {task.name}") from e

    def evaluated(self, count: int) -> LazyPrompts:
        """Problems to evaluate."""
        none = np.zeros(0, np.uint64)
        return LazyPrompts(count, lambda number: self._prompt("eval", number, none))

    def trained(self, held_out: np.ndarray) -> LazyPrompts:
        """Problems to train on, none of them with a text of ``held_out``."""
        return LazyPrompts(self.size, lambda number: self._prompt("train", number, held_out),
                           fingerprint_indices=range(min(_PROBED, self.size)))

    def _prompt(self, part: str, number: int, held_out: np.ndarray) -> Prompt:
        failed = ""
        for attempt in range(_TRIES):
            chunk, index = divmod(number, _CHUNK)
            seed, dataset = self._dataset(part, chunk, attempt)
            where = f"reasoning_gym task {self.task.name}, seed {seed}, problem {index}"
            try:
                entry = self._entry(dataset, index, where)
            except SourceFailed as e:  # some tasks find no problem for some seeds
                failed = f": {e.message}"
                continue
            content = self._template.render(entry, where)
            asked = Asked(content)
            text = self._maker.text(asked, where)
            if contains(held_out, hashes([text]))[0]:
                continue
            if self._options.long_prompts == "drop" and (
                    self._maker.lengths([text])[0] > self._options.max_prompt_tokens):
                continue
            answer = entry["answer"]
            metadata = {"task": self.task.name, "entry": entry, "answer": answer or "", "config": self.task.config,
                        "seed": seed, "size": _CHUNK, "index": index}
            return self._maker.prompt(text, asked, where, answer=answer or None, metadata=metadata)
        raise SourceFailed(f"reasoning_gym task {self.task.name}: {_TRIES} problems in place of number {number} are "
                           f"evaluated too, or too long, or cannot be made{failed}", hint="the task has too few "
                           "different problems: lower data.options.eval_prompts, raise max_prompt_tokens, or change "
                           "the task's config")

    def _make_dataset(self, part: str, chunk: int, attempt: int) -> tuple[int, Any]:
        """Seed and dataset of a chunk of problems."""
        name = json.dumps([self._seed, self.task.name, part, chunk, attempt])
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") >> 1
        try:
            return seed, self._gym.create_dataset(self.task.name, seed=seed, size=_CHUNK, **self.task.config)
        except Exception as e:  # whatever the task raises for its config: also AssertionError and TypeError
            raise SourceFailed(f"reasoning_gym task {self.task.name} cannot be made: {describe(e)}") from e

    def _entry(self, dataset: Any, index: int, where: str) -> dict[str, Any]:
        """The problem as JSON has it: question, answer (text, or None where many are right) and metadata."""
        try:
            entry: dict[str, Any] = plain_json(dataset[index], where)
        except SourceFailed:
            raise
        except Exception as e:  # whatever the task raises
            self._dataset.cache_clear()  # it may have changed the dataset
            raise SourceFailed(f"{where} cannot be made: {describe(e)}") from e
        if not isinstance(entry.get("question"), str) or not isinstance(entry.get("answer"), str | None):
            raise SourceFailed(f"{where} has no question and answer as text")
        return entry


def _package() -> Any:
    """reasoning-gym, whose import takes seconds. Raises ConfigError where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its dependencies, about their own code
            import reasoning_gym
            import reasoning_gym.factory
    except ImportError as e:
        raise ConfigError(f"data.source=reasoning_gym needs the package reasoning-gym: {describe(e)}",
                          hint="pip install reasoning-gym==0.1.25") from e
    return reasoning_gym


def _version() -> str:
    return importlib.metadata.version("reasoning-gym")
