"""Splitting sequences."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def batches(items: Sequence[T], size: int, *, nbytes: Callable[[T], int] = lambda item: 0,
            most_bytes: int = sys.maxsize) -> Iterator[Sequence[T]]:
    """Splits a sequence into parts of at most ``size`` items that have at most ``most_bytes`` together, as ``nbytes``
    says of each, in order. An item that alone has more is a part by itself."""
    start = total = 0
    for at, item in enumerate(items):
        added = nbytes(item)
        if at > start and (at - start == size or total + added > most_bytes):
            yield items[start:at]
            start, total = at, 0
        total += added
    if start < len(items):
        yield items[start:]
