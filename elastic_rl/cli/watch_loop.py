"""``--watch``: the same look again and again, redrawn in place on a terminal, told when something changed elsewhere."""

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
_CLOCKS = frozenset({"beat_at", "progress_at", "updated_at"})
"""Fields that move while nothing happens."""


@dataclass(frozen=True)
class Look:
    """What was found: for programs, and for people."""

    data: Any
    shown: RenderableType


def show(look: Callable[[], Look], output: Format, *, watch: bool) -> None:
    """Prints what there is, once, or until Ctrl-C."""
    found = look()
    if not watch:
        _print(found, output)
        return
    try:
        if out.is_terminal and output is not Format.JSON:
            _redraw(look, found)
        else:
            _tell_changes(look, found, output)
    except KeyboardInterrupt:
        return  # the way to end it


def _print(found: Look, output: Format, *, line: bool = False) -> None:
    if output is Format.JSON:
        tables.write_json(found.data, line=line)
    else:
        tables.put(out, found.shown, output)


def _redraw(look: Callable[[], Look], found: Look) -> None:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text
    at, trouble = time.time(), ""
    with Live(console=out, auto_refresh=False) as live:
        while True:
            clock = time.strftime("%H:%M:%S", time.localtime(at))
            live.update(Group(found.shown, Text(f"\n{trouble or f'as of {clock}; Ctrl-C ends'}",
                                                style="red" if trouble else "dim")), refresh=True)
            time.sleep(_EVERY_S)
            try:
                found, at, trouble = look(), time.time(), ""
            except EtcdUnavailable as e:
                trouble = f"as of {clock}, since when: {e.message}"


def _tell_changes(look: Callable[[], Look], found: Look, output: Format) -> None:
    told = None
    while True:
        if (now := without_clocks(found.data)) != told:
            if told is not None and output is not Format.JSON:
                out.print()
            _print(found, output, line=True)
            told = now
        time.sleep(_EVERY_S)
        try:
            found = look()
        except EtcdUnavailable:
            continue  # nothing new is known


def without_clocks(value: Any) -> Any:
    """The value without what moves while nothing happens."""
    if isinstance(value, dict):
        return {k: without_clocks(v) for k, v in value.items() if k not in _CLOCKS}
    return [without_clocks(v) for v in value] if isinstance(value, list) else value
