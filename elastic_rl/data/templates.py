"""Texts made from the columns of a row. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_rl.data.rows import names_column, value_at
from elastic_rl.data.values import text_value
from elastic_rl.errors import ConfigError

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_FIELD = "a field is a column's name in braces, as {question}, with no format or index; write {{ and }} for braces"
_SHOWN = 20
"""Characters before a fault that its error shows."""


@dataclass(frozen=True)
class Template:
    """A text with fields. ``parts``: literal text, and the column that follows it, or None after the last. ``hint``: of
    the error for a row without such a column."""

    parts: tuple[tuple[str, str | None], ...]
    hint: str = _FIELD

    @classmethod
    def parse(cls, text: str, setting: str) -> Template:
        """Reads ``{column}`` or ``{column.field}``, and ``{{`` and ``}}`` for braces. All that is between two braces is
        the name of a column, which may have any other character. Raises ConfigError, which names the setting, for
        single braces, and for a text without a field."""
        parts, literal, at = list[tuple[str, str | None]](), "", 0
        for piece in _PIECE.finditer(text):
            literal, at = literal + text[at:piece.start()], piece.end()
            if piece[0] in ("{{", "}}"):
                literal += piece[0][0]
            elif piece[1]:
                parts.append((literal, piece[1]))
                literal = ""
            else:
                raise ConfigError(f"{setting} is no template: it has {piece[0]} after "
                                  f"{text[max(0, piece.start() - _SHOWN):piece.start()]!r}", hint=_FIELD)
        if not parts:
            raise ConfigError(f"{setting} has no field, so all prompts would be the same", hint=_FIELD)
        return cls((*parts, (literal + text[at:], None)), f"{names_column(setting)}; {_FIELD}")

    @classmethod
    def of_column(cls, name: str, setting: str) -> Template:
        """The text of a column, whatever its name has. ``setting``: that names it."""
        return cls((("", name),), names_column(setting))

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
                out.append(text_value(value_at(row, field, where, hint=self.hint), f"{where}: the column {field!r}"))
        return "".join(out)
