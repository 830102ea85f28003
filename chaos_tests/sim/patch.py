"""Replaces attributes of the product, until a planted bug is taken out again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from unittest import mock


class Patch(Protocol):
    def setattr(self, target: Any, name: str, value: Any) -> None: ...


class _Patches:
    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def setattr(self, target: Any, name: str, value: Any) -> None:
        self._stack.enter_context(mock.patch.object(target, name, value))


@contextlib.contextmanager
def patched(plant: Callable[[Patch], None]) -> Iterator[None]:
    """Inside, what ``plant`` replaces is replaced."""
    with contextlib.ExitStack() as stack:
        plant(_Patches(stack))
        yield
