"""What JSON has, and every encoder on the way of it: one rule for the options of plug-ins and for the metadata of
prompts and samples. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeVar

_Value = TypeVar("_Value", dict[str, Any], list[str | dict[str, Any]])
MAX_DEPTH = 100
"""Depth of nesting: readers and writers of JSON have limits of a few hundred, or end the process."""
_MAX_OPTIONS = 100_000
"""Values of what ``require_json`` takes."""
_MAX_VALUES = 1_000_000
_MAX_CHARACTERS = 1 << 24
"""The most that all texts have together: as many as the longest line of a JSON Lines file has bytes."""
_MAX_BITS = 4096
"""The most that an integer has. Python writes no more than 14,284 bits as decimal digits."""
_MISSING = ", which JSON does not have"


def require_json(value: _Value) -> _Value:
    """The value, if it travels with the settings of a job or the record of a version: raises ValueError, which says
    why, for what other processes, which get it as JSON, would not get."""
    if fault := json_fault(value, max_values=_MAX_OPTIONS):
        raise ValueError(fault)
    return value


def json_fault(value: object, *, max_values: int = _MAX_VALUES) -> str:
    """Why a value cannot be passed on as JSON, as it is, by every encoder and to every reader; "" where it can."""
    try:
        _Reader(max_values, converts=False).read(value, 0)
    except ValueError as e:
        return str(e)
    return ""


def as_json(value: Any) -> Any:
    """A value as JSON has it: dates as ISO 8601 text, to the microsecond, decimals as text with all their digits,
    scalars, arrays and tensors as numbers and lists, tuples as lists, sets sorted. Raises ValueError, which says why,
    for what has no such form or cannot be passed on (``json_fault``)."""
    return _Reader(_MAX_VALUES, converts=True).read(value, 0)


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


class _Reader:
    """Reads one value with all that it holds, keys included. ``converts``: also what JSON has only another form of."""

    def __init__(self, max_values: int, *, converts: bool) -> None:
        self._max_values, self._converts = max_values, converts
        self._values = self._characters = 0

    def read(self, value: Any, depth: int) -> Any:
        """The value as JSON has it. ``depth``: what holds it. Raises ValueError."""
        self._values += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep, or a value contains itself")
        if self._values > self._max_values:
            raise ValueError(f"it has more than {self._max_values} values")
        kind = type(value)
        if kind is str:
            return self._text(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            if value.bit_length() > _MAX_BITS:
                raise ValueError(f"a number has more than {_MAX_BITS} bits{_MISSING}")
            return value
        if kind is float:
            if not math.isfinite(value):
                raise ValueError(f"a number is {value}{_MISSING}")
            return value
        if kind is list or isinstance(value, list | tuple):
            return [self.read(inner, depth + 1) for inner in value]
        if kind is dict or isinstance(value, Mapping):
            return self._mapping(value, depth)
        return self._other(value, depth)

    def _text(self, text: str) -> str:
        self._characters += len(text)
        if self._characters > _MAX_CHARACTERS:
            raise ValueError(f"its texts have more than {_MAX_CHARACTERS} characters")
        if not is_unicode(text):
            raise ValueError(f"a text holds half of a surrogate pair{_MISSING}")
        return text

    def _mapping(self, value: Mapping[Any, Any], depth: int) -> dict[str, Any]:
        made = dict[str, Any]()
        for key, inner in value.items():
            if not isinstance(key, str) and not self._converts:
                raise ValueError(f"a key of a mapping is a {type(key).__name__}, not text{_MISSING}")
            made[self._text(str(key))] = self.read(inner, depth + 1)
        if len(made) != len(value):
            raise ValueError("two keys of a mapping are the same as text")
        return made

    def _array(self, value: Any, depth: int) -> Any:
        """A scalar, array or tensor of NumPy or torch."""
        kind = getattr(getattr(value, "dtype", None), "kind", "")
        if kind == "m":
            raise ValueError(f"a value is a time span{_MISSING}")
        if kind == "f" and value.dtype.itemsize > 8:
            value = value.astype(float)  # a longdouble stays one
        plain = value.tolist()
        if kind == "M" and _has_int(plain):  # its unit is finer than that of Python's dates
            plain = value.astype("datetime64[us]").tolist()
        if type(plain) is type(value) or (kind == "M" and _has_int(plain)):
            raise ValueError(f"a value is a {getattr(value, 'dtype', type(value).__name__)}{_MISSING}")
        return self.read(plain, depth + 1)

    def _other(self, value: Any, depth: int) -> Any:
        if self._converts and hasattr(value, "tolist"):  # first: numpy.float64 is a float too
            return self._array(value, depth)
        for kind in (int, float, str):
            if isinstance(value, kind):
                return self.read(kind(value), depth)
        if self._converts and isinstance(value, set | frozenset):
            return sorted((self.read(inner, depth + 1) for inner in value), key=repr)
        if self._converts and (text := written(value)) is not None:
            return self._text(text)
        raise ValueError(f"a value is a {type(value).__name__}{_MISSING}")


def _has_int(plain: Any) -> bool:
    """Whether what NumPy makes of dates holds one that Python's type does not have, such as of the year 10,000."""
    return any(map(_has_int, plain)) if isinstance(plain, list) else isinstance(plain, int)
