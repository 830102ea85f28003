"""The replay checkers: logs that keep the rule, and for each clause one that breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate import groups, judge, running, watches
from chaos_tests.validate.replay import Transaction
from chaos_tests.validate.versions import KeptVersions
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.etcd.keys import ClusterKeys, Keys

J, C = Keys("job"), ClusterKeys("default")


@dataclass
class Etcd:
    """A store that writes the log of an observer. A value of None deletes the key."""

    revision: int = 1
    created: dict[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def write(self, *changes: tuple[str, Any]) -> Etcd:
        self.revision += 1
        for key, value in changes:
            create = 0
            if value is None:
                self.created.pop(key, None)
            else:
                create = self.created.setdefault(key, self.revision)
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
            self.events.append({"kind": Kind.CHANGE, "revision": self.revision, "put": value is not None, "key": key,
                                "create": create, "value": text})
        return self

    def gap(self) -> Etcd:
        """Changes that the observer did not see."""
        self.revision += 5
        self.events.append({"kind": Kind.GAP, "first": self.revision - 4, "last": self.revision})
        return self


def broken(etcd: Etcd) -> list[str]:
    """What any checker says, each once."""
    return [f"{v.rule} {v.what}" for v in judge.broken(etcd.events)]


# -- the catalog of versions -------------------------------------------------------------------------------------------
CATALOG = {"id": "cat", "commits": 0}


def version(number: int, state: str = "staging", **more: Any) -> dict[str, Any]:
    done = {"manifest": "m", "committed_at": 2.0} if state in ("committed", "gone") else {}
    return {"stream": "policy", "number": number, "state": state, "epoch": 1, "created_at": 1.0, "meta": {"seed": 1},
            **done, **more}


def begin(number: int, **more: Any) -> list[tuple[str, Any]]:
    return [(J.stream_next("policy"), str(number)), (J.version("policy", number), version(number, **more)),
            (J.staging_owner("policy", number), "p")]


def commit(number: int, commits: int, **more: Any) -> list[tuple[str, Any]]:
    record = version(number, "committed", **more)
    return [(J.dcs_catalog(), {**CATALOG, "commits": commits}), (J.version("policy", number), record),
            (J.stream_head("policy"), record), (J.staging_owner("policy", number), None),
            (J.replica_sets("policy", number), {"parts": [["a"]]})]


def release(number: int) -> list[tuple[str, Any]]:
    return [(J.version("policy", number), version(number, "gone")), (J.replica_sets("policy", number), None)]


def without(changes: Iterable[tuple[str, Any]], key: str) -> list[tuple[str, Any]]:
    return [(k, v) for k, v in changes if k != key]


def catalog(commits: int = 1) -> Etcd:
    """An epoch, a node and committed versions."""
    etcd = Etcd().write((J.epoch(), {"number": 1})).write((J.dcs_node("a"), {"id": "a"})).write(
        (J.dcs_catalog(), CATALOG))
    for number in range(1, commits + 1):
        etcd.write(*begin(number)).write(*commit(number, number))
    return etcd


PIN = J.pin("policy", 1, "r")


def test_catalog_that_keeps_its_rules() -> None:
    etcd = catalog(2).write((PIN, {})).write((PIN, None)).write(*release(1)).write((J.version("policy", 1), None))
    etcd.write(*begin(3)).write((J.version("policy", 3), version(3, "aborted")), (J.staging_owner("policy", 3), None))
    moved = version(2, "committed", sources=["b"])
    etcd.write((J.version("policy", 2), moved), (J.stream_head("policy"), moved))
    etcd.write((J.epoch(), {"number": 2})).write(*begin(4, epoch=2)).write(*commit(4, 3, epoch=2))
    assert broken(etcd) == []


def test_what_came_before_the_observation_or_in_a_gap_is_no_violation() -> None:
    late = catalog(2).write((PIN, {})).write(*release(2)[:0], *begin(3)).write(*commit(3, 3))
    for first in range(len(late.events)):
        part = Etcd(events=late.events[first:])
        assert [b for b in broken(part) if "begins" in b or "went" in b] == [], first
    etcd = catalog(2).gap()
    etcd.write((J.dcs_catalog(), {**CATALOG, "commits": 9}), (J.stream_head("policy"), version(7, "committed")))
    assert broken(etcd) == []
    assert any("is 2 after 2" in b for b in broken(catalog(2).gap().write(*begin(2)))), "numbers grow over a gap"


def test_recovery_of_a_suspended_catalog_is_not_judged() -> None:
    etcd = catalog(2).write((J.dcs_catalog(), {**CATALOG, "commits": 2, "suspended": "restored"}))
    etcd.write((J.version("policy", 1), version(1, "committed")), (J.stream_next("policy"), "102"))
    etcd.write((J.version("policy", 50), version(50, "committed")), (J.stream_head("policy"), version(1, "committed")))
    assert broken(etcd) == []


CATALOG_BREAKS: dict[str, tuple[str, Callable[[], Etcd]]] = {
    "begins committed": ("I3", lambda: catalog().write((J.version("policy", 2), version(2, "committed")),
                                                        (J.stream_next("policy"), "2"))),
    "staging released": ("I3", lambda: catalog().write(*begin(2)).write((J.version("policy", 2), version(2, "gone")))),
    "aborted committed": ("I3", lambda: catalog().write(*begin(2)).write(
        (J.version("policy", 2), version(2, "aborted"))).write(*commit(2, 2))),
    "gone resurrected": ("I3", lambda: catalog(2).write(*release(1)).write(
        (J.version("policy", 1), version(1, "committed")))),
    "record deleted": ("I3", lambda: catalog(2).write((J.version("policy", 1), None))),
    "meta changed": ("I3", lambda: catalog().write(*begin(2)).write(*commit(2, 2, meta={"seed": 2}))),
    "manifest changed": ("I3", lambda: catalog(2).write(
        (J.version("policy", 1), version(1, "committed", manifest="other")))),
    "number reused": ("I3", lambda: catalog().write((J.stream_next("policy"), "1"),
                                                     (J.version("policy", 1), version(1)))),
    "number without version": ("I3", lambda: catalog().write((J.stream_next("policy"), "2"))),
    "version without number": ("I3", lambda: catalog().write((J.version("policy", 2), version(2)))),
    "counter deleted": ("I3", lambda: catalog().write((J.stream_next("policy"), None))),
    "head back": ("I3", lambda: catalog(2).write((J.stream_head("policy"), version(1, "committed")))),
    "head deleted": ("I3", lambda: catalog().write((J.stream_head("policy"), None))),
    "head released": ("I3", lambda: catalog().write(*release(1))),
    "head of staging": ("I2", lambda: catalog().write(*begin(2)).write((J.stream_head("policy"), version(2)))),
    "head differs": ("I2", lambda: catalog().write(
        (J.stream_head("policy"), version(1, "committed", sources=["b"])))),
    "no manifest": ("I2", lambda: catalog().write(*begin(2)).write(*commit(2, 2, manifest=""))),
    "no head": ("I2", lambda: catalog().write(*begin(2)).write(*without(commit(2, 2), J.stream_head("policy")))),
    "publisher gone": ("I2", lambda: catalog().write(*begin(2)).write((J.staging_owner("policy", 2), None)).write(
        *commit(2, 2))),
    "no replica sets": ("I2", lambda: catalog().write(*begin(2)).write(
        *without(commit(2, 2), J.replica_sets("policy", 2)))),
    "part not stored": ("I2", lambda: catalog().write(*begin(2)).write(
        *commit(2, 2)[:-1], (J.replica_sets("policy", 2), {"parts": [["a"], []]}))),
    "node gone": ("I2", lambda: catalog().write(*begin(2)).write((J.dcs_node("a"), None)).write(*commit(2, 2))),
    "commit not counted": ("I2", lambda: catalog().write(*begin(2)).write(*without(commit(2, 2), J.dcs_catalog()))),
    "commit counted twice": ("I2", lambda: catalog().write(*begin(2)).write(*commit(2, 3))),
    "commits fewer": ("I3", lambda: catalog().write((J.dcs_catalog(), CATALOG))),
    "another catalog": ("I3", lambda: catalog().write((J.dcs_catalog(), {"id": "other", "commits": 1}))),
    "begun in an old epoch": ("I1", lambda: catalog().write((J.epoch(), {"number": 2})).write(*begin(2))),
    "committed in an old epoch": ("I1", lambda: catalog().write(*begin(2)).write((J.epoch(), {"number": 2})).write(
        *commit(2, 2))),
    "pinned released": ("I3", lambda: catalog(2).write((PIN, {})).write(*release(1))),
    "released pinned": ("I3", lambda: catalog(2).write(*release(1)).write((PIN, {}))),
    "staging pinned": ("I3", lambda: catalog().write(*begin(2)).write((J.pin("policy", 2, "r"), {}))),
}


@pytest.mark.parametrize("name", CATALOG_BREAKS)
def test_catalog_that_breaks_a_rule(name: str) -> None:
    rule, make = CATALOG_BREAKS[name]
    assert any(found.startswith(f"{rule} ") for found in broken(make())), broken(make())


def test_job_that_is_deleted_breaks_nothing() -> None:
    etcd = catalog(2)
    etcd.write(*((key, None) for key in list(etcd.created)))
    assert broken(etcd) == []


# -- fencing tokens ----------------------------------------------------------------------------------------------------
ASSIGNED, RUN = C.assignment("driver/job"), C.run_status("job")
FORMATION, RESTART = J.formation("trainer"), J.restart("trainer")


def request(generation: int, observed: int = 0) -> dict[str, Any]:
    return {"target": "trainer", "generation": generation, "observed_generation": observed}


def tokens() -> Etcd:
    etcd = Etcd().write((J.epoch(), {"number": 1})).write((J.driver(), {"number": 1})).write(
        (J.actor_term(), {"number": 1})).write((J.driver(), {"number": 2}))
    etcd.write((FORMATION, {"epoch": 1})).write((RESTART, request(1))).write((RESTART, request(1, 1)))
    etcd.write((ASSIGNED, {"host": "a"})).write((RUN, {"generation": 1})).write((ASSIGNED, {"host": "b"}))
    return etcd.write((RUN, {"generation": 2})).write((RESTART, request(2, 1)))


def test_tokens_that_keep_their_rules() -> None:
    assert broken(tokens()) == []
    assert broken(tokens().gap().write((J.driver(), {"number": 7})).write((RUN, {"generation": 9}))) == []


@pytest.mark.parametrize("change", [
    [(J.driver(), {"number": 2})], [(J.driver(), {"number": 4})], [(J.actor_term(), {"number": 0})],
    [(FORMATION, {"epoch": 2})], [(FORMATION, None)], [(RESTART, request(2, 3))], [(RESTART, request(4, 1))],
    [(RESTART, request(1, 1))], [(RESTART, request(2, 0))], [(ASSIGNED, None)], [(RUN, {"generation": 1})],
    [(RUN, {"generation": 3})],
], ids=["twice", "skipped", "back", "formation of another epoch", "formation deleted", "not requested",
        "requests skipped", "request back", "open again", "assignment deleted", "stale holder", "later holder"])
def test_token_that_breaks_i1(change: list[tuple[str, Any]]) -> None:
    found = broken(tokens().write(*change))
    assert len(found) == 1 and found[0].startswith("I1 "), found


def test_token_that_was_lower_after_a_gap_breaks_i1() -> None:
    assert len(broken(tokens().gap().write((J.driver(), {"number": 2})))) == 1
    assert len(broken(Etcd().write((J.epoch(), {"number": 3})))) == 1


# -- engines, operations, jobs, alerts ---------------------------------------------------------------------------------
ENGINE = J.engine("e")


def engine(state: str, version: int = 0, applying: int = 0, incarnation: str = "i", epoch: int = 1) -> dict[str, Any]:
    return {"id": "e", "pool": "rollout", "state": state, "version": version, "applying": applying, "epoch": epoch,
            "incarnation": incarnation}


def engines() -> Etcd:
    etcd = catalog(3).write((J.pool_spec("rollout"), {"name": "rollout", "desired": 1, "stream": "policy"}))
    for record in (engine("starting"), engine("syncing"), engine("syncing", 0, 1), engine("syncing", 1),
                   engine("ready", 1), engine("ready", 1, 2), engine("ready", 2)):
        etcd.write((ENGINE, record))
    return etcd


def test_engine_that_keeps_its_rules() -> None:
    etcd = engines().write((ENGINE, engine("syncing", 2))).write((ENGINE, engine("released"))).write(
        (ENGINE, engine("syncing"))).write((ENGINE, engine("syncing", 0, 3))).write((ENGINE, engine("syncing", 3)))
    etcd.write((ENGINE, engine("ready", 3))).write((ENGINE, engine("draining", 3))).write((ENGINE, None))
    assert broken(etcd.write((ENGINE, engine("starting", incarnation="k")))) == []
    assert broken(engines().gap().write((ENGINE, engine("dead", 2)))) == []


@pytest.mark.parametrize("records", [
    [engine("starting")], [engine("released")], [engine("draining", 2), engine("ready", 2)],
    [engine("dead"), engine("syncing")], [engine("quarantined", 2), engine("ready", 2)],
    [engine("ready", 2, incarnation="k")], [engine("syncing", 2), engine("ready", 2, 3)],
    [engine("starting", incarnation="k"), engine("syncing", incarnation="k"), engine("ready", incarnation="k")],
    [engine("ready", 1)], [engine("ready", 4)], [engine("syncing", 2), engine("ready", 2, epoch=0)],
], ids=["restarted", "released while ready", "drained to ready", "dead to syncing", "quarantined to ready",
        "begins ready", "ready while applying", "ready without a version", "rolled back", "uncommitted version",
        "epoch that is over"])
def test_engine_that_breaks_a_rule(records: list[dict[str, Any]]) -> None:
    etcd = engines()
    for record in records:
        etcd.write((ENGINE, record))
    assert broken(etcd)


def one(key: str, *records: Any) -> Etcd:
    etcd = Etcd()
    for value in records:
        etcd.write((key, value))
    return etcd


OPERATION, IDEMPOTENCY = J.operation("op-1"), J.idempotency("d")


def op(state: str) -> dict[str, Any]:
    return {"id": "op-1", "state": state}


@pytest.mark.parametrize(("keeps", "etcd"), [
    (True, one(OPERATION, op("running"), op("running"), op("succeeded"), op("succeeded"), None)),
    (False, one(OPERATION, op("running"), op("succeeded"), op("running"))),
    (False, one(OPERATION, op("running"), op("failed"), op("cancelled"))),
    (False, one(OPERATION, op("succeeded"))),
    (False, one(OPERATION, op("running"), None)),
    (True, one(IDEMPOTENCY, {"location": "a"}, None, {"location": "b"})),
    (False, one(IDEMPOTENCY, {"location": "a"}, {"location": "b"})),
])
def test_operations_end_once_and_answers_stay(keeps: bool, etcd: Etcd) -> None:
    assert (broken(etcd) == []) == keeps


def job(phase: str, submission: int = 1) -> dict[str, Any]:
    return {"phase": phase, "submission": submission}


@pytest.mark.parametrize(("keeps", "records"), [
    (True, [job("queued"), job("starting"), job("running"), job("finished"), job("queued", 2), job("stopped", 2)]),
    (True, [job("queued"), job("queued", 2)]),
    (False, [job("running")]),
    (False, [job("queued"), job("running")]),
    (False, [job("queued"), job("starting"), job("running"), job("queued")]),
    (False, [job("queued"), job("stopped"), job("starting")]),
    (False, [job("queued"), job("starting"), job("queued", 2)]),
    (False, [job("queued", 2), job("queued", 1)]),
])
def test_job_goes_through_its_phases(keeps: bool, records: list[dict[str, Any]]) -> None:
    assert (broken(one(C.job_state("job"), *records)) == []) == keeps


def alert(name: str, phase: str, revision: int = 0, notified: tuple[str, ...] = ()) -> tuple[str, Any]:
    return (J.alert(f"engine.dead/e/{name}"), {"id": name, "kind": "engine.dead", "subject": "e", "phase": phase,
                                               "revision": revision, "notified": [*notified]})


def dropped(name: str) -> tuple[str, Any]:
    return (J.alert(f"engine.dead/e/{name}"), None)


@pytest.mark.parametrize(("keeps", "changes"), [
    (True, [alert("a", "pending"), alert("a", "firing", notified=("firing:x",)),
            alert("a", "resolved", notified=("firing:x", "resolved:x")), dropped("a"), alert("b", "firing", 9)]),
    (True, [alert("a", "pending"), dropped("a"), alert("b", "firing"), alert("b", "resolved"), alert("c", "firing")]),
    (False, [alert("a", "firing"), alert("a", "resolved"), alert("a", "firing")]),
    (False, [alert("a", "firing"), alert("a", "resolved"), dropped("a"), alert("a", "firing")]),
    (False, [alert("a", "firing"), alert("b", "firing")]),
    (False, [alert("a", "firing", 9), alert("a", "resolved", 9), alert("b", "firing", 9)]),
    (False, [alert("a", "firing", notified=("firing:x",)), alert("a", "firing")]),
    (False, [alert("a", "firing"), alert("a", "pending")]),
], ids=["fires and resolves", "pending", "fires again", "id again", "two open", "report twice", "forgets a notice",
        "back to pending"])
def test_alert_fires_once_and_is_resolved_once(keeps: bool, changes: list[tuple[str, Any]]) -> None:
    etcd = Etcd()
    for change in changes:
        etcd.write(change)
    assert (broken(etcd) == []) == keeps


def test_alert_that_ended_in_a_gap_may_fire_again() -> None:
    assert broken(Etcd().write(alert("a", "firing")).gap().write(alert("b", "firing"))) == []


# -- prompt groups -----------------------------------------------------------------------------------------------------
def lease(producer: str, *spans: list[int], term: int = 1, epoch: int = 1) -> tuple[str, Any]:
    return (J.group_lease(producer), {"producer": producer, "epoch": epoch, "term": term, "groups": [*spans]})


def leased() -> Etcd:
    return Etcd().write((J.epoch(), {"number": 1})).write((J.actor_term(), {"number": 1})).write(
        lease("a", [0, 4], [6, 8])).write(lease("b", [4, 6]))


def test_leases_that_keep_i5() -> None:
    assert broken(leased()) == []
    assert broken(leased().write((J.actor_term(), {"number": 2})).write(lease("b", [0, 8], term=2))) == []


@pytest.mark.parametrize("change", [
    lease("b", [3, 5]), lease("a", [0, 3], [2, 4]), lease("b", [9, 10], term=2), lease("b", [9, 10], epoch=2)],
    ids=["two producers", "named twice", "another term", "another epoch"])
def test_lease_that_breaks_i5(change: tuple[str, Any]) -> None:
    found = broken(leased().write(change))
    assert len(found) == 1 and found[0].startswith("I5 ")


def trained(*states: tuple[int, list[list[int]]]) -> Etcd:
    etcd = Etcd()
    for number, (step, spans) in enumerate(states, 1):
        meta = {"phase": "rl", "step": step, "consumed": {"groups": spans}}
        etcd.write((J.version("trainer_state", number), {"state": "committed", "number": number, "meta": meta}))
    return etcd


def test_consumed_groups_stay_consumed() -> None:
    def found(etcd: Etcd) -> list[str]:
        return [str(v) for v in judge.broken(etcd.events, [groups.Consumed])]

    assert found(trained((1, [[0, 4]]), (2, [[0, 4], [5, 8]]), (3, [[0, 8]]))) == []
    assert len(found(trained((1, [[0, 4]]), (2, [[0, 3], [5, 8]])))) == 1
    assert len(found(trained((2, [[0, 4]]), (1, [[0, 8]])))) == 1


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=5).map(
    lambda drawn: IntervalSet.from_values([n for start, size in drawn for n in range(start, start + size)]))


@given(spans, spans)
def test_sets_of_groups_are_compared_as_sets(some: IntervalSet, others: IntervalSet) -> None:
    def ordinals(found: Iterable[Iterable[int]]) -> set[int]:
        return {n for start, stop in found for n in range(start, stop)}

    a, b = some.to_json(), others.to_json()
    assert ordinals(groups.missing(a, b)) == ordinals(a) - ordinals(b)
    assert ordinals(groups.overlap(a, b)) == ordinals(a) & ordinals(b) and not groups.overlap(a, a, same=True)


# -- watches -----------------------------------------------------------------------------------------------------------
def watched(*revisions: int, listed: int = 0, client: str = "c") -> list[Event]:
    first = [{"kind": Kind.WATCH, "client": client, "prefix": J.root, "revision": listed, "listed": True}]
    return [*first, *({"kind": Kind.WATCH, "client": client, "prefix": J.root, "revision": r, "put": True,
                       "key": f"{J.root}k{r}"} for r in revisions)]


def changes(*revisions: int) -> list[Event]:
    return [{"kind": Kind.CHANGE, "revision": r, "put": True, "key": f"{J.root}k{r}", "create": r, "value": ""}
            for r in revisions]


@pytest.mark.parametrize(("keeps", "events"), [
    (True, [*changes(2, 3, 4, 5), *watched(3, 4, listed=2)]),
    (True, [*changes(2, 3, 4, 5, 6), *watched(2, 3), *watched(6, listed=5)]),
    (True, [*changes(2, 3, 4), *watched(2, 3), *watched(3, 4, listed=2, client="d")]),
    (True, [*changes(2), {"kind": Kind.GAP, "first": 3, "last": 4}, *changes(5), *watched(2, 3, 4, 5)]),
    (False, [*changes(2, 3, 4), *watched(2, 4)]),
    (False, [*changes(2, 3, 4), *watched(2, 3, 3, 4)]),
    (False, [*changes(2, 3, 4), *watched(3, 2, 4)]),
    (False, [*changes(2, 3, 4), *watched(2, 3, 4, 5)]),
    (False, [*changes(2, 3, 4), *watched(2, 3, 4), *watched(3, 4, listed=2)]),
    (False, [*changes(3, 2)]),
    (False, [*changes(2, 2)]),
    (False, [*changes(5), {"kind": Kind.GAP, "first": 4, "last": 6}]),
], ids=["whole", "read again", "two", "gap", "lost", "twice", "order", "invented", "read back", "observer back",
        "observer twice", "gap over what was seen"])
@pytest.mark.parametrize("at_once", [1, 2, 20_000])
def test_watch_delivers_each_change_once_in_order(keeps: bool, events: list[Event], at_once: int,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_AT_ONCE", at_once)
    found = [str(v) for v in judge.broken(events, watches.CHECKERS)]
    assert (found == []) == keeps, found


@pytest.mark.parametrize(("last", "keeps"), [(3, True), (4, False)])
def test_watch_may_end_amid_a_transaction_after_the_last_change_of_the_run(last: int, keeps: bool) -> None:
    both = [{**changes(4)[0], "key": f"{J.root}k4{part}"} for part in ("a", "b")]
    half = {"kind": Kind.WATCH, "client": "c", "prefix": J.root, "revision": 4, "put": True, "key": f"{J.root}k4a"}
    log = [*changes(2, 3), *both, *watched(2, 3), half, {"kind": Kind.END, "revision": last}]
    assert ([*judge.broken(log, watches.CHECKERS)] == []) == keeps


@pytest.mark.parametrize(("keeps", "events"), [
    (True, [*watched(2, 3, 4, 5)]), (True, [*watched(2, 3), *watched(listed=5)]), (False, [*watched(2, 3)]),
    (False, [*watched(2), *watched(listed=4)]), (False, [*watched(2, 3, 4, 5), *watched(2, client="d")])],
    ids=["to the end", "read at the end", "silent", "silent after it has read again", "one of two"])
def test_watch_that_is_silent_before_the_end_of_the_run_breaks_i1(keeps: bool, events: list[Event]) -> None:
    def found(end: dict[str, Any]) -> list[str]:
        return [v.what for v in judge.broken([*changes(2, 3, 4, 5, 6), *events, {"kind": Kind.END, **end}],
                                             [watches.Watches])]

    assert (found({"revision": 5}) == []) == keeps
    assert found({"revision": None}) == [], "nothing is known of the end"


class _JudgesAll(KeptVersions):
    """Judges all versions whenever a node, a head or replica sets change."""

    def transaction(self, found: Transaction) -> None:
        for scope, versions in self._held.items():
            self._due[scope] |= versions.keys()
        super().transaction(found)


_NODES_OF_PARTS = st.sampled_from("abc")
_NUMBERS = st.integers(1, 3)
moves = st.one_of(
    st.tuples(st.just("node"), _NODES_OF_PARTS, st.sampled_from([{}, {"used": 1}, {"lost_chunks": 2}, None])),
    st.tuples(st.just("sets"), _NUMBERS, st.lists(st.lists(_NODES_OF_PARTS, max_size=2, unique=True), max_size=3)),
    st.tuples(st.just("state"), _NUMBERS, st.sampled_from(["committed", "committed", "gone"])),
    st.tuples(st.just("head"), _NUMBERS, st.none()), st.tuples(st.just("suspended"), st.booleans(), st.none()),
    st.tuples(st.just("phase"), st.sampled_from(["running", "stopped"]), st.none()),
    st.tuples(st.just("gap"), st.none(), st.none()))


def log_of(found: Iterable[tuple[str, Any, Any]]) -> list[Event]:
    """Each move in a transaction of its own, ten minutes after the one before. The first ones are of two versions."""
    etcd = Etcd()
    for number in (1, 2):
        etcd.write((J.version("policy", number), version(number, "committed")),
                   (J.replica_sets("policy", number), {"parts": [["a", "b"], ["b", "c"]]}))
    for what, of, value in found:
        match what:
            case "node":
                etcd.write((J.dcs_node(of), value if value is None else {"id": of, **value}))
            case "sets":
                etcd.write((J.replica_sets("policy", of), {"parts": value}))
            case "state":
                etcd.write((J.version("policy", of), version(of, value)))
            case "head":
                etcd.write((J.stream_head("policy"), version(of, "committed")))
            case "suspended":
                etcd.write((J.dcs_catalog(), {**CATALOG, "suspended": of}))
            case "phase":
                etcd.write((J.job_status(), {"phase": of}))
            case _:
                etcd.gap()
    return [{**event, "at": 600.0 * event.get("revision", 0)} for event in etcd.events]


@given(st.lists(moves, max_size=40))
def test_versions_that_are_judged_when_they_are_concerned_are_judged_as_if_all_were(
        found: list[tuple[str, Any, Any]]) -> None:
    concerned, everything = ([str(v) for v in judge.broken(log_of(found), [checker])]
                             for checker in (KeptVersions, _JudgesAll))
    assert concerned == everything


def test_status_of_a_node_that_says_the_same_judges_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    judged, judging = list[int](), KeptVersions._judge
    monkeypatch.setattr(KeptVersions, "_judge", lambda self, scope, held, *, said: (
        judged.append(held.number), judging(self, scope, held, said=said)))
    judge.broken(log_of([("node", "a", {}), *[("node", "a", {"used": n}) for n in range(50)]]), [KeptVersions])
    assert judged == [1, 2], "as their replica sets were written"
    judge.broken(log_of([("sets", 1, [["c"]]), ("node", "a", {}), ("node", "a", None)]), [KeptVersions])
    assert judged[2:] == [1, 2, 1, 2], "of the two versions one is on the node that has gone"


@pytest.mark.parametrize(("key", "kept"), [
    (J.replica_sets("policy", 2), True), (J.dcs_catalog(), True), (J.stream_head("policy"), True),
    (J.replica_sets("policy", 1), False), (PIN, False)])
def test_what_a_job_that_has_ended_is_resumed_from_is_not_deleted(key: str, kept: bool) -> None:
    etcd = catalog(2).write((PIN, {})).write((J.job_status(), {"phase": "stopped"})).write((key, None))
    found = judge.broken(etcd.events, [*judge.OF_STORE, running.KeptAfterStop])
    assert [violation.rule for violation in found] == (["I15"] if kept else [])


def test_every_checker_says_what_it_proves_and_counts_what_it_judged() -> None:
    assert len({*judge.CHECKERS}) == len(judge.CHECKERS)
    assert all(check.__doc__ and check.judges for check in judge.OF_STORE)
