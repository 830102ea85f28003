"""Checker of what clients were told: their histories against sequential models, by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from chaos_tests.event_log import Event, Kind
from chaos_tests.history import Operation
from chaos_tests.model import linearizability
from chaos_tests.model.models import MODELS
from chaos_tests.validate.verdict import RUN, Violation

_FIELDS = ("client", "key", "call", "argument", "began_s", "ended_s", "result")


def unexplained(events: Iterable[Event]) -> Iterator[Violation]:
    """Keys whose operations cannot have happened in any order, by the rule of their model."""
    by_model = dict[str, list[Event]]()
    for event in events:
        if event["kind"] == Kind.OPERATION and event.get("model"):
            by_model.setdefault(str(event["model"]), []).append(event)
    for name, records in sorted(by_model.items()):
        if name not in MODELS:
            yield Violation(RUN, f"no model is called {name!r}: {len(records)} operations are not judged")
            continue
        judge = MODELS[name]
        # Operations on different keys do not depend on one another, and a key may be that of several models.
        history = [Operation(**{field: _hashable(record.get(field)) for field in _FIELDS}) for record in records]
        try:
            for violation in linearizability.check(judge.model, history):
                stuck = {(o.client, o.began_s) for o in violation.stuck}
                yield Violation(judge.rule, str(violation), tuple(
                    record for record in records if (record["client"], record["began_s"]) in stuck))
        except linearizability.Undecided as e:
            yield Violation(RUN, f"the history of {name} is not decided: {e}")


def _hashable(value: Any) -> Any:
    """What JSON has made a list was a tuple, or may be one: models keep arguments and results in their states."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
