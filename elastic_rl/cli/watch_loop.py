"""``--watch``: polls a reading and shows it, redrawn in place on a terminal, elsewhere printed when it has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_rl.cli import tables
from elastic_rl.cli.common import out
from elastic_rl.cli.tables import Format
from elastic_rl.errors import EtcdUnavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVERY_S = 1.0
_CLOCKS = frozenset({"beat_at", "phase_age_s", "progress_at", "updated_at"})
"""Fields that change while nothing happens."""


@dataclass(frozen=True)
class Reading:
    """A reading of the cluster, for programs and for people."""

    data: Any
    shown: RenderableType


def show(read: Callable[[], Reading], output: Format, *, watch: bool) -> None:
    """Prints a reading, once, or again and again until Ctrl-C."""
    reading = read()
    if not watch:
        _print(reading, output)
        return
    try:
        if out.is_terminal and output is not Format.JSON:
            _redraw(read, reading)
        else:
            _print_changes(read, reading, output)
    except KeyboardInterrupt:
        return  # the way to end it


def _print(reading: Reading, output: Format, *, line: bool = False) -> None:
    if output is Format.JSON:
        tables.write_json(reading.data, line=line)
    else:
        tables.put(out, reading.shown, output)


def _redraw(read: Callable[[], Reading], reading: Reading) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text
    at, error = time.time(), ""
    with Live(console=out, auto_refresh=False) as live:
        while True:
            clock = time.strftime("%H:%M:%S", time.localtime(at))
            footer = f"as of {clock}: {error}" if error else f"as of {clock}; Ctrl-C ends"
            live.update(Group(reading.shown, Text(f"\n{footer}", style="red" if error else "dim")), refresh=True)
            time.sleep(_EVERY_S)
            try:
                reading, at, error = read(), time.time(), ""
            except EtcdUnavailable as e:
                error = e.message


def _print_changes(read: Callable[[], Reading], reading: Reading, output: Format) -> None:
    printed = None
    while True:
        if (now := without_clocks(reading.data)) != printed:
            if printed is not None and output is not Format.JSON:
                out.print()
            _print(reading, output, line=True)
            printed = now
        time.sleep(_EVERY_S)
        try:
            reading = read()
        except EtcdUnavailable:
            continue  # the last reading stays


def without_clocks(value: Any) -> Any:
    """The value without the fields that change while nothing happens."""
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if k not in _CLOCKS}
    return [without_clocks(v) for v in value] if isinstance(value, list) else value
