"""The modes in which nothing is trained: which prompts are sampled, and what is written of their samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from elastic_rl.config import Config
from elastic_rl.data.generated_tasks import ENDLESS
from elastic_rl.data.ledger import ConsumedGroups
from elastic_rl.data.mixing import Concatenated
from elastic_rl.data.model_tokenizer import ModelTokenizer
from elastic_rl.data.samples import Group, Prompt, Sample
from elastic_rl.data.sources import CheckedSource
from elastic_rl.data.tokenizer import Tokenizer
from elastic_rl.errors import ConfigError
from elastic_rl.host.paths import JobPaths
from elastic_rl.pipeline.sampling.evaluation import generated_sets
from elastic_rl.pipeline.sampling.prompt_reader import PromptReader
from elastic_rl.pipeline.sampling.sampler import Sampler
from elastic_rl.pipeline.untrained import eval_summary, keeping
from elastic_rl.plugins.user_code import describe

log = logging.getLogger(__name__)

_TOTALS = "totals"
"""Key in the cursor of sums over what was kept and what was not."""
_NOT_GENERATED = Sample((), finish_reason="abort")
"""A sample of a group for which the user's own function failed: it counts, with the reward 0."""


class SampledMode(Protocol):
    """One of these modes, for one job."""

    groups: int
    """Prompt groups of the job: those of the ordinals from 0 up to this number."""
    prompts: Sequence[Prompt]
    """Prompts that ordinals stand for."""
    file: Path
    """The file that is the output at the end."""

    def generate(self, ordinals: Sequence[int], min_version: int) -> list[tuple[Group, str]]:
        """A rewarded group for each ordinal, and the reason to drop it, or "". Waits for what is away, and raises
        Fenced."""

    def output(self, groups: Sequence[Group], cursor: Mapping[str, Any]) -> tuple[list[bytes], dict[str, Any]]:
        """Lines to be written of a step's groups, and the cursor with what is to be remembered of them; from the
        cursor of the step before. It may call the source's tokenizer: see ``SourceReads``."""

    def summary(self, file: Path, cursor: Mapping[str, Any], consumed: ConsumedGroups, alive: Callable[[], None]
                ) -> dict[str, Any]:
        """The result of the job, from its output and its last state. ``alive``: called now and then; may raise. Raises
        OutputFailed."""


class EvaluationMode:
    """``mode: eval``: the prompts of every evaluation set, one set after the other."""

    def __init__(self, cfg: Config, source: CheckedSource, reader: PromptReader, sampler: Sampler, model_dir: str
                 ) -> None:
        self._cfg, self._source, self._reader, self._sampler = cfg, source, reader, sampler
        self._texts = _Texts(source, model_dir)
        self._names = generated_sets(source)
        self._all = Concatenated([source.evals[name] for name in self._names])
        self.prompts: Sequence[Prompt] = self._all
        self.groups = len(self._all)
        self.file = JobPaths.of(cfg).evaluated

    def generate(self, ordinals: Sequence[int], min_version: int) -> list[tuple[Group, str]]:
        """See ``SampledMode``."""
        prompts = self._reader.read(self._all, ordinals)
        return [(group, "") for group in self._sampler.evaluation_groups(
            list(zip(ordinals, prompts, strict=True)), min_version)]

    def output(self, groups: Sequence[Group], cursor: Mapping[str, Any]) -> tuple[list[bytes], dict[str, Any]]:
        """See ``SampledMode``."""
        lines = []
        for group in groups:
            part, index = self._all.place(group.ordinal)
            lines += [keeping.sample_line(self._names[part], index, number, self._texts.prompt(group.prompt),
                                          self._texts.with_text(sample), group.failed)
                      for number, sample in enumerate(group.samples or [_NOT_GENERATED] * self._cfg.eval.samples)]
        return lines, dict(cursor)

    def summary(self, file: Path, cursor: Mapping[str, Any], consumed: ConsumedGroups, alive: Callable[[], None]
                ) -> dict[str, Any]:
        """See ``SampledMode``."""
        own = self._cfg.eval
        return {"job": self._cfg.job, "model": self._cfg.model.path, "seed": self._cfg.seed,
                "reward": self._cfg.rollout.reward, "reward_options": self._cfg.rollout.reward_options,
                "temperature": own.temperature, "samples_per_prompt": own.samples, "pass_reward": own.pass_reward,
                "main": self._source.eval_name,
                "sets": eval_summary.summarise_rows(
                    eval_summary.read_rows(file, alive), samples=own.samples, pass_reward=own.pass_reward,
                    main=self._source.eval_name, parts=self._source.eval_parts)}


class RejectionMode:
    """``mode: rejection_sampling``: training prompts in the order of the seed, of which the best samples are kept."""

    def __init__(self, cfg: Config, source: CheckedSource, reader: PromptReader, sampler: Sampler, model_dir: str
                 ) -> None:
        """Raises ConfigError for a source without end, unless the settings say how many prompts."""
        self._cfg, self._reader, self._sampler = cfg, reader, sampler
        self._texts = _Texts(source, model_dir)
        self.prompts = source.train
        self.groups = rejection_groups(cfg, source)
        self.file = JobPaths.of(cfg).kept

    def generate(self, ordinals: Sequence[int], min_version: int) -> list[tuple[Group, str]]:
        """See ``SampledMode``."""
        return self._sampler.training_groups(self._reader.training(ordinals), min_version)

    def output(self, groups: Sequence[Group], cursor: Mapping[str, Any]) -> tuple[list[bytes], dict[str, Any]]:
        """See ``SampledMode``."""
        lines: list[bytes] = []
        kept: list[Sample] = []
        for group in groups:
            for i in keeping.best(group.samples, self._cfg.rejection):
                sample = self._texts.with_text(group.samples[i])
                kept.append(sample)
                lines.append(keeping.kept_line(group.ordinal, i, self._texts.prompt(group.prompt), sample,
                                               keeping.answer_of(group.prompt)))
        return lines, {**cursor, _TOTALS: keeping.add_totals(cursor.get(_TOTALS) or {}, groups, kept)}

    def summary(self, file: Path, cursor: Mapping[str, Any], consumed: ConsumedGroups, alive: Callable[[], None]
                ) -> dict[str, Any]:
        """See ``SampledMode``."""
        return keeping.kept_summary(cursor.get(_TOTALS) or {}, consumed, job=self._cfg.job, model=self._cfg.model.path,
                                    seed=self._cfg.seed, file=str(file))


def sampled_mode(cfg: Config, source: CheckedSource, reader: PromptReader, sampler: Sampler, model_dir: str
                 ) -> SampledMode:
    """The mode of a job that trains nothing. Raises ConfigError."""
    kind = EvaluationMode if cfg.mode == "eval" else RejectionMode
    return kind(cfg, source, reader, sampler, model_dir)


def rejection_groups(cfg: Config, source: CheckedSource) -> int:
    """Prompts that rejection sampling takes. Raises ConfigError."""
    given = cfg.rejection.prompts
    if given is None and len(source.train) >= ENDLESS:
        raise ConfigError(f"data.source={cfg.data.source!r} has prompts without end",
                          hint="set rejection.prompts to the number of prompts to sample")
    return given or len(source.train)


class _Texts:
    """Texts of prompts and responses; by the model's tokenizer where the source has none. What cannot be decoded has
    none: the reward failed for it, and it is written all the same."""

    def __init__(self, source: CheckedSource, model_dir: str) -> None:
        self._source, self._model_dir = source, model_dir

    def prompt(self, prompt: Prompt) -> str:
        return prompt.text or self._decoded(prompt.token_ids, skip_special_tokens=False)

    def with_text(self, sample: Sample) -> Sample:
        """The rewarder gives a sample its text, unless its reward failed or the source has no tokenizer."""
        if not sample.lacks_text:
            return sample
        return replace(sample, text=self._decoded(sample.written_ids, skip_special_tokens=True))

    def _decoded(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        tokenizer = self._tokenizer
        try:
            return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except BaseException as e:  # whatever a user's tokenizer raises: this is no main thread
            log.warning("a text is left out, since its %d tokens cannot be decoded: %s", len(ids), describe(e))
            return ""

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._source.tokenizer or ModelTokenizer(self._model_dir)
