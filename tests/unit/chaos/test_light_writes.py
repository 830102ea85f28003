"""What is found in writes in the place of a driver, in assignments of hosts, and in histories of what hosts are wanted
to be."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import count
from typing import Any

import pytest

from chaos_tests.event_log import Kind
from chaos_tests.history import Operation
from chaos_tests.model.host_spec import CORDONED, USED, change_of_host, wanted_of_host
from chaos_tests.model.models import NUMBER, OPERATION
from chaos_tests.model.operation import ABSENT, Call
from chaos_tests.observation import Change
from chaos_tests.traffic.driver_writes import PREFIX, Driver
from chaos_tests.validate import assignments, fencing, histories, judge
from chaos_tests.validate.assignments import superseded
from elastic_rl.etcd.cluster_records import driver_of
from elastic_rl.etcd.keys import ClusterKeys, Keys

KEYS, JOB = ClusterKeys("chaos"), Keys("light")
A, B = "host-1", "host-2"


class Store:
    """A history of changes, one a revision."""

    def __init__(self) -> None:
        self.changes, self._revisions = list[Change](), count(1)
        self._created = dict[str, int]()

    def put(self, key: str, **record: Any) -> int:
        revision = next(self._revisions)
        created = self._created.setdefault(key, revision)
        self.changes.append(Change(revision, True, key, created, json.dumps(record)))
        return revision

    def delete(self, key: str) -> None:
        self._created.pop(key, None)
        self.changes.append(Change(next(self._revisions), False, key, 0, ""))

    def events(self) -> list[dict[str, Any]]:
        return [{"kind": Kind.RUN, "settings": {"cluster": "chaos", "job": "light"}},
                *({"kind": Kind.CHANGE, **asdict(change)} for change in self.changes)]

    def phase(self, host: str, phase: str) -> None:
        self.put(KEYS.host_state(host), phase=phase)

    def assign(self, host: str, **more: Any) -> None:
        self.put(KEYS.assignment(driver_of("light")), host=host, incarnation=f"of {host}", **more)

    def write(self, host: str, assignment: int, generation: int = 1) -> None:
        self.put(f"{JOB.root}{PREFIX}{generation}-{host}-{len(self.changes)}",
                 **asdict(Driver(generation, generation, assignment, host, 7)))


def begun() -> Store:
    store = Store()
    for host in (A, B):
        store.put(KEYS.host(host), incarnation=f"of {host}")
        store.phase(host, "ready")
    store.assign(A)
    store.write(A, 1)
    return store


def problems(store: Store) -> list[str]:
    checkers = [assignments.LightWrites, fencing.Assignments]
    found = judge.broken(store.events(), checkers)
    assert {violation.rule for violation in found} <= {"I1"} and all(
        checker in judge.CHECKERS for checker in checkers)
    return [violation.what for violation in found]


@pytest.mark.parametrize("why", ["lost", "draining", "left"])
def test_run_moves_when_its_host_is_gone(why: str) -> None:
    store = begun()
    store.phase(A, why)
    store.assign(B)
    store.write(B, 2, generation=2)
    assert problems(store) == []


def test_run_moves_when_its_host_has_booted_or_fails_it() -> None:
    store = begun()
    store.put(KEYS.host(A), incarnation="another")
    store.assign(B)
    store.assign(A, failed=[{"host": B, "at_s": 1.0}])
    assert problems(store) == []


@pytest.mark.parametrize("phase", ["ready", "suspected", "cordoned"])
def test_run_that_is_taken_from_a_living_host_is_found(phase: str) -> None:
    store = begun()
    store.phase(A, phase)
    store.assign(B)
    [problem] = problems(store)
    assert f"was taken from {A}, which is {phase}, and given to {B}" in problem


def test_run_that_is_given_to_a_host_that_is_not_fit_is_found() -> None:
    store = begun()
    store.phase(A, "lost")
    store.phase(B, "suspected")
    store.assign(B)
    [problem] = problems(store)
    assert f"was given to {B}, which is suspected" in problem


def test_write_of_a_driver_that_is_not_the_holders_is_found() -> None:
    store = begun()
    store.phase(A, "lost")
    store.assign(B)
    store.write(A, 1)
    [problem] = problems(store)
    assert f"a driver on {A} of generation 1 has written while {B} has generation 2" in problem


def test_assignment_that_is_deleted_is_found() -> None:
    store = begun()
    store.delete(KEYS.assignment(driver_of("light")))
    [problem] = problems(store)
    assert "its generations begin again" in problem


def test_driver_that_writes_after_its_successor_is_found() -> None:
    one, two = Driver(1, 1, 1, A, 7), Driver(2, 2, 2, B, 8)
    assert superseded([one, two]) == []
    assert len(superseded([one, two, one])) == 1
    store = begun()
    store.phase(A, "lost")
    store.assign(B)
    store.write(B, 2, generation=2)
    store.write(B, 2, generation=1)
    [problem] = problems(store)
    assert "wrote before" in problem


# -- what clients were told ------------------------------------------------------------------------------------------
def op(client: str, key: str, call: str, argument: Any, began: float, ended: float | None, result: Any = None, *,
       model: str = NUMBER) -> dict[str, Any]:
    return {"kind": Kind.OPERATION, **asdict(Operation(client, key, call, argument, began, ended, result, model=model))}


def test_request_with_one_key_creates_one_thing() -> None:
    def of(client: str, call: Call, argument: Any, began: float, ended: float | None, result: Any = None
           ) -> dict[str, Any]:
        return op(client, "key k", call, argument, began, ended, result, model=OPERATION)

    history = [of("a", Call.CREATE, None, 0, None), of("b", Call.CREATE, None, 1, 2, "x"),
               of("a", Call.CREATE, None, 3, 4, "x"), of("c", Call.GET, "x", 5, 6, "running")]
    assert judge.broken(history, histories.CHECKERS) == []
    for more in (of("b", Call.CREATE, None, 7, 8, "y"), of("c", Call.GET, "x", 7, 8, ABSENT)):
        assert [v.rule for v in judge.broken([*history, more], histories.CHECKERS)] == ["I10"]


def test_stale_read_of_what_is_wanted_of_a_host_is_found() -> None:
    history = [op("b", A, "read", None, 0, 0.5, [USED, 0]), op("a", A, "write", USED, 0.5, 1, [USED, 0]),
               op("a", A, "write", CORDONED, 2, 3, [CORDONED, 5]),
               op("b", A, "read", None, 4, 5, [CORDONED, 5])]
    assert judge.broken(history, histories.CHECKERS) == []
    stale = [*history, op("b", A, "read", None, 6, 7, [USED, 0])]
    assert [v.rule for v in judge.broken(stale, histories.CHECKERS)] == ["I1"]


def test_write_without_an_answer_that_the_observer_has_not_seen_never_happened() -> None:
    """Each of them could else have happened at any later time: the search has no end."""
    store = Store()
    store.put(KEYS.host_spec(A), cordoned=False)
    told = store.put(KEYS.host_spec(A), cordoned=True)
    known = [op("a", A, "write", CORDONED, 2, 3, [CORDONED, told])]
    lost = [op(f"client {n}", A, "write", USED, 1 + n / 100, None) for n in range(60)]
    history = [*known, *lost, op("b", A, "read", None, 4, 5, [USED, told + 1])]
    assert judge.broken(history, histories.CHECKERS) == [], "nobody knows what was observed"
    store.changes.pop(0)  # that one could be a write of a client
    assert [v.rule for v in judge.broken([*store.events(), *history], histories.CHECKERS)] == ["I1"]
    store.put(KEYS.host_spec(A), cordoned=False)
    assert judge.broken([*store.events(), *history], histories.CHECKERS) == []


@pytest.mark.parametrize("wanted", [USED, CORDONED])
def test_number_of_a_host_is_what_was_asked_for(wanted: int) -> None:
    assert wanted_of_host(change_of_host(wanted)) == wanted
