"""Values of a row as what is made of them: JSON for rewards, text for prompts and answers. Pure."""

from __future__ import annotations

import json
from typing import Any

from elastic_rl.data.numbers import WrittenFloat, number_text
from elastic_rl.errors import SourceFailed
from elastic_rl.runtime.json_values import as_json, is_unicode, json_fault, written

ROW_READER = json.JSONDecoder(parse_float=WrittenFloat)
"""Reads JSON that a row is, or that a column of one holds."""
_DIGITS = "integer string conversion"
"""This is in the error of an integer that Python reads no digits of."""
_AS_JSON = "write null for what is missing, and as text what JSON does not have"
_AS_TEXT = {
    bool: "write the text that the model is to read or to write, such as yes or true",
    bytes: "write the column as text; binary data, for instance, in base64",
    list: "a conversation is named by messages_key in the place of prompt_key; of several texts write the one that is "
          "meant",
    dict: "name a field of it, as column.field",
    float: "leave out rows without a number, or write the text that is meant",
    str: "half of an emoji, for instance, is left where a text was cut; write it again without: text.encode('utf-8', "
         "'ignore').decode()"}


def require_readable_digits(error: Exception, what: str) -> None:
    """Raises SourceFailed, which begins with ``what``, for an error of ``ROW_READER`` about a number of thousands of
    digits: reading these takes time that grows with their square."""
    if _DIGITS in str(error):
        raise SourceFailed(f"{what} has a number of thousands of digits", hint="write it as text") from error


def plain_json(value: Any, what: str) -> Any:
    """``as_json`` of a value of a row, which is looked at once, as the row is read. Raises SourceFailed, which begins
    with ``what``."""
    try:
        return as_json(value)
    except ValueError as e:
        raise SourceFailed(f"{what}: {e}", hint=_AS_JSON) from e


def text_value(value: Any, what: str) -> str:
    """A value that is to be written into a prompt or an answer. Raises SourceFailed for what is neither text nor a
    number, nor a date, and for text that is not Unicode."""
    if isinstance(value, str):
        if not is_unicode(value):
            raise SourceFailed(f"{what} holds half of a surrogate pair, which is no text", hint=_AS_TEXT[str])
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if fault := json_fault(value):
            raise SourceFailed(f"{what}: {fault}", hint=_AS_TEXT[float])
        return number_text(value)
    if (text := written(value)) is not None:
        return text
    raise SourceFailed(f"{what} is {kind_of(value)}, not text", hint=_AS_TEXT.get(type(value), ""))


def answer_value(value: Any, what: str) -> str | list[str]:
    """The right answer of a row as text; of a list, each of which is right, those that are not null. Raises
    SourceFailed for an empty list, and as ``text_value``."""
    if value is None:
        raise SourceFailed(f"{what} is null, not text", hint="give each row an answer, or leave the row out")
    if not isinstance(value, list | tuple):
        return text_value(value, what)
    answers = [text_value(one, f"{what}: an answer of the list") for one in value if one is not None]
    if not answers:
        raise SourceFailed(f"{what} is a list without an answer", hint="give each row an answer, or leave the row out")
    return answers


def kind_of(value: Any) -> str:
    """What a value is, for people."""
    return {type(None): "null", dict: "an object", list: "a list", bool: "true or false", str: "text",
            int: "a number", float: "a number"}.get(type(value), f"of type {type(value).__name__}")
