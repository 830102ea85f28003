"""What every record of etcd is made of."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, NoReturn, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError


class Record(BaseModel):
    """An immutable value; a change is a new record, written by a guarded transaction."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Raises ValidationError, also for numbers that JSON, or 64 bits, do not have: who reads the record next, such
        as a client of the API, could not."""
        if may_be_odd(raw):
            require_plain_numbers(cls.__name__, raw)
        return cls.model_validate_json(raw)

    def replace(self, **changes: Any) -> Self:
        """The same record with some fields changed."""
        return self.model_copy(update=changes)


_PLAIN = bytes.maketrans(b"123456789E", b"000000000e")
_LONG = b"0" * 19


def may_be_odd(raw: bytes) -> bool:
    """Whether there is somewhere what every record with such a number has, and hardly any other record. Each record is
    looked through each time that it is read: as a regular expression this took more than the decoding."""
    digits = raw.translate(_PLAIN)
    return _LONG in digits or b"e000" in digits or b"e+000" in digits or b"NaN" in raw or b"Infinity" in raw


_MOST, _LEAST = (1 << 64) - 1, -(1 << 63)
"""Ids of etcd's members have 64 bits without a sign."""


def require_plain_numbers(kind: str, raw: bytes) -> None:
    """Raises ValidationError for JSON with a number that readers of records refuse. ``kind``: of what the JSON is."""
    def refuse(text: str) -> NoReturn:
        raise ValidationError.from_exception_data(kind, [{"type": PydanticCustomError(
            "odd_number", "{number} is no number of 64 bits", {"number": text[:40]}), "loc": (), "input": text[:40]}])

    def whole(text: str) -> int:
        return int(text) if len(text) <= 20 and _LEAST <= int(text) <= _MOST else refuse(text)

    def real(text: str) -> float:
        return float(text) if math.isfinite(float(text)) else refuse(text)

    # What is no JSON is the reader's to report.
    with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        json.loads(raw, parse_int=whole, parse_float=real, parse_constant=refuse)


class OpenEnum(StrEnum):
    """An enum of which a newer release may know more values. Such a value is kept as it is, and equals none of ours."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        unknown = str.__new__(cls, value)
        unknown._name_ = unknown._value_ = value
        return unknown

    @property
    def known(self) -> bool:
        """Whether this release knows the value."""
        return any(self is member for member in type(self))


def _finite(value: object) -> object:
    # JSON has no infinity: a record with one could be written, and not be read again.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _finite_only(values: object) -> object:
    if not isinstance(values, Mapping):
        return values
    return {name: value for name, value in values.items() if _finite(value) is not None}


FiniteOrNone = Annotated[float | None, BeforeValidator(_finite)]
"""A number; None in place of one that is not finite."""
FiniteByName = Annotated[dict[str, float], BeforeValidator(_finite_only)]
"""Numbers by name, without those that are not finite."""
