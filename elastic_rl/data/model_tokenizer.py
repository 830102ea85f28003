"""The tokenizer of a Hugging Face model folder."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from elastic_rl.data.chat_rendering import NOW, ChatRenderer, Conversation
from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import MAX_CONFIG_BYTES
from elastic_rl.models.chat_templates import TEMPLATES, named_templates
from elastic_rl.plugins.user_code import describe, plain
from elastic_rl.runtime.files import read_limited

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
          "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json")
"""What of a folder the tokenizer and its end tokens are read from."""
_MAX_FILE_BYTES, _MAX_TEMPLATE_BYTES = 256 << 20, 1 << 20
_PROBE = "a"
_TOKENS = ("tokenizer[!_]*", "vocab.*", "*.tiktoken", "tekken.json", "spiece.model", "sentencepiece*.model")
"""Files with a tokenizer's tokens, of which it has one at least. Without any, transformers makes a tokenizer of one
token for some families, and says nothing."""
_SHOWN = 8
"""Names of files that an error shows."""


class ModelTokenizer:
    """The ``Tokenizer`` of a model folder. Files are read when it is first used: importing transformers takes seconds,
    which a source that does not tokenize shall not cost. Reads nothing but the folder, and runs none of its code."""

    def __init__(self, folder: Path | str, setting: str = "model.path", *, date: datetime.date | None = None) -> None:
        """``setting``: that names the folder, for errors. ``date``: what chat templates write as today's; None: the day
        on which this object is made, whose prompts differ from those of another day."""
        self._folder, self._setting = Path(folder).expanduser(), setting
        self._now = datetime.datetime.combine(date or datetime.date.today(), datetime.time())

    @cached_property
    def _loaded(self) -> Any:
        if not self._folder.is_dir():
            raise ConfigError(f"there is no folder {self._folder}",
                              hint=f"{self._setting} names a folder: download the model first")
        self._require_files()
        if not any(any(self._folder.glob(name)) for name in _TOKENS):
            raise ConfigError(f"there is no tokenizer in {self._folder}; it has {self._there()}", hint=(
                f"{self._setting} needs the model's tokenizer beside its weights: where you have it as an object, "
                "tokenizer.save_pretrained(folder) writes it there; else download it with the model"))
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True, trust_remote_code=False)
        except Exception as e:  # the library raises whatever its readers of the files do
            raise ConfigError(f"the tokenizer in {self._folder} cannot be loaded: {describe(e)}",
                              hint=f"{self._setting} needs tokenizer.json and tokenizer_config.json: download them "
                              "again; a tokenizer with code of its own is not supported") from e

    def _there(self) -> str:
        """Names of the folder, to be shown."""
        names = sorted(path.name for path in self._folder.iterdir())
        return plain(", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else ""), 500) or "nothing"

    def _require_files(self) -> None:
        """Raises ConfigError for a file that transformers would read without an end, or into more memory than there
        is: it looks at neither kind nor size."""
        for path in [*(self._folder / name for name in (*_FILES, "config.json")), *named_templates(self._folder)]:
            most = _MAX_TEMPLATE_BYTES if path.suffix == ".jinja" else _MAX_FILE_BYTES
            if path.exists() and (not path.is_file() or path.stat().st_size > most):
                raise ConfigError(f"{path} is no regular file, or larger than {most >> 20} MiB, the most that is read",
                                  hint="download the model again")

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """See ``Tokenizer``. The tokenizer's own end token comes first, then those of generation_config.json."""
        own = self._loaded.eos_token_id
        path = self._folder / "generation_config.json"
        try:
            found = json.loads(read_limited(path, MAX_CONFIG_BYTES)).get("eos_token_id") if path.exists() else None
        except (OSError, ValueError, AttributeError, RecursionError) as e:
            raise ConfigError(f"{path} cannot be read: {describe(e)}", hint="download the model again") from e
        ids = [i for i in (own, *(found if isinstance(found, list) else [found])) if type(i) is int]
        if not ids:
            raise ConfigError(f"neither the tokenizer in {self._folder} nor {path.name} names a token that ends a "
                              "response", hint='add "eos_token" to tokenizer_config.json, or "eos_token_id" to '
                              "generation_config.json")
        return tuple(dict.fromkeys(ids))

    @property
    def unknown_id(self) -> int | None:
        """Id of the token for what it has no other for; None where it has none such."""
        found = self._loaded.unk_token_id
        return found if type(found) is int else None

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """Texts that it takes for tokens of their own and that are special, or that its chat template writes, such as
        the end of a turn or the begin of a call of a tool; the longest first."""
        loaded = self._loaded
        special = {str(token) for token in loaded.added_tokens_decoder.values()
                   if token.special or str(token) in self.chat_template}
        return tuple(sorted({*special, *loaded.all_special_tokens} - {""}, key=lambda text: (-len(text), text)))

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Token id of each token."""
        return dict(self._loaded.get_vocab())

    @cached_property
    def chat_template(self) -> str:
        """See ``Tokenizer``."""
        return str(self._loaded.chat_template or "")

    @cached_property
    def identity(self) -> str:
        """See ``Tokenizer``: a digest of the folder's files, and of the date if the chat template writes one."""
        digest = hashlib.sha256()
        for path in [*(self._folder / name for name in _FILES), *named_templates(self._folder)]:
            if path.is_file():
                name = path.relative_to(self._folder).as_posix()
                digest.update(f"{name}/{hashlib.sha256(read_limited(path, _MAX_FILE_BYTES)).hexdigest()}/".encode())
        if NOW in self.chat_template:
            digest.update(self._now.isoformat().encode())
        return digest.hexdigest()

    @cached_property
    def _end_of_texts(self) -> list[int]:
        """What the tokenizer adds after each text, such as its end token (``add_eos_token``): a model that reads it
        takes the text for finished, and every text here is to be continued."""
        plain, added = (self._loaded(_PROBE, add_special_tokens=add)["input_ids"] for add in (False, True))
        after = next((at + len(plain) for at in range(len(added), -1, -1) if added[at:at + len(plain)] == plain), None)
        return list(added[after:]) if plain and after is not None else []

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool) -> list[list[int]]:
        """See ``Tokenizer``."""
        if not texts:
            return []
        tokenizer = self._loaded
        try:
            found = [list(ids) for ids in tokenizer(list(texts), add_special_tokens=special_tokens)["input_ids"]]
            end = self._end_of_texts if special_tokens else []
            return [ids[:-len(end)] if end and ids[-len(end):] == end else ids for ids in found]
        except Exception as e:  # the library raises TypeError for half of a surrogate pair, and whatever its parts do
            raise ConfigError(f"the tokenizer in {self._folder} cannot encode the text: {describe(e)}") from e

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See ``Tokenizer``."""
        return str(self._loaded.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_templates(self, conversations: Sequence[Conversation]) -> list[str]:
        """See ``Tokenizer``. Rendered in another process, see ``ChatRenderer``."""
        if not self.chat_template:
            raise ConfigError(f"the tokenizer in {self._folder} has no chat template",
                              hint="set data.options.apply_chat_template to false and write the whole prompt into "
                              "data.options.template, or use the model's chat variant")
        texts, variables = list[str](), self._loaded.special_tokens_map
        # Conversations with tools may have another template than those without.
        for template, part in groupby(conversations, lambda one: self._template_of(one[1])):
            texts += self._renderer.render(template, self._source_of(template), variables, [
                (messages, {"add_generation_prompt": not options.get("continue_final_message"),
                            **{key: value for key, value in options.items() if key != "chat_template"}})
                for messages, options in part])
        return texts

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The text of one conversation, see ``apply_chat_templates``."""
        return self.apply_chat_templates([(messages, options)])[0]

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self._now)

    def _template_of(self, options: Mapping[str, Any]) -> str:
        try:
            return str(self._loaded.get_chat_template(options.get("chat_template"), options.get("tools")))
        except ValueError as e:  # there are named ones only
            raise ConfigError(f"the tokenizer in {self._folder} has no default chat template: {describe(e)}",
                              hint="name one of them in data.options.chat_template_options.chat_template") from e

    def _source_of(self, template: str) -> str:
        """The file that has the template, or the setting."""
        loaded = self._loaded.chat_template
        named = loaded if isinstance(loaded, dict) else {"default": loaded}
        for name, text in named.items():
            if text == template:
                path = self._folder / ("chat_template.jinja" if name == "default" else f"{TEMPLATES}/{name}.jinja")
                return str(path if path.is_file() else self._folder / "tokenizer_config.json")
        return "data.options.chat_template_options.chat_template"


def without_control_tokens(text: str, controls: tuple[str, ...]) -> str:
    """A text that no control token is in, nor comes about where it is put between other texts: what a policy or a tool
    says could end its turn, and speak as somebody else. Pure."""
    if not controls:
        return text
    text = re.sub("|".join(map(re.escape, controls)), " ", text)
    if any(text.endswith(token[:n]) for token in controls for n in range(1, len(token))):
        text += " "
    if any(text.startswith(token[n:]) for token in controls for n in range(1, len(token))):
        text = " " + text
    return text
