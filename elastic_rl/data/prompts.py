"""Makes prompts of texts and conversations: chat template, tokens, limits."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_rl.data.conversations import Asked
from elastic_rl.data.samples import Prompt
from elastic_rl.data.text_options import PromptOptions
from elastic_rl.data.tokenizer import Tokenizer
from elastic_rl.errors import ConfigError, PluginFailed, SourceFailed

_CACHED_TOKENS = 1 << 20
"""Tokens of the prompts that a list keeps, about 40 MB."""


class PromptMaker:
    """Makes the prompts of one source."""

    def __init__(self, options: PromptOptions, tokenizer: Tokenizer) -> None:
        self._options, self._tokenizer = options, tokenizer

    def text(self, asked: Asked, where: str) -> str:
        """The prompt that asks for an answer. Raises SourceFailed, which begins with ``where``, for what the chat
        template refuses."""
        return self.texts([(asked, where)])[0]

    def texts(self, rows: Sequence[tuple[Asked, str]]) -> list[str]:
        """The prompts of several rows, each with its ``where``; see ``text``. One call takes a fraction of the time of
        one for each."""
        options = self._options
        if not options.apply_chat_template and all(isinstance(asked.content, str) for asked, _ in rows):
            return [str(asked.content) for asked, _ in rows]
        system = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
        conversations = [([*system, *asked.messages], {**options.chat_template_options, **asked.variables})
                         for asked, _ in rows]
        try:
            return self._tokenizer.apply_chat_templates(conversations)
        except (ConfigError, PluginFailed) as e:
            if len(rows) > 1:  # one by one: the error is to name its row, and the limits are those of one conversation
                return [self.text(*row) for row in rows]
            raise SourceFailed(f"{rows[0][1]}: {e.message}", hint=e.hint) from e

    def lengths(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text."""
        return [len(ids) for ids in self._encoded(texts)]

    def prompt(self, text: str, asked: Asked, where: str, *, answer: str | None, metadata: Mapping[str, Any]) -> Prompt:
        """The prompt of ``text``, which asks what is ``asked``. Raises SourceFailed for one without a token or longer
        than the limit. ``answer``: what is imitated."""
        try:
            [ids] = self._encoded([text])
            answer_ids = None if answer is None else (
                *self._tokenizer.encode_batch([answer], special_tokens=False)[0], self._tokenizer.eos_ids[0])
        except ConfigError as e:
            raise SourceFailed(f"{where}: {e.message}", hint=e.hint) from e
        if not ids:
            raise SourceFailed(f"{where}: the prompt has no token", hint="check data.options.template, and the row")
        if len(ids) > self._options.max_prompt_tokens:
            raise SourceFailed(f"{where}: the prompt has {len(ids)} tokens, and data.options.max_prompt_tokens is "
                               f"{self._options.max_prompt_tokens}",
                               hint="raise it, or set data.options.long_prompts to drop")
        question = asked.text if self._options.apply_chat_template else ""
        return Prompt(tuple(ids), text, answer_ids, metadata, question, self._identity(asked))

    def _identity(self, asked: Asked) -> str:
        """``Prompt.identity``, of what is asked and the options and the template that it is rendered by."""
        options = self._options
        if not options.apply_chat_template:
            return ""
        made_from = [asked.text, options.system_prompt, options.chat_template_options, options.special_tokens,
                     self._tokenizer.chat_template, *asked.beside_text]
        return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        # A chat template writes the tokens that the model wants around a conversation itself.
        own = self._options.special_tokens
        return self._tokenizer.encode_batch(
            texts, special_tokens=not self._options.apply_chat_template if own is None else own)


class LazyPrompts(Sequence[Prompt]):
    """Prompts that are made when they are read; the latest are kept, up to a number of tokens."""

    def __init__(self, count: int, make: Callable[[int], Prompt], *,
                 fingerprint_indices: Sequence[int] | None = None) -> None:
        self._count, self._make = count, make
        self._kept: OrderedDict[int, Prompt] = OrderedDict()
        self._tokens = 0
        self.fingerprint_indices = fingerprint_indices

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(f"prompt {index} of {self._count}")
        if (found := self._kept.pop(index, None)) is None:
            found = self._make(index)
            self._tokens += _size(found)
        self._kept[index] = found
        while self._tokens > _CACHED_TOKENS and len(self._kept) > 1:
            self._tokens -= _size(self._kept.popitem(last=False)[1])
        return found

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(self._count))


def _size(prompt: Prompt) -> int:
    return len(prompt.token_ids) + len(prompt.answer_ids or ()) + (len(prompt.text) + len(prompt.question)) // 4


def text_hash(text: str) -> int:
    """64 bits; equal for equal texts. Of a billion pairs of other texts one in 2**34 has equal ones."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def hashes(texts: Sequence[str]) -> np.ndarray:
    """The hashes of texts, uint64 [texts]."""
    return np.array([text_hash(t) for t in texts], np.uint64)


def contains(held_out: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Which hashes are among ``held_out``, which is sorted: bool of the shape of ``found``."""
    if not len(held_out):
        return np.zeros(found.shape, np.bool_)
    at = np.minimum(np.searchsorted(held_out, found), len(held_out) - 1)
    return np.asarray(held_out[at] == found)
