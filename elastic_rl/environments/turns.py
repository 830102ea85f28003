"""The tokens between two turns of the policy, by the chat template of its tokenizer.

A policy must go on from exactly the tokens that it sampled: to write the whole conversation by the template again, and
to tokenize that, may give others, with other log-probs. So only what comes between is written by the template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rl.data.model_tokenizer import ModelTokenizer, without_control_tokens
from elastic_rl.environments.base import Message
from elastic_rl.errors import ConfigError

_SAID = "WHATTHEPOLICYSAID"
_UNWRITTEN = 1024
"""Characters of messages, at most, that a chat template may leave out, such as the id of a call."""
_EXAMPLES = ((Message("user", "x"),),)


class TurnWriter:
    """Writes what the policy reads after one of its turns."""

    def __init__(self, tokenizer: ModelTokenizer, template_options: Mapping[str, Any],
                 examples: Sequence[Sequence[Message]] = _EXAMPLES) -> None:
        """``template_options``: further variables of the chat template. ``examples``: what the environment may say, by
        form. Raises ConfigError for a template that does not show where a turn of the policy ends, or does not take
        them."""
        self._tokenizer, self._options, self.examples = tokenizer, dict(template_options), examples
        self._controls = tokenizer.control_tokens
        self._longest = max(map(len, tokenizer.vocabulary))
        self._ends = tuple(tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.eos_ids)
        for messages in examples:
            try:
                self.between(messages)
            except ConfigError as e:
                roles = ", ".join(message.role for message in messages)
                raise ConfigError(
                    f"the model's chat template cannot write a turn of the environment ({roles}): {e.message}",
                    hint="an environment needs a model whose chat template writes each turn of a conversation, and "
                    "takes messages of these roles: use the model's chat variant, or give it a template that does"
                    ) from e

    def may_fit(self, messages: Sequence[Message], room: int) -> bool:
        """Whether the messages can have as few as ``room`` tokens, by their number and characters: to tokenize more
        would have no limit on its time and memory."""
        characters = sum(len(text) for m in messages for text in (m.role, m.content, m.name, m.tool_call_id))
        return len(messages) <= room and characters <= room * self._longest + _UNWRITTEN

    def between(self, messages: Sequence[Message]) -> list[int]:
        """Token ids from after the token that ended the policy's turn to where its next one begins. May be called in
        several threads at once. Raises ConfigError for messages that the template refuses."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": _SAID}, *map(self._plain, messages)],
            self._options)
        before, said, after = text.partition(_SAID)  # the messages come after it, and may have the same word
        if not said:
            raise ConfigError("the chat template leaves out what the policy said in its turn before")
        [ids] = self._tokenizer.encode_batch([self._without_end(after)], special_tokens=False)
        return ids

    def _plain(self, message: Message) -> dict[str, str]:
        """The message as templates take it. No control token is in it: a page that a tool found could speak as the
        policy."""
        given = {"role": message.role, "content": message.content, "name": message.name,
                 "tool_call_id": message.tool_call_id}
        return {key: without_control_tokens(value, self._controls) for key, value in given.items()
                if value or key in ("role", "content")}

    def _without_end(self, text: str) -> str:
        """The text without the token that ends a turn, which the policy itself has written."""
        for end in self._ends:
            if text.lstrip().startswith(end):
                return text.lstrip()[len(end):]
        return text

    def text_of(self, ids: Sequence[int]) -> str:
        """A turn of the policy with its special tokens, but for the one that ends it."""
        ended = bool(ids) and ids[-1] in self._tokenizer.eos_ids
        return self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)

    def plain_text_of(self, ids: Sequence[int]) -> str:
        """A turn of the policy without special tokens."""
        return self._tokenizer.decode(ids)
