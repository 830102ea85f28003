"""What the checks of a run on test hosts find in logs that one thing is wrong with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from typing import Any

import pytest

from chaos_tests.event_log import Kind
from chaos_tests.history import Operation
from chaos_tests.model.linearizability import check as linearizable
from chaos_tests.model.models import MODELS, OPERATION
from chaos_tests.model.operation import ABSENT, Call
from chaos_tests.observation import Change
from chaos_tests.traffic.cluster_changes import CORDONED, DRAINED, USED, violations, wanted_of_host
from chaos_tests.traffic.driver_writes import PREFIX, Driver
from chaos_tests.validate import assignments, hosts
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

    def phase(self, host: str, phase: str) -> None:
        self.put(KEYS.host_state(host), phase=phase)

    def assign(self, host: str, **more: Any) -> None:
        self.put(KEYS.assignment(driver_of("light")), host=host, incarnation=f"of {host}", **more)

    def write(self, host: str, assignment: int, generation: int = 1) -> None:
        self.put(f"{PREFIX}light/{generation}-{host}-{len(self.changes)}",
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
    return assignments.check(store.changes, KEYS)


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


# -- what clients were told ------------------------------------------------------------------------------------------
def op(client: str, key: str, call: str, argument: Any, began: float, ended: float | None, result: Any = None
       ) -> Operation:
    return Operation(client, key, call, argument, began, ended, result)


def test_request_with_one_key_creates_one_thing() -> None:
    history = [op("a", "key k", Call.CREATE, None, 0, None), op("b", "key k", Call.CREATE, None, 1, 2, "x"),
               op("a", "key k", Call.CREATE, None, 3, 4, "x"), op("c", "key k", Call.GET, "x", 5, 6, "running")]
    assert violations(history, {}) == []
    twice = [*history, op("b", "key k", Call.CREATE, None, 7, 8, "y")]
    assert len(violations(twice, {})) == 1
    gone = [*history, op("c", "key k", Call.GET, "x", 7, 8, ABSENT)]
    assert len(linearizable(MODELS[OPERATION].model, gone)) == 1


def test_stale_read_of_what_is_wanted_of_a_host_is_found() -> None:
    observed = {A: {0: USED, 5: CORDONED}}
    history = [op("a", A, "write", CORDONED, 0, 1, [CORDONED, 5]), op("b", A, "read", None, 2, 3, [CORDONED, 5])]
    assert violations(history, observed) == []
    assert len(violations([*history, op("b", A, "read", None, 4, 5, [USED, 0])], observed)) == 1


def test_each_drain_of_a_host_is_another_number() -> None:
    assert wanted_of_host({"cordoned": False, "drain": None}) == USED
    assert wanted_of_host({"cordoned": True, "drain": None}) == CORDONED
    assert wanted_of_host({"cordoned": False, "drain": {"within_s": 0.003}}) == DRAINED + 3


# -- the whole log ----------------------------------------------------------------------------------------------------
def log(**broken: Any) -> Iterator[dict[str, Any]]:
    """A run that kept every rule, but for what is broken."""
    yield {"kind": Kind.RUN, "schedule": {"strikes": [{"step": 1, "faults": ["host_cut"]}]}}
    yield {"kind": Kind.FAULT, "name": "host_cut", "target": A, "witness": "seen", "problem": "", "injected_at": 1.0,
           "detected_at": 2.0, "healed_at": 3.0} | broken.get("fault", {})
    store = begun()
    first = store.put(JOB.pool_spec("rollout"), desired=2)
    for change in [*store.changes, *broken.get("changes", [])]:
        yield {"kind": Kind.CHANGE, **asdict(change)}
    result = broken.get("result", [2, first])
    for n in range(broken.get("answers", 30)):
        yield {"kind": Kind.OPERATION, **asdict(op("a", "rollout", "read", None, n, n + 0.5, result))}
    for what in broken.get("left", []):
        yield {"kind": Kind.LEFTOVER, "what": what}
    yield {"kind": Kind.END, "aborted": broken.get("aborted", "")}


def found(**broken: Any) -> list[tuple[str, str]]:
    return [(v.rule, v.what) for v in hosts.check(log(**broken), cluster="chaos")]


def test_run_that_kept_every_rule_has_no_violation() -> None:
    assert found() == []


@pytest.mark.parametrize(("rule", "words", "broken"), [
    ("run", "1 of 1 did not happen: no host", {"fault": {"witness": "", "problem": "no host"}}),
    ("I10", "host_cut", {"fault": {"healed_at": None}}),
    ("run", "fewer than", {"answers": 3}),
    ("run", "aborted: by hand", {"aborted": "by hand"}),
    ("I1", "no order", {"result": [7, 6]}),
    ("I8", "a bridge is left", {"left": ["a bridge"]}),
    ("I1", "the pool changed without its event", {"changes": [Change(
        9, True, JOB.pool_spec("rollout"), 6, '{"desired": 3}')]}),
])
def test_run_that_broke_a_rule_is_found(rule: str, words: str, broken: dict[str, Any]) -> None:
    [(its_rule, what)] = found(**broken)
    assert its_rule == rule and words in what


def test_run_without_writes_of_its_driver_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    of_log: Callable[..., Iterator[dict[str, Any]]] = log
    without = [r for r in of_log() if not str(r.get("key", "")).startswith(PREFIX)]
    assert [v.what for v in hosts.check(without, cluster="chaos")] == ["the run has written nothing"]
