"""Texts made from the columns of a row. Pure."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_rl.data.rows import text_value, value_at
from elastic_rl.errors import ConfigError


@dataclass(frozen=True)
class Template:
    """A text with fields. ``parts``: literal text, and the column that follows it, or None after the last."""

    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def parse(cls, text: str, setting: str) -> Template:
        """Reads Python's format syntax: ``{column}`` or ``{column.field}``, and ``{{`` and ``}}`` for braces. Raises
        ConfigError, which names the setting, for anything else, and for a text without a field."""
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as e:
            raise ConfigError(f"{setting} is no template: {e}", hint="write {{ and }} for braces") from e
        for _, field, spec, conversion in parsed:
            if field is not None and (not field or spec or conversion or field.isdecimal() or set(field) & set("[]")):
                raise ConfigError(f"{setting} has the field {{{field}{f'!{conversion}' if conversion else ''}"
                                  f"{f':{spec}' if spec else ''}}}", hint="a field is {column} or {column.field}, "
                                  "with no conversion, format or index")
        parts = tuple((literal, field) for literal, field, _, _ in parsed)
        if not any(field for _, field in parts):
            raise ConfigError(f"{setting} has no field, so all prompts would be the same",
                              hint="write a column's name in braces, as {question}")
        return cls(parts)

    @property
    def fields(self) -> tuple[str, ...]:
        """Columns that it uses."""
        return tuple(dict.fromkeys(field for _, field in self.parts if field))

    def render(self, row: Mapping[str, Any], where: str) -> str:
        """Raises SourceFailed for a row without a field, or with one that is neither text nor a number."""
        out = []
        for literal, field in self.parts:
            out.append(literal)
            if field:
                out.append(text_value(value_at(row, field, where), f"{where}: the column {field!r}"))
        return "".join(out)
