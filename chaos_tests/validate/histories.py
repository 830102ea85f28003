"""Histories of clients against their sequential models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from chaos_tests.event_log import Event, Kind
from chaos_tests.history import Operation
from chaos_tests.model.linearizability import Undecided, check
from chaos_tests.model.models import MODELS
from chaos_tests.validate.replay import Checker
from chaos_tests.validate.run import Violation

_FIELDS = ("client", "key", "call", "argument", "began_s", "ended_s", "result", "model")


def linearizable(events: Iterable[Event]) -> Iterator[Violation]:
    """For each key some order of the operations, within the times of their calls, explains every answer. A history that
    the search cannot decide proves nothing."""
    by_model = defaultdict[str, list[Operation]](list)
    for event in events:
        if event["kind"] == Kind.OPERATION:
            by_model[event["model"]].append(Operation(**{name: event[name] for name in _FIELDS}))
    for name, history in sorted(by_model.items()):
        if (judge := MODELS.get(name)) is None:
            yield Violation("run", f"{len(history)} operations name the model {name!r}, which there is not")
            continue
        try:
            yield from (Violation(judge.rule, f"{name}: {found}") for found in check(judge.model, history))
        except Undecided as e:
            yield Violation("run", f"{name}: {e}")


CHECKERS: tuple[tuple[str, Checker], ...] = (("I1", linearizable),)
