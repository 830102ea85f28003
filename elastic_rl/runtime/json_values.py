"""What JSON has, and every encoder on the way of it: one rule for the options of plug-ins and for the metadata of
prompts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeVar

_Options = TypeVar("_Options", dict[str, Any], list[str | dict[str, Any]])
MAX_DEPTH = 100
"""Depth of nesting: readers and writers of JSON have limits of a few hundred, or end the process."""
_MAX_OPTIONS = 100_000
"""Values of options, which travel with the settings of a job."""
_MAX_VALUES = 1_000_000
_MAX_CHARACTERS = 1 << 24
"""Of all texts together, as many as the longest line of a JSON Lines file has bytes."""
_MAX_BITS = 4096
"""Of an integer. Python writes no more than 14,284 bits as decimal digits."""


def require_json(options: _Options) -> _Options:
    """Raises ValueError for what the other processes of the run, which get the settings as JSON, would not get."""
    if fault := json_fault(options, max_values=_MAX_OPTIONS):
        raise ValueError(f"{fault}; put what is meant as text in quotes")
    return options


def json_fault(value: object, *, max_values: int = _MAX_VALUES) -> str:
    """Why a value cannot be passed on as JSON, by every encoder and to every reader; "" where it can."""
    characters = 0
    for number, (found, depth) in enumerate(_nested(value)):
        if depth > MAX_DEPTH:
            return f"it is nested more than {MAX_DEPTH} deep, or a value contains itself"
        if number > max_values:
            return f"it has more than {max_values} values"
        if fault := _fault(found):
            return f"{fault}, which JSON does not have"
        characters += len(found) if isinstance(found, str) else 0
        if characters > _MAX_CHARACTERS:
            return f"its texts have more than {_MAX_CHARACTERS} characters"
    return ""


def as_json(value: Any) -> Any:
    """A value as JSON has it: dates as ISO 8601 text, decimals as text with all their digits, scalars, arrays and
    tensors as numbers and lists, tuples as lists, sets sorted. Raises ValueError, which says why, for what has no such
    form or is not passed on as it is (``json_fault``)."""
    made = _converted(value, 0)
    if fault := json_fault(made):
        raise ValueError(fault)
    return made


def _converted(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH + 1 or value is None or type(value) in (bool, int, float, str):
        return value  # what is too deep json_fault finds, and not Python's limit
    if hasattr(value, "tolist"):  # first: numpy.float64 is a float too
        return _converted(value.tolist(), depth)
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        made = {str(k): _converted(v, depth + 1) for k, v in value.items()}
        if len(made) != len(value):
            raise ValueError("two keys of a mapping are the same as text")
        return made
    if isinstance(value, list | tuple):
        return [_converted(v, depth + 1) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((_converted(v, depth + 1) for v in value), key=repr)
    text = written(value)
    return value if text is None else text


def written(value: Any) -> str | None:
    """The text of a decimal, in decimal digits, or of a date, as of ISO 8601; None of anything else."""
    if isinstance(value, Decimal) and value.is_finite():
        return format(value, "f")
    return str(value.isoformat()) if hasattr(value, "isoformat") else None


def is_unicode(text: str) -> bool:
    """Whether UTF-8 has the text: it has no half of a surrogate pair, as ``"\\ud83d"`` is in JSON."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _nested(value: object) -> Iterator[tuple[Any, int]]:
    """A value and all that it holds, keys included, with the depth of each. It never ends for a value that holds
    itself."""
    rest: list[tuple[Any, int]] = [(value, 0)]
    while rest:
        found, depth = rest.pop()
        yield found, depth
        if isinstance(found, Mapping):
            rest += ((inner, depth + 1) for both in found.items() for inner in both)
        elif isinstance(found, list | tuple):
            rest += ((inner, depth + 1) for inner in found)


def _fault(value: Any) -> str:
    """What of one value JSON does not have; empty for none. What it holds is another matter."""
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str)), "")
        return "" if isinstance(odd, str) else f"a key of a mapping is a {type(odd).__name__}, not text"
    if isinstance(value, str):
        return "" if is_unicode(value) else "a text holds half of a surrogate pair"
    if isinstance(value, float) and not math.isfinite(value):
        return f"a number is {value}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"a number has more than {_MAX_BITS} bits"
    if value is None or isinstance(value, bool | int | float | list | tuple):
        return ""
    return f"a value is a {type(value).__name__}"
