"""Checkers of what clients were told: their histories against sequential models, by key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from chaos_tests.event_log import Event, Kind
from chaos_tests.history import Operation
from chaos_tests.model import linearizability
from chaos_tests.model.host_spec import wanted_of_host
from chaos_tests.model.models import MODELS, NUMBER, POOL, STREAM
from chaos_tests.model.number import READ, WRITE
from chaos_tests.validate.replay import Transaction, below
from chaos_tests.validate.verdict import RUN, Checker
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import VersionState

_POOLS, _HOSTS = below(Keys("j").pools_prefix()), below(ClusterKeys("c").host_specs_prefix())
_STREAMS = below(Keys("j").streams_prefix())
_FIELDS = ("client", "key", "call", "argument", "began_s", "ended_s", "result")


class Histories(Checker):
    """No key has operations that cannot have happened in any order, by the rule of their model."""

    reads = frozenset({Kind.OPERATION})
    keys: ClassVar[tuple[str, ...]] = (_POOLS, _HOSTS, _STREAMS)
    lacks = "the log has no operations of clients"

    def __init__(self) -> None:
        super().__init__()
        self._by_model = defaultdict[str, list[Operation]](list)
        self._observed = defaultdict[tuple[str, str], dict[int, int]](dict)
        """What a number was changed to, by revision: by its model and key."""
        self._gaps = False

    def gap(self, first: int, last: int) -> None:
        self._gaps = True

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if not change.put or not change.new:
                continue
            if change.name.startswith(_POOLS) and change.name.endswith("/spec") and "desired" in change.new:
                pool = change.name.removeprefix(_POOLS).partition("/")[0]
                self._observed[POOL, pool][change.revision] = int(change.new["desired"])
            elif change.name.startswith(_HOSTS):
                self._observed[NUMBER, change.name.removeprefix(_HOSTS)][change.revision] = wanted_of_host(change.new)
            elif change.new.get("state") == VersionState.COMMITTED and "seed" in (meta := change.new.get("meta") or {}):
                self._observed[STREAM, str(change.new["stream"])][int(change.new["number"])] = int(meta["seed"])

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
                for violation in linearizability.check(MODELS[name].model, self._possible(name, history)):
                    self.violated(str(violation), *({"kind": Kind.OPERATION.value, "model": name, **asdict(operation)}
                                                    for operation in violation.stuck))
            except linearizability.Undecided as e:
                self.violated(f"the history of {name} is not decided: {e}", rule=RUN)
        for operation in self._by_model.get(STREAM, ()) if not self._gaps else ():
            seen = self._observed.get((STREAM, operation.key))
            if seen and operation.ended_s is not None and (number := operation.result[1]) and number not in seen:
                self.violated(f"{operation.client} was told of version {number} of {operation.key}, which etcd never "
                              "had", {"kind": Kind.OPERATION.value, "model": STREAM, **asdict(operation)})

    def _possible(self, model: str, history: Sequence[Operation]) -> list[Operation]:
        """The history without the unknown writes of a number that never happened."""
        if self._gaps:
            return [*history]
        by_key = defaultdict[str, list[Operation]](list)
        for operation in history:
            by_key[operation.key].append(operation)
        found = list[Operation]()
        for key, of_key in by_key.items():
            seen = self._observed.get((model, key))
            found += with_observed(of_key, seen) if seen else of_key
        return found

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


def with_observed(history: Sequence[Operation], observed: Mapping[int, int]) -> list[Operation]:
    """The history of a number without the unknown writes that never happened: those to which the observer saw no change
    beside those of acknowledged writes. The search would have to try each of them everywhere. ``observed``: what the
    number was changed to, by revision. Pure."""
    told = {o.result[1] for o in history if o.call == WRITE and o.ended_s is not None}
    unexplained = {value for revision, value in observed.items() if revision not in told}
    return [o for o in history if o.ended_s is not None or o.call == READ or _written(o) in unexplained]


def _written(operation: Operation) -> Any:
    """The number of a write, which may have an idempotency key beside it."""
    return operation.argument[0] if isinstance(operation.argument, tuple | list) else operation.argument


def _hashable(value: Any) -> Any:
    """What JSON has made a list was a tuple, or may be one: models keep arguments and results in their states."""
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


CHECKERS: tuple[type[Checker], ...] = (
    KnownModels, *(_of_rule(rule) for rule in sorted({model.rule for model in MODELS.values()})))
