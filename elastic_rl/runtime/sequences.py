"""Splitting sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Splits a sequence into parts of ``size``, the last one shorter, in order."""
    for start in range(0, len(items), size):
        yield items[start:start + size]
