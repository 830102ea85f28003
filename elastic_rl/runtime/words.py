"""Numbers of things in messages. Pure."""

from __future__ import annotations


def counted(count: int, one: str, many: str = "") -> str:
    """``1 group``, ``2 groups``. ``many``: the plural, where it has no *s* at its end alone."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"
