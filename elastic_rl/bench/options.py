"""Options of a bench. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_rl.errors import ConfigError, ElasticRLError

DEFAULT_BYTES = 1 << 30
QUICK_BYTES = 64 << 20
_MAX_BYTES = 1 << 50
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Unmeasurable(ElasticRLError):
    """A row cannot be measured on this machine; the message says why."""


def _discard(line: str) -> None:
    return None


@dataclass(frozen=True)
class Options:
    """How much to measure, and what."""

    quick: bool = False
    """Fewer samples, and fewer bytes unless a size is given."""
    size_bytes: int = 0
    """Bytes that each row of ``dcs`` moves; 0: 64 MiB with ``quick``, else 1 GiB."""
    rows: tuple[str, ...] = ()
    """Ids of the rows to measure; empty: all."""
    settings: tuple[str, ...] = ()
    """Settings of the job that ``loop`` trains, as ``--key.sub=value``."""
    program: str = "elastic-rl bench"
    """The command that runs a bench, without its name."""
    say: Callable[[str], None] = _discard
    """Gets a line of progress now and then."""

    @property
    def nbytes(self) -> int:
        return self.size_bytes or (QUICK_BYTES if self.quick else DEFAULT_BYTES)

    def selects(self, *rows: str) -> bool:
        """Whether any of these rows is to be measured."""
        return any(is_selected(row, self.rows) for row in rows)

    def command(self, name: str) -> str:
        """The command line that measures the same."""
        parts = [f"{self.program} {name}", "--quick" if self.quick else "",
                 f"--size {self.size_bytes >> 20}MiB" if self.size_bytes >= 1 << 20 else
                 f"--size {self.size_bytes}" if self.size_bytes else "",
                 f"--rows {','.join(self.rows)}" if self.rows else "", *map(shlex.quote, self.settings)]
        return " ".join(p for p in parts if p)


def is_selected(row: str, ids: Sequence[str]) -> bool:
    """A row is selected by its id, and by the part of it that ends at a dash: ``P1`` selects all rows of P1. No ids
    select all rows."""
    return not ids or any(row == given or row.startswith(given + "-") for given in ids)


def parse_size(text: str) -> int:
    """Bytes of ``64MiB``, ``1G``, ``4096``; units are powers of two. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    nbytes = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if nbytes < 1:
        raise ConfigError(f"{text[:60]!r} is not a size", hint="write it like 64MiB or 1GiB")
    if nbytes > _MAX_BYTES:  # infinity too
        raise ConfigError(f"{text[:60]!r} is not a size that can be measured: it is more than 1024 TiB",
                          hint="write it like 64MiB or 1GiB")
    return int(nbytes)


def refuse_settings(options: Options) -> None:
    """Refuses settings for benches that measure the defaults. Raises ConfigError when settings are given."""
    if options.settings:
        raise ConfigError(f"this bench takes no settings ({' '.join(options.settings)})",
                          hint="only the bench loop does; the others measure the default settings")
