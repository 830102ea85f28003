"""Which method of a rank executes which command. Pure.

The loop of the ranks (``group_worker.py``) knows no command: it goes by the class of each (``commands.py``) and by the
methods that are marked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from elastic_rl.errors import ElasticRLError
from elastic_rl.trainer.service.commands import Command

M = TypeVar("M", bound=Callable[..., Any])


class Refused(Exception):
    """A command is not executed; every rank raises it for the same reason, at the same place."""

    def __init__(self, error: ElasticRLError) -> None:
        super().__init__(str(error))
        self.error = error


def executes(*kinds: type[Command]) -> Callable[[M], M]:
    """Marks the method of a rank that executes commands of these kinds. It is called with the command and, if that has
    a batch, the share of this rank's replica. It returns the result or, for a ``ForwardCommand``, named tensors of the
    share; None for a result that follows later. It may raise ``Refused``, and StepRefused, on every rank."""

    def mark(method: M) -> M:
        method.executes = kinds  # type: ignore[attr-defined]
        return method

    return mark


def executed_by(*classes: type) -> dict[type[Command], Callable[..., dict[str, Any] | None]]:
    """The marked methods of classes, by the commands that they execute. Raises TypeError for a command with two."""
    found: dict[type[Command], Any] = {}
    for cls in classes:
        for method in vars(cls).values():
            for kind in getattr(method, "executes", ()):
                if kind in found:
                    raise TypeError(f"{cls.__name__} has a second method for the command {kind.__name__}")
                found[kind] = method
    return found
