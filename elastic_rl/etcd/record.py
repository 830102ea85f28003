"""What every record of etcd is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Record(BaseModel):
    """An immutable value; a change is a new record, written by a guarded transaction."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        return cls.model_validate_json(raw)

    def replace(self, **changes: Any) -> Self:
        """The same record with some fields changed."""
        return self.model_copy(update=changes)


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
