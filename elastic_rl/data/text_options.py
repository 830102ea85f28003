"""Options of the sources that make prompts from text."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from elastic_rl.config.options import Options
from elastic_rl.config.section import PathText
from elastic_rl.data.conversations import variable_name

_GIVEN = ("messages", "conversation", "tokenize")
"""What chat templates are called with, and no option of theirs."""
Paths = PathText | Annotated[list[PathText], Field(min_length=1)]


class PromptOptions(Options):
    """How a text becomes a prompt."""

    system_prompt: str = ""
    """Text of a system message before the conversation; only with ``apply_chat_template``."""
    apply_chat_template: bool = True
    """Whether prompts are made by the chat template of the model's tokenizer. If not, the text is the prompt."""
    special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a prompt, such as one that begins every text. null: unless a
    chat template is applied, which writes them itself. ``false`` for texts that have been through one before."""
    chat_template_options: dict[str, Any] = {}
    """Further variables of the chat template, such as ``enable_thinking``, and ``continue_final_message: true`` where a
    conversation ends with the begin of what the model is to write."""
    max_prompt_tokens: Annotated[int, Field(ge=1)]
    """Longest prompt, in tokens."""
    max_response_tokens: Annotated[int, Field(ge=1)]
    """Longest response that is generated, in tokens."""
    long_prompts: Literal["error", "drop"] = "error"
    """What to do with prompts longer than ``max_prompt_tokens``: stop with an error, or leave them out. To leave out
    those of files, all prompts are tokenized once before the job begins."""

    @model_validator(mode="after")
    def _check_system_prompt(self) -> PromptOptions:
        if self.system_prompt and not self.apply_chat_template:
            raise ValueError("system_prompt has no effect without apply_chat_template: write it into template")
        if given := [key for key in _GIVEN if key in self.chat_template_options]:
            raise ValueError(f"chat_template_options has {given[0]!r}, which the source gives: leave it out")
        return self


class EvalSet(Options):
    """Files of a named evaluation set, with the columns of the training files."""

    paths: Paths
    """File, pattern, or a list of them."""


class FileOptions(PromptOptions):
    """``data.options`` of the sources ``jsonl`` and ``parquet``. Columns are named as ``column``, or ``column.field``
    for a field of a column that holds objects."""

    paths: Paths | None = None
    """File, pattern (``*``, ``?``, ``[...]``, ``**``), or a list of them. What is evaluated only (``mode: eval``) needs
    none beside ``eval_paths`` or ``evals``."""
    prompt_key: str = ""
    """Column of the prompt's text."""
    messages_key: str = ""
    """Column of the prompt as a conversation: a list of ``{"role": …, "content": …}``, with any further keys that the
    chat template reads. Needs ``apply_chat_template``."""
    template: str = ""
    """Text with columns in braces, as ``Question: {question}``, instead of ``prompt_key`` or ``messages_key``."""
    chat_template_keys: list[str] = []
    """Columns that the chat template gets as variables of the same names, such as ``tools``; of ``a.b`` that is ``b``.
    """
    answer_key: str = ""
    """Column of the right answer: what rewards compare with and supervised steps imitate. Of a list each is right, and
    the first is imitated. Empty: there is none."""
    metadata_keys: list[str] = []
    """Columns that rewards get besides, in the prompt's ``metadata``; None for a row without."""
    duplicates: Literal["keep", "drop"] = "keep"
    """Whether a training prompt with the text of an earlier one is left out."""
    overlap: Literal["error", "drop", "unchecked"] = "error"
    """What to do with training prompts whose text an evaluation set has too: refuse them, leave them out of the
    training, or not look for them, which saves reading all files once before the job begins."""
    max_eval_prompts: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Most prompts of an evaluation set; of a larger one so many are chosen by the seed. All of them are generated in
    each evaluation."""
    eval_paths: Paths | None = None
    """Files of the evaluation set; without them, and without ``evals``, ``data.eval_fraction`` of the rows."""
    evals: dict[str, EvalSet] = {}
    """Further evaluation sets by name. The first is what the job evaluates if there are no ``eval_paths``."""

    @model_validator(mode="after")
    def _check_columns(self) -> FileOptions:
        given = [key for key in ("prompt_key", "messages_key", "template") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(f"set one of prompt_key, messages_key and template; {', '.join(given) or 'none'} is set")
        if self.messages_key and not self.apply_chat_template:
            raise ValueError("messages_key needs apply_chat_template: true")
        if self.chat_template_keys and not self.apply_chat_template:
            raise ValueError("chat_template_keys needs apply_chat_template: true")
        names = [variable_name(key) for key in self.chat_template_keys]
        if wrong := next((name for name in names if name in _GIVEN or names.count(name) > 1), ""):
            raise ValueError(f"chat_template_keys has {wrong!r} twice, or the source gives it: name another column")
        if self.answer_key and "answer" in self.metadata_keys:
            raise ValueError("metadata has the answer as 'answer' already: leave it out of metadata_keys")
        if self.paths is None and not self.eval_sets:
            raise ValueError("set paths; or, with mode: eval, files to evaluate in eval_paths or evals")
        if "eval" in self.evals and self.eval_paths is not None:
            raise ValueError("the evaluation set of eval_paths is called eval: rename the one in evals")
        return self

    @property
    def eval_sets(self) -> dict[str, str | list[str]]:
        """Paths of the evaluation sets by name; empty for a split of the training files."""
        own = {"eval": self.eval_paths} if self.eval_paths is not None else {}
        return {**own, **{name: given.paths for name, given in self.evals.items()}}


def with_absolute_paths(source: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a built-in source with paths as they are in this process: the run's other processes may have
    another working folder. What is no valid option stays as it is. Pure but for the working folder."""
    def absolute(paths: Any) -> Any:
        if isinstance(paths, list):
            return [absolute(p) for p in paths]
        # Not resolve(): a pattern is no path that could be looked up.
        with suppress(RuntimeError):  # ~name of no user
            return str(Path.cwd() / Path(paths).expanduser()) if isinstance(paths, str) and paths else paths
        return paths

    out = dict(options)
    if source in ("jsonl", "parquet"):
        out |= {key: absolute(out[key]) for key in ("paths", "eval_paths") if key in out}
        if isinstance(out.get("evals"), dict):
            out["evals"] = {name: {**given, "paths": absolute(given["paths"])} if isinstance(given, dict) and
                            "paths" in given else given for name, given in out["evals"].items()}
    elif source == "mix" and isinstance(out.get("parts"), list):
        out["parts"] = [{**part, "options": with_absolute_paths(str(part.get("source")), part["options"])}
                        if isinstance(part, dict) and isinstance(part.get("options"), dict) else part
                        for part in out["parts"]]
    return out
