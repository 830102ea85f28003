"""The sequential models by the names that records of an event log have, each with the rule that it judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from chaos_tests.model import assignment, catalog, created, number, operation, terms
from chaos_tests.model.linearizability import Model

CATALOG, TERMS, ASSIGNMENT, OPERATION = "catalog", "terms", "assignment", "operation"
NUMBER, POOL, CREATED, STREAM = "number", "pool", "created", "stream"


@dataclass(frozen=True)
class Judge:
    rule: str
    """Number of the rule that a history breaks which the model does not explain."""
    model: Model[Any]


MODELS: Mapping[str, Judge] = MappingProxyType({
    CATALOG: Judge("I3", catalog.Catalog()),
    TERMS: Judge("I1", terms.Terms()),
    ASSIGNMENT: Judge("I1", assignment.Assignment()),
    OPERATION: Judge("I10", operation.LongRunningOperation()),
    NUMBER: Judge("I1", number.VersionedNumber()),
    POOL: Judge("I1", number.VersionedNumber(rewritten=True)),
    CREATED: Judge("I10", created.CreatedOnce()),
    STREAM: Judge("I3", number.VersionedNumber(number.NONE)),
})
