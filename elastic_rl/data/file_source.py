"""The sources ``jsonl`` and ``parquet``: prompts from the rows of files, tokenized when they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from elastic_rl.config.options import read_options
from elastic_rl.data import scan
from elastic_rl.data.conversations import Asked, messages_of, variable, variable_name
from elastic_rl.data.parquet import ParquetRows
from elastic_rl.data.permutation import Permutation
from elastic_rl.data.prompts import LazyPrompts, PromptMaker, hashes
from elastic_rl.data.rows import FilesRows, JsonlRows, Rows, files_of, names_column, value_at
from elastic_rl.data.samples import Prompt
from elastic_rl.data.templates import Template
from elastic_rl.data.text_options import FileOptions
from elastic_rl.data.tokenizer import Tokenizer
from elastic_rl.data.values import answer_value, plain_json
from elastic_rl.errors import ConfigError, SourceFailed
from elastic_rl.runtime.sequences import batches

log = logging.getLogger(__name__)

_TRIED = 4
"""First rows of each file that are made into prompts before a job begins."""
_MEASURED = 1024
"""Prompts that are measured together."""
_RENDERED = 256
"""Rows that are rendered together when all of them are read."""
OpenFile = Callable[[Path, Mapping[str, str], Path], Rows]
"""Opens the rows: takes a file, the columns that are used with the setting that names each, and a folder for what is
derived from it, to its rows."""


class FileSource:
    """Prompts from files of rows. Wrong settings, files and columns are found when it is made, in the first rows of
    each file; a row further on when it is looked at: by the scan of all rows, if the options want one, else when it is
    trained on."""

    def __init__(self, kind: str, open_file: OpenFile, options: Mapping[str, Any], *, seed: int, eval_fraction: float,
                 tokenizer: Tokenizer, folder: Path) -> None:
        """``folder``: for what is derived from the files and kept. Raises ConfigError, and SourceFailed for a row."""
        self._options = read_options(FileOptions, options, of=f"the data source {kind!r}", setting="data.options")
        self._identity = [kind, self._options.model_dump(mode="json"), seed, eval_fraction]
        self._seed, self._folder, self._open = seed, folder, open_file
        self.tokenizer = tokenizer
        self._maker = PromptMaker(self._options, tokenizer)
        given = self._options
        self._template = (Template.parse(given.template, "data.options.template") if given.template else
                          Template.of_column(given.prompt_key, "data.options.prompt_key") if given.prompt_key else None)
        self.stop_token_ids = tokenizer.eos_ids
        self.max_prompt_tokens = self._options.max_prompt_tokens
        self.max_response_tokens = self._options.max_response_tokens

        self._dropped = scan.Dropped()
        """Rows that are not trained on, once ``train`` was read."""
        self._left_out_of_evals: list[str] = []
        sets = {name: self._opened(paths, f"data.options.{'eval_paths' if name == 'eval' else f'evals.{name}'}")
                for name, paths in self._options.eval_sets.items()}
        self._split: Permutation | None = None
        self._cut = 0
        """Number of shuffled training rows that are held out instead."""
        if sets:
            self.evals = {name: self._chosen(name, rows) for name, rows in sets.items()}
        else:
            self.evals = {"eval": self._cut_off(eval_fraction)}
        self.eval: Sequence[Prompt] = next(iter(self.evals.values()))
        self._held_out: np.ndarray | None = None
        self._excluded = np.zeros(0, np.uint64)

    @property
    def rows_left_out(self) -> Sequence[str]:
        """What the options leave out, in words: a sentence for each reason."""
        found = self._dropped
        if not found.total:  # nor may there be any training files
            return self._left_out_of_evals
        total = len(self._rows)
        first = f", the first in {self._rows.where(found.first_overlap)}" if found.first_overlap is not None else ""
        return [*self._left_out_of_evals, *(text for count, text in (
            (found.overlap, f"overlap=drop leaves {found.overlap} of {total} rows out of the training, since their "
             f"texts are evaluated{first}"),
            (found.duplicate, f"duplicates=drop leaves {found.duplicate} of {total} rows out of the training, which "
             "repeat others"),
            (found.long, f"long_prompts=drop leaves {found.long} of {total} rows out of the training, which have more "
             f"than max_prompt_tokens={self._options.max_prompt_tokens} tokens")) if count)]

    @cached_property
    def _rows(self) -> FilesRows:
        """The rows of the training files, which are opened when they are first used."""
        paths = self._options.paths
        return FilesRows([]) if paths is None else self._opened(paths, "data.options.paths")

    # -- files --------------------------------------------------------------------------------------------------------
    def _opened(self, paths: str | list[str], setting: str) -> FilesRows:
        options = self._options
        of_prompt = ("messages_key", [options.messages_key]) if self._template is None else (
            "prompt_key" if options.prompt_key else "template", self._template.fields)
        used = (of_prompt, ("chat_template_keys", options.chat_template_keys),
                ("answer_key", [options.answer_key] if options.answer_key else []),
                ("metadata_keys", options.metadata_keys))
        columns = {column: f"data.options.{option}" for option, named in reversed(used) for column in reversed(named)}
        files = [self._open(path, columns, self._folder) for path in files_of(paths, setting)]
        if not any(map(len, files)):
            raise ConfigError(f"{files[0].path} is empty" if len(files) == 1 else
                              f"all {len(files)} files of {setting} are empty", hint=f"check {setting}")
        tried = list[tuple[Mapping[str, Any], str]]()
        for file in files:
            if not len(file):
                log.warning("%s has no row", file.path)
            tried += ((file.row(number), file.where(number)) for number in range(min(_TRIED, len(file))))
        self._require_columns(tried)
        for row, where in tried:
            if options.long_prompts == "error":
                self._made(row, where)
            else:
                self._text(row, where)
                self._rewarded_by(row, where)
        return FilesRows(files)

    def _require_columns(self, rows: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Raises SourceFailed for a column that a row need not have, and that none of these has: it is misspelt."""
        options = self._options
        for key, setting in (*((key, "metadata_keys") for key in options.metadata_keys),
                             *((key, "chat_template_keys") for key in options.chat_template_keys)):
            failed: SourceFailed | None = None
            for row, where in rows:
                try:
                    value_at(row, key, where, hint=f"data.options.{setting} names it: a row need not have it, but "
                             "one of the first ones of each file, or null in its place")
                    break
                except SourceFailed as e:
                    failed = failed or e
            else:
                assert failed is not None
                raise failed

    def _asked(self, row: Mapping[str, Any], where: str) -> Asked:
        """What a row asks. Raises SourceFailed for one that asks nothing that can be a prompt."""
        options = self._options
        variables = {variable_name(key): variable(key, value_at(row, key, where, optional=True),
                                                  f"{where}: the column {key!r}") for key in options.chat_template_keys}
        return Asked(self._template.render(row, where) if self._template else
                     messages_of(value_at(row, options.messages_key, where,
                                          hint=names_column("data.options.messages_key")), where),
                     {key: value for key, value in variables.items() if value is not None})

    def _text(self, row: Mapping[str, Any], where: str) -> str:
        return self._maker.text(self._asked(row, where), where)

    def _rewarded_by(self, row: Mapping[str, Any], where: str) -> tuple[str | None, dict[str, Any]]:
        """The answer that is imitated, and the metadata. Raises SourceFailed."""
        options, metadata, imitated = self._options, dict[str, Any](), None
        if options.answer_key:
            answer = answer_value(value_at(row, options.answer_key, where,
                                           hint=names_column("data.options.answer_key")),
                                  f"{where}: the column {options.answer_key!r}")
            metadata["answer"], imitated = answer, answer if isinstance(answer, str) else answer[0]
        for key in options.metadata_keys:
            metadata[key] = plain_json(value_at(row, key, where, optional=True), f"{where}: the column {key!r}")
        return imitated, metadata

    def _prompt(self, rows: FilesRows, number: int) -> Prompt:
        return self._made(rows.row(number), rows.where(number))

    def _made(self, row: Mapping[str, Any], where: str) -> Prompt:
        asked, (answer, metadata) = self._asked(row, where), self._rewarded_by(row, where)
        return self._maker.prompt(self._maker.text(asked, where), asked, where, answer=answer, metadata=metadata)

    # -- evaluation sets ----------------------------------------------------------------------------------------------
    def _chosen(self, name: str, rows: FilesRows) -> LazyPrompts:
        """The prompts of an evaluation set with files of its own."""
        order = Permutation(len(rows), f"eval-{name}-{self._seed}")
        return self._evaluated(name, rows, [order[i] for i in range(min(len(rows), self._options.max_eval_prompts))])

    def _evaluated(self, name: str, rows: FilesRows, numbers: list[int]) -> LazyPrompts:
        """The prompts of these rows, without those that are to be left out. Raises ConfigError when none is left."""
        options = self._options
        if options.long_prompts == "drop":
            limit, all_of_them = options.max_prompt_tokens, len(numbers)
            numbers = [number for part in batches(numbers, _MEASURED) for number, tokens in zip(
                part, self._maker.lengths(self._maker.texts(
                    [(self._asked(rows.row(n), rows.where(n)), rows.where(n)) for n in part])), strict=True)
                if tokens <= limit]
            if left := all_of_them - len(numbers):
                self._left_out_of_evals.append(
                    f"long_prompts=drop leaves {left} of {all_of_them} prompts out of the evaluation set {name!r}, "
                    f"which have more than max_prompt_tokens={limit} tokens")
            if not numbers:
                raise ConfigError(f"no prompt of the evaluation set {name!r} has at most {limit} tokens",
                                  hint="raise data.options.max_prompt_tokens")
        return LazyPrompts(len(numbers), lambda i: self._prompt(rows, numbers[i]))

    def _cut_off(self, fraction: float) -> LazyPrompts:
        """The prompts that are held out of the training files."""
        count = len(self._rows)
        if count < 2:
            raise ConfigError("data.options.paths has one row, which cannot be trained on and evaluated",
                              hint="add rows, or name files to evaluate in data.options.eval_paths")
        split = self._split = Permutation(count, f"split-{self._seed}")
        self._cut = min(max(1, round(count * fraction)), self._options.max_eval_prompts, count - 1)
        return self._evaluated("eval", self._rows, [split[i] for i in range(self._cut)])

    @property
    def held_out(self) -> np.ndarray:
        """Sorted hashes of the texts that are evaluated. Reads them all when it is first used."""
        if self._held_out is None:
            self._held_out = np.unique(np.concatenate([
                hashes([prompt.text for prompt in prompts]) for prompts in self.evals.values()]))
        return self._held_out

    def exclude(self, held_out: np.ndarray) -> None:
        """Excludes prompts that other sources evaluate as well. ``held_out``: sorted hashes of texts. Call it before
        ``train`` is read."""
        self._excluded = held_out

    # -- training -----------------------------------------------------------------------------------------------------
    @cached_property
    def train(self) -> Sequence[Prompt]:
        """What is trained on. The scan, if one is needed, is done when this is first read."""
        options = self._options
        if options.paths is None:
            return []
        rules = scan.Rules(options.max_prompt_tokens if options.long_prompts == "drop" else None,
                           options.duplicates == "drop", options.overlap)
        kept = self._scanned(rules) if rules.need_a_scan else None
        if kept is not None:
            if not len(kept):
                raise ConfigError("data.options leaves no row to train on",
                                  hint="check long_prompts, max_prompt_tokens and overlap")
            return LazyPrompts(len(kept), lambda i: self._prompt(self._rows, int(kept[i])))
        split, cut = self._split, self._cut
        return LazyPrompts(len(self._rows) - cut, lambda i: self._prompt(
            self._rows, split[cut + i] if split is not None else i))

    def _scanned(self, rules: scan.Rules) -> np.ndarray | None:
        held_out = np.unique(np.concatenate([self.held_out, self._excluded])) if rules.overlap != "unchecked" else (
            np.zeros(0, np.uint64))
        files = [(str(file.path), *file.state) for file in self._rows.files]
        found = scan.remembered(self._folder, [*self._identity, files, self.tokenizer.identity], held_out,
                                lambda: scan.scan(self._texts(), self._is_train, self._maker.lengths, held_out, rules,
                                                  self._rows.where))
        self._dropped = found.dropped
        return found.rows

    def _is_train(self, number: int) -> bool:
        return self._split is None or self._split.position(number) >= self._cut

    def _texts(self) -> Iterator[str]:
        """The texts of all rows. What else is wrong with a row is found here too, but for its tokens."""
        rows = ((row, self._rows.where(number)) for number, row in enumerate(self._rows.scan()))
        while part := list(islice(rows, _RENDERED)):
            for row, where in part:
                self._rewarded_by(row, where)
            yield from self._maker.texts([(self._asked(row, where), where) for row, where in part])


def jsonl(options: Mapping[str, Any], *, seed: int, eval_fraction: float, tokenizer: Tokenizer, folder: Path
          ) -> FileSource:
    """Prompts from files of one JSON object a line, plain or compressed with gzip."""
    return FileSource("jsonl", lambda path, columns, derived: JsonlRows(path, derived), options, seed=seed,
                      eval_fraction=eval_fraction, tokenizer=tokenizer, folder=folder)


def parquet(options: Mapping[str, Any], *, seed: int, eval_fraction: float, tokenizer: Tokenizer, folder: Path
            ) -> FileSource:
    """Prompts from Parquet files."""
    return FileSource("parquet", ParquetRows, options, seed=seed, eval_fraction=eval_fraction, tokenizer=tokenizer,
                      folder=folder)
