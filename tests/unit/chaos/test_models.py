"""The sequential models, against objects that are right by construction, and against the same ones with one bug each.

The objects are written apart from the models: plain mutable classes, of which one call happens at one moment between
its call and its answer. Some answers are lost, and some of those calls never happen.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaos_tests.history import Operation
from chaos_tests.model import assignment, catalog, created, models, operation, terms
from chaos_tests.model.linearizability import check

REFUSED = "refused"
"""Result of a call that certainly had no effect, which is left out of a history."""
Script = Callable[["Client"], tuple[str, Any]]
"""Chooses the next call of a client, from what it was told so far."""


@dataclass
class Client:
    name: str
    choose: random.Random
    told: list[tuple[str, Any, Any]] = field(default_factory=list)

    def last(self, *calls: str) -> tuple[str, Any, Any] | None:
        return next((t for t in reversed(self.told) if t[0] in calls), None)


def simulate(seed: int, target: Any, script: Script, *, clients: int = 4, calls: int = 60, lost: float = 0.1
             ) -> list[Operation]:
    """The history of ``calls`` calls of an object's methods."""
    choose, names, out = random.Random(seed), itertools.count(), list[Operation]()
    pending = list[tuple[float, int, float, Client, str, Any]]()  # moment of the effect, …, moment of the call

    def call(client: Client, free_s: float) -> None:
        began_s = free_s + choose.random()
        what, argument = script(client)
        heapq.heappush(pending, (began_s + choose.random(), next(names), began_s, client, what, argument))

    for _ in range(clients):
        call(Client(f"c{next(names)}", choose), 0.0)
    for _ in range(calls):
        moment, _, began_s, client, what, argument = heapq.heappop(pending)
        is_lost, happens = choose.random() < lost, choose.random() < 0.5
        result = getattr(target, what)(client.name, argument) if happens or not is_lost else None
        if is_lost:
            out.append(Operation(client.name, "k", what, argument, began_s))
            call(Client(f"c{next(names)}", choose), moment)
            continue
        ended_s = moment + choose.random()
        if result != REFUSED:
            out.append(Operation(client.name, "k", what, argument, began_s, ended_s, result))
        client.told.append((what, argument, result))
        call(client, ended_s)
    return out + [Operation(c.name, "k", what, argument, began_s) for _, _, began_s, c, what, argument in pending]


# -- the catalog of a stream -------------------------------------------------------------------------------------------
@dataclass
class CatalogObject:
    bug: str = ""
    epoch: int = 0
    next: int = 0
    versions: dict[int, list[Any]] = field(default_factory=dict)
    pins: set[tuple[str, int]] = field(default_factory=set)
    newest: int = 0

    def raise_epoch(self, client: str, _: Any) -> int:
        self.epoch += 1
        return self.epoch

    def begin(self, client: str, epoch: int) -> int | str:
        if epoch != self.epoch:
            return catalog.FENCED
        self.next += 1
        if self.bug == "number reused" and self.next % 5 == 0:
            self.next -= 1
        self.versions[self.next] = ["staging", epoch]
        return self.next

    def seal(self, client: str, n: int) -> None:
        if self.versions[n][0] == "staging":
            self.versions[n][0] = "sealed"

    def commit(self, client: str, n: int) -> str | None:
        state, epoch = self.versions[n]
        if epoch != self.epoch and self.bug != "no fencing":
            return catalog.FENCED
        if state != "sealed" or n < self.newest:
            return REFUSED
        self.versions[n][0], self.newest = "committed", n
        return None

    def head(self, client: str, _: Any) -> int:
        return max(0, self.newest - (self.bug == "head goes back" and self.newest % 3 == 0))

    def pull(self, client: str, n: int) -> str | None:
        seen = ("committed", "sealed") if self.bug == "visible before the commit" else ("committed",)
        return None if n in self.versions and self.versions[n][0] in seen else catalog.GONE

    def pin(self, client: str, n: int) -> str | None:
        if (result := self.pull(client, n)) is None:
            self.pins.add((client, n))
        return result

    def unpin(self, client: str, n: int) -> None:
        self.pins.discard((client, n))

    def sweep(self) -> list[int]:
        """What the garbage collector would release."""
        held = set() if self.bug == "pinned version collected" else {n for _, n in self.pins}
        return [n for n, v in self.versions.items() if v[0] == "committed" and n not in held and n < self.newest]

    def release(self, client: str, n: int) -> str | None:
        if n not in self.sweep():
            return REFUSED
        self.versions[n][0] = "released"
        return None


def catalog_script(client: Client) -> tuple[str, Any]:
    epoch, begun = client.last("raise_epoch"), client.last("begin")
    pinned = client.last("pin", "unpin")
    if pinned and pinned[0] == "pin" and pinned[2] is None and client.choose.random() < 0.2:
        return "unpin", pinned[1]
    if begun and begun[2] not in (catalog.FENCED, REFUSED):
        after = client.told[client.told.index(begun) + 1:]
        if not any(what == "seal" for what, _, _ in after):
            return "seal", begun[2]
        if not any(what == "commit" for what, _, _ in after):
            return "commit", begun[2]
    if epoch is None or client.choose.random() < 0.03:
        return "raise_epoch", None
    seen = client.last("head", "begin")
    n = client.choose.randint(1, seen[2] + 1) if seen and isinstance(seen[2], int) else 1
    return client.choose.choice([("begin", epoch[2]), ("begin", epoch[2]), ("head", None), ("pull", n), ("pin", n),
                                 ("release", n)])


def sequential_catalog(seed: int, bug: str = "") -> Iterator[Operation]:
    """One call after the other, of what is possible then: collection and raised epochs are among it."""
    choose, target, at = random.Random(seed), CatalogObject(bug), 0.0

    def call(what: str, argument: Any, client: str = "a") -> Operation:
        nonlocal at
        at += 2
        return Operation(client, "k", what, argument, at, at + 1, getattr(target, what)(client, argument))

    yield call("raise_epoch", None)
    for _ in range(60):
        states = target.versions
        staged = [n for n, v in states.items() if v[0] in ("staging", "sealed")]
        what = choose.choice(["begin", "seal", "commit", "commit", "head", "pull", "pin", "unpin", "release",
                              "raise_epoch"])
        n = choose.choice(staged) if staged else 0
        if what == "begin":
            yield call(what, choose.choice([target.epoch, target.epoch, max(1, target.epoch - 1)]))
        elif n and (what == "seal" and states[n][0] == "staging"
                    or what == "commit" and states[n][0] == "sealed" and n > target.newest):
            yield call(what, n)
        elif what == "head":
            yield call(what, None)
        elif what in ("pull", "pin"):
            yield call(what, choose.randint(1, target.next + 1), choose.choice("bc"))
        elif what == "unpin" and target.pins:
            client, pinned = choose.choice(sorted(target.pins))
            yield call(what, pinned, client)
        elif what == "release" and (old := target.sweep()):
            yield call(what, old[0])
        elif what == "raise_epoch" and choose.random() < 0.3:
            yield call(what, None)


MODEL = {name: judge.model for name, judge in models.MODELS.items()}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_catalog_model_accepts_a_right_catalog(seed: int) -> None:
    assert check(MODEL["catalog"], sequential_catalog(seed)) == []
    assert check(MODEL["catalog"], simulate(seed, CatalogObject(), catalog_script, lost=0.05)) == []


@pytest.mark.parametrize("bug", ["number reused", "no fencing", "head goes back", "visible before the commit",
                                 "pinned version collected"])
def test_catalog_model_finds_a_catalog_with_a_bug(bug: str) -> None:
    assert any(check(MODEL["catalog"], sequential_catalog(seed, bug)) for seed in range(60))
    assert any(check(MODEL["catalog"], simulate(seed, CatalogObject(bug), catalog_script, calls=120))
               for seed in range(60))


def answered(client: str, what: str, argument: Any, result: Any, at: float, until: float = 0.0) -> Operation:
    return Operation(client, "k", what, argument, at, until or at + 1, result)


BEGUN = [answered("p", "raise_epoch", None, 1, 0), answered("p", "begin", 1, 1, 2), answered("p", "seal", 1, None, 4),
         answered("p", "commit", 1, None, 6)]


def test_catalog_model_lets_overlapping_calls_come_in_either_order() -> None:
    long_pull = answered("r", "pull", 1, catalog.GONE, 5, 9)
    assert check(MODEL["catalog"], [*BEGUN, long_pull]) == []
    assert check(MODEL["catalog"], [*BEGUN, answered("r", "pull", 1, catalog.GONE, 8)]) != []
    assert check(MODEL["catalog"], [*BEGUN, answered("r", "pull", 1, None, 1, 3)]) != [], "before its commit"


def test_catalog_model_knows_that_a_lost_commit_may_have_happened_or_not() -> None:
    lost = [*BEGUN[:3], Operation("p", "k", "commit", 1, 6)]
    assert check(MODEL["catalog"], [*lost, answered("r", "head", None, 0, 8)]) == []
    assert check(MODEL["catalog"], [*lost, answered("r", "head", None, 0, 8), answered("r", "pull", 1, None, 10)]) == []
    seen = [*lost, answered("r", "pull", 1, None, 8)]
    assert check(MODEL["catalog"], [*seen, answered("r", "head", None, 0, 10)]) != [], "once seen it stays"


@pytest.mark.parametrize("more", [
    [answered("p", "begin", 1, 1, 8)],
    [answered("p", "begin", 1, 3, 8)],
    [answered("q", "raise_epoch", None, 2, 8), answered("p", "begin", 1, 2, 10)],
    [answered("p", "begin", 1, 2, 8), answered("p", "commit", 2, None, 10)],
    [answered("p", "begin", 1, 2, 8), answered("p", "begin", 1, 3, 10), answered("p", "seal", 3, None, 12),
     answered("p", "seal", 2, None, 14), answered("p", "commit", 3, None, 16), answered("p", "commit", 2, None, 18)],
    [answered("p", "begin", 1, 2, 8), answered("p", "seal", 2, None, 10), answered("g", "abort", 2, None, 12),
     answered("p", "commit", 2, None, 14)],
    [answered("r", "pin", 1, None, 8), answered("g", "release", 1, None, 10)],
    [answered("g", "release", 1, None, 8), answered("g", "release", 1, None, 10)],
    [answered("g", "release", 1, None, 8), answered("r", "pull", 1, None, 10)],
    [answered("r", "head", None, 0, 8)],
    [answered("p", "begin", 1, catalog.FENCED, 8)],
], ids=["reused", "skipped", "fenced begin", "unsealed", "head back", "aborted", "pinned", "released twice",
        "read after release", "stale head", "fenced in its epoch"])
def test_catalog_model_refuses(more: list[Operation]) -> None:
    assert check(MODEL["catalog"], BEGUN) == [] and check(MODEL["catalog"], [*BEGUN, *more]) != []


def test_catalog_model_lets_an_unpinned_version_go() -> None:
    held = [*BEGUN, answered("r", "pin", 1, None, 8), answered("r", "unpin", 1, None, 10)]
    assert check(MODEL["catalog"], [*held, answered("g", "release", 1, None, 12)]) == []
    assert catalog.of_sweep(["released policy version 3", "aborted policy version 4: its publisher is gone",
                             "dropped 2 chunks, 9 bytes, of node a", "released critic version 7"], "policy") == [
        ("release", 3), ("abort", 4)]


# -- terms, assignments, operations, created things, pools -------------------------------------------------------------
@dataclass
class TermsObject:
    """Terms under leases, whose numbers are revisions."""

    bug: str = ""
    chance: random.Random = field(default_factory=lambda: random.Random(5))
    term: int = 0
    held: bool = False
    value: Any = None
    before: Any = None

    def acquire(self, client: str, _: Any) -> int:
        same = self.bug == "term twice" and self.term > 3
        self.term, self.held = self.term if same else self.term + self.chance.randint(1, 3), True
        return self.term

    def write(self, client: str, argument: list[Any]) -> str | None:
        self.held = self.held and self.chance.random() > 0.1  # its lease may have ended
        if self.bug == "fenced for a moment" and self.chance.random() < 0.2:
            return terms.FENCED
        if self.bug != "no fencing" and not (self.held and argument[0] == self.term):
            return terms.FENCED
        if self.bug != "lost update" or self.term % 3:
            self.before, self.value = self.value, argument[1]
        return None

    def read(self, client: str, _: Any) -> Any:
        return self.before if self.bug == "stale read" and self.term > 1 else self.value


def terms_script(client: Client) -> tuple[str, Any]:
    mine = client.last("acquire")
    if mine is None or client.choose.random() < 0.1:
        return "acquire", None
    return client.choose.choice([("write", [mine[2], client.choose.random()]), ("read", None)])


@dataclass
class AssignmentObject:
    bug: str = ""
    holder: str = ""
    generation: int = 0

    def put(self, client: str, argument: list[Any]) -> int | str:
        holder, known = argument
        if known != self.generation and self.bug != "put without its condition":
            return assignment.CONFLICT
        self.holder = holder
        if self.bug != "generation twice" or self.generation != 4:
            self.generation += 1
        return self.generation

    def read(self, client: str, _: Any) -> list[Any]:
        if self.bug == "resurrected" and self.generation > 5:
            return ["host-0", 1]
        return [self.holder, self.generation]


def assignment_script(client: Client) -> tuple[str, Any]:
    seen = client.last("read")
    if seen is None or client.told[-1][0] != "read":
        return "read", None
    return "put", [f"host-{client.choose.randrange(4)}", seen[2][1]]


@dataclass
class OperationObject:
    bug: str = ""
    chance: random.Random = field(default_factory=lambda: random.Random(3))
    ids: list[str] = field(default_factory=list)
    state: str = ""

    def create(self, client: str, _: Any) -> str:
        if not self.ids or self.bug == "created twice" and self.chance.random() < 0.3:
            self.ids.append(f"op-{len(self.ids)}")
            self.state = "running"
        return self.ids[-1]

    def get(self, client: str, argument: str) -> str:
        if self.state == "running" and self.chance.random() < 0.2:
            self.state = self.chance.choice(["succeeded", "failed"])
        elif self.bug == "end is not final" and self.chance.random() < 0.2:
            self.state = "running"
        elif self.bug == "deleted while it runs" and self.chance.random() < 0.2:
            return operation.ABSENT
        return self.state

    list = get

    def cancel(self, client: str, argument: str) -> str:
        self.state = "cancelled" if self.state == "running" else self.state
        return self.state


def operation_script(client: Client) -> tuple[str, Any]:
    known = client.last("create")
    if known is None or client.choose.random() < 0.3:
        return "create", None
    return client.choose.choice(["get", "get", "list", "list", "get", "cancel"]), known[2]


def test_operation_that_was_deleted_does_not_come_back() -> None:
    def read(at: float, *results: str) -> list[Operation]:
        return [Operation("c", "key", "get", "op-0", at + n, at + n + 0.5, result) for n, result in enumerate(results)]

    made = Operation("c", "key", "create", None, 0.0, 0.5, "op-0")
    model = operation.LongRunningOperation()
    assert check(model, [made, *read(1.0, "running", "succeeded", "absent", "absent")]) == []
    assert check(model, [made, *read(1.0, "running", "succeeded", "absent", "succeeded")]) != []


@dataclass
class CreatedObject:
    """A thing that one key creates."""

    bug: str = ""
    ids: list[str] = field(default_factory=list)
    deleted: bool = False

    def create(self, client: str, _: Any) -> str:
        if self.deleted and self.bug != "created again":
            return REFUSED
        if not self.ids or self.deleted or self.bug == "created twice":
            self.ids.append(f"id-{len(self.ids)}")
            self.deleted = False
        return self.ids[-1]

    def read(self, client: str, id_: str) -> bool:
        return id_ in self.ids[-1:] and not self.deleted

    def delete(self, client: str, id_: str) -> str | None:
        if not self.read(client, id_):
            return REFUSED
        self.deleted = self.bug != "delete without effect"
        return None


def created_script(client: Client) -> tuple[str, Any]:
    made = client.last(created.CREATE)
    if made is None or made[2] == REFUSED:
        return created.CREATE, None
    return client.choose.choice([(created.CREATE, None), (created.READ, made[2]), (created.READ, made[2]),
                                 (created.DELETE, made[2])])


@dataclass
class PoolObject:
    """A number with a revision that a driver writes again as it is."""

    bug: str = ""
    number: int = 3
    revision: int = 7
    before: tuple[int, int] = (3, 7)

    def read(self, client: str, _: Any) -> tuple[int, int]:
        return self.before if self.bug == "stale read" else (self.number, self.revision)

    def write(self, client: str, number: int) -> tuple[int, int]:
        self.before = (self.number, self.revision)
        self.revision += 1 + (number == self.number)  # as if a driver had taken over
        self.number = number + (self.bug == "another number" and number == 4)
        return number, self.revision


def pool_script(client: Client) -> tuple[str, Any]:
    return client.choose.choice([("read", None), ("read", None), ("write", client.choose.randrange(6))])


OBJECTS: dict[str, tuple[type, Script, list[str]]] = {
    "terms": (TermsObject, terms_script, ["term twice", "no fencing", "fenced for a moment", "lost update",
                                           "stale read"]),
    "assignment": (AssignmentObject, assignment_script, ["put without its condition", "generation twice",
                                                         "resurrected"]),
    "operation": (OperationObject, operation_script, ["created twice", "end is not final", "deleted while it runs"]),
    "created": (CreatedObject, created_script, ["created twice", "created again", "delete without effect"]),
    "pool": (PoolObject, pool_script, ["stale read", "another number"]),
}


@pytest.mark.parametrize("name", OBJECTS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_model_accepts_a_right_object(name: str, seed: int) -> None:
    kind, script, _ = OBJECTS[name]
    assert check(MODEL[name], simulate(seed, kind(), script)) == []


@pytest.mark.parametrize(("name", "bug"), [(name, bug) for name, (_, _, bugs) in OBJECTS.items() for bug in bugs])
def test_model_finds_an_object_with_a_bug(name: str, bug: str) -> None:
    kind, script, _ = OBJECTS[name]
    assert any(check(MODEL[name], simulate(seed, kind(bug), script)) for seed in range(30))


def test_every_model_is_tried() -> None:
    assert {*OBJECTS, "catalog", "number", "stream"} == {*models.MODELS}


HELD = [answered("a", "acquire", None, 5, 0), answered("a", "write", [5, "x"], None, 2)]
OVER = [*HELD, answered("b", "acquire", None, 9, 4)]


@pytest.mark.parametrize("more", [
    [*HELD, answered("b", "acquire", None, 5, 4)],
    [*HELD, answered("b", "acquire", None, 4, 4)],
    [*OVER, answered("a", "write", [5, "y"], None, 6)],
    [*OVER, answered("b", "write", [9, "y"], None, 6), answered("r", "read", None, "x", 8)],
    [*OVER, answered("r", "read", None, None, 6)],
    [*HELD, answered("a", "write", [5, "y"], terms.FENCED, 4), answered("a", "write", [5, "z"], None, 6)],
    [*OVER, Operation("a", "k", "write", [5, "y"], 6), answered("r", "read", None, "y", 8)],
    [*HELD, answered("b", "write", [9, "y"], None, 4)],
    [*HELD, answered("b", "write", [9, "y"], terms.FENCED, 4)],
], ids=["number twice", "lower number", "after the next began", "lost update", "stale read", "after it was fenced",
        "unknown write after the next began", "before it began", "fenced before it began"])
def test_terms_model_refuses(more: list[Operation]) -> None:
    assert check(MODEL["terms"], OVER) == [] and check(MODEL["terms"], more) != []


def test_terms_model_lets_a_term_end_at_any_time() -> None:
    fenced = [*HELD, answered("a", "write", [5, "y"], terms.FENCED, 4), answered("r", "read", None, "x", 6)]
    assert check(MODEL["terms"], fenced) == []
    lost = Operation("b", "k", "acquire", None, 4)
    assert check(MODEL["terms"], [*HELD, lost, answered("a", "write", [5, "y"], None, 6)]) == [], "it did not begin"
    assert check(MODEL["terms"], [*fenced, lost, answered("a", "acquire", None, 12, 8),
                                  answered("a", "write", [12, "z"], None, 10)]) == [], "it may have had number 9"


def test_terms_model_lets_a_late_write_come_before_the_next_term() -> None:
    late = answered("a", "write", [5, "y"], None, 3, 9)
    assert check(MODEL["terms"], [*OVER, late, answered("r", "read", None, "y", 10)]) == []
    seen = answered("r", "read", None, "x", 6)
    assert check(MODEL["terms"], [*OVER, late, seen, answered("r", "read", None, "y", 10)]) != [], "it came after"
