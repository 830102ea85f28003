"""What a row asks: a text, or a conversation, as chat templates get it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_rl.data.values import ROW_READER, kind_of, plain_json, require_readable_digits, text_value
from elastic_rl.errors import SourceFailed

_ROLE, _CONTENT = "role", "content"
_FORM = 'a message is {"role": "user", "content": "…"}'
_SHARE_GPT = {"from", "value"}
_OF_TEXT = {None, "text", "input_text", "output_text"}
"""Types of the parts of a content that are text."""
_CALLS = ("tool_calls", "function_call")
_LISTS = ("tools", "documents")
"""Variables of chat templates that are lists."""


@dataclass(frozen=True)
class Asked:
    """What a row asks. ``content``: a text, or the messages of a conversation. ``variables``: of the chat template."""

    content: str | list[dict[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation; of a text, the user's message."""
        return self.content if isinstance(self.content, list) else [{_ROLE: "user", _CONTENT: self.content}]

    @property
    def text(self) -> str:
        """What is asked, for a judge: the text, or those of the messages, each after its role if there are several."""
        shown = [_shown(message) for message in self.messages]
        return shown[0] if len(shown) == 1 else "\n\n".join(
            f"{message[_ROLE]}: {text}" for message, text in zip(self.messages, shown, strict=True))

    @property
    def beside_text(self) -> list[Any]:
        """What a chat template gets and ``text`` does not show; empty for none."""
        more = [{k: v for k, v in message.items() if k not in (_ROLE, _CONTENT)} for message in self.messages]
        return [more, dict(self.variables)] if any(more) or self.variables else []


def messages_of(content: Any, where: str) -> list[dict[str, Any]]:
    """The messages of a conversation, with all their keys: what they mean is the chat template's business. Keys of null
    are left out at any depth, as Arrow fills them in where other messages have them, but for the content. Raises
    SourceFailed, which begins with ``where``, for what is no conversation of text."""
    content = _from_json(content, where) if isinstance(content, str) else content
    if not isinstance(content, list | tuple) or not content:
        raise SourceFailed(f"{where}: the messages are no list of one or more",
                           hint='a conversation is [{"role": "user", "content": "…"}]; for text use prompt_key')
    return [_message(message, f"{where}: message {number}", f"{where}: the content of message {number}")
            for number, message in enumerate(content)]


def _message(given: Any, what: str, what_content: str) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get(_ROLE), str):
        renamed = isinstance(given, Mapping) and given.keys() >= _SHARE_GPT
        raise SourceFailed(f"{what} is no object with a role", hint=_FORM + (
            "; rename its keys, from and value, and the roles human and gpt, user and assistant" if renamed else ""))
    rest = {k: _from_json(v, what) if k == "tool_calls" and isinstance(v, str) else v
            for k, v in given.items() if k != _CONTENT}
    message = without_nulls(plain_json(rest, what))
    content = given.get(_CONTENT)
    if content is None and not any(key not in (_ROLE, "name") for key in message):
        raise SourceFailed(f"{what_content} is null, not text",
                           hint="only a message with something else, such as tool_calls, needs none")
    # In the order of the row: a template may write a message as JSON.
    return {key: _text(content, what_content) if key == _CONTENT else message[key]
            for key in given if key == _CONTENT or key in message}


def _text(content: Any, what: str) -> Any:
    """A content as text; null and objects, which templates write as JSON where a tool returns them, as they are. Parts
    are joined with nothing between, as chat templates do: those of models of text alone would write the list."""
    if content is None:
        return None
    if isinstance(content, Mapping):
        return without_nulls(plain_json(content, what))
    if not isinstance(content, list | tuple):
        return text_value(content, what)
    if not content:
        raise SourceFailed(f"{what} is an empty list, not text", hint=_FORM)
    return "".join(_part(part, f"{what}, part {number},") for number, part in enumerate(content))


def _part(part: Any, what: str) -> str:
    if isinstance(part, Mapping):
        if part.get("type") not in _OF_TEXT:
            raise SourceFailed(f"{what} is of the type {str(part.get('type'))[:100]!r}",
                               hint='only text is read: {"type": "text", "text": "…"}')
        part = part.get("text")
    return text_value(part, what)


def _shown(message: Mapping[str, Any]) -> str:
    parts = [message.get(key) for key in (_CONTENT, *_CALLS)]
    return "\n".join(part if isinstance(part, str) else json.dumps(part, ensure_ascii=False) for part in parts if part)


def variable_name(column: str) -> str:
    """The variable of a chat template that a column is: of ``a.b`` its field ``b``."""
    return column.rpartition(".")[2]


def variable(column: str, value: Any, what: str) -> Any:
    """A value of a row as a chat template gets it; None for one that it does not get. Raises SourceFailed, which begins
    with ``what``."""
    if (name := variable_name(column)) in _LISTS:
        value = (_from_json(value, what) if value.strip() else None) if isinstance(value, str) else value
        if value is not None and not isinstance(value, list | tuple):
            raise SourceFailed(f"{what} is {kind_of(value)}, not a list",
                               hint=f"{name} are a list, or its JSON as text")
    return without_nulls(plain_json(value, what))


def _from_json(text: str, what: str) -> Any:
    """What a text of JSON holds, with the digits of its numbers, as a row has them; the text if it is none. Columns of
    objects of different kinds are text: Arrow has none of objects. Raises SourceFailed, which begins with ``what``."""
    try:
        return ROW_READER.decode(text)
    except (ValueError, RecursionError) as e:
        require_readable_digits(e, what)
        return text


def without_nulls(value: Any) -> Any:
    """A JSON value without the keys of its objects that are null."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value
