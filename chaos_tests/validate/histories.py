"""Checkers of what clients were told: their histories against sequential models, by key."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from typing import Any

from chaos_tests.event_log import Event, Kind
from chaos_tests.history import Operation
from chaos_tests.model import linearizability
from chaos_tests.model.models import MODELS
from chaos_tests.validate.verdict import RUN, Checker

_FIELDS = ("client", "key", "call", "argument", "began_s", "ended_s", "result")


class Histories(Checker):
    """No key has operations that cannot have happened in any order, by the rule of their model."""

    reads = frozenset({Kind.OPERATION})
    lacks = "the log has no operations of clients"

    def __init__(self) -> None:
        super().__init__()
        self._by_model = defaultdict[str, list[Operation]](list)

    def see(self, event: Event) -> None:
        name = str(event.get("model") or "")
        if name in MODELS and MODELS[name].rule == self.rule:
            self.judged += 1
            self._by_model[name].append(Operation(**{name: _hashable(event.get(name)) for name in _FIELDS}))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for name, history in sorted(self._by_model.items()):
            try:
                # Operations on different keys do not depend on one another, and a key may be that of several models.
                for violation in linearizability.check(MODELS[name].model, history):
                    self.violated(str(violation), *({"kind": Kind.OPERATION.value, "model": name, **asdict(operation)}
                                                    for operation in violation.stuck))
            except linearizability.Undecided as e:
                self.violated(f"the history of {name} is not decided: {e}", rule=RUN)

    def evidence(self) -> str:
        return f"{self.judged:,} operations of clients, by {', '.join(sorted(self._by_model))}" if self.judged else ""


def _of_rule(name: str) -> type[Histories]:
    return type(f"HistoriesOf{name}", (Histories,), {"rule": name, "__doc__": Histories.__doc__})


class KnownModels(Checker):
    """Each operation names a model that judges it."""

    rule = RUN
    reads = frozenset({Kind.OPERATION})
    lacks = Histories.lacks

    def __init__(self) -> None:
        super().__init__()
        self._unknown = defaultdict[str, int](int)

    def see(self, event: Event) -> None:
        if (name := event.get("model")) and name not in MODELS:
            self._unknown[str(name)] += 1

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for name, count in sorted(self._unknown.items()):
            self.violated(f"no model is called {name!r}: {count} operations are not judged")


def _hashable(value: Any) -> Any:
    """What JSON has made a list was a tuple, or may be one: models keep arguments and results in their states."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


CHECKERS: tuple[type[Checker], ...] = (
    KnownModels, *(_of_rule(rule) for rule in sorted({model.rule for model in MODELS.values()})))
