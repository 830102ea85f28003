"""Options of plug-ins: any value that JSON has. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

_Options = TypeVar("_Options", dict[str, Any], list[str | dict[str, Any]])
_MAX_DEPTH = 50
_MAX_VALUES = 100_000
_MAX_BITS = 4096


def require_json(options: _Options) -> _Options:
    """Raises ValueError for what the other processes of the run, which get the settings as JSON, would not get."""
    for number, (value, depth) in enumerate(_nested(options)):
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} deep, or a value contains itself")
        if number > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES} values")
        if fault := _fault(value):
            raise ValueError(f"{fault}, which JSON does not have; put what is meant as text in quotes")
    return options


def _nested(value: Any) -> Iterator[tuple[Any, int]]:
    """A value and all that it holds, keys included, with the depth of each. It never ends for a value that holds
    itself."""
    rest = [(value, 0)]
    while rest:
        found, depth = rest.pop()
        yield found, depth
        if isinstance(found, dict):
            rest += ((inner, depth + 1) for both in found.items() for inner in both)
        elif isinstance(found, list | tuple):
            rest += ((inner, depth + 1) for inner in found)


def _fault(value: Any) -> str:
    """What of one value JSON does not have; empty for none. What it holds is another matter."""
    if isinstance(value, dict):
        odd = next((key for key in value if not isinstance(key, str)), "")
        return "" if isinstance(odd, str) else f"a key of a mapping is a {type(odd).__name__}, not text"
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return "a text holds half of a surrogate pair"
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return f"a number is {value}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"a number has more than {_MAX_BITS} bits"
    if value is None or isinstance(value, bool | int | float | list | tuple):
        return ""
    return f"a value is a {type(value).__name__}"
