"""What a pool says of itself is compared with the records of its engines, and what samples say with what engines had
while they were ready."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.chaos_log import KEYS, Log, Record, of_kind

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate import judge
from chaos_tests.validate.running import PoolSizes, Presence
from chaos_tests.validate.verdict import Checker
from chaos_tests.validate.weights import VersionsOfSamples


class NeverReady(Log):
    """The engine stays syncing in all of the run, and its pool says that it is ready."""

    def engine(self, state: str, version: int, *, applying: int = 0) -> None:
        super().engine("syncing", version, applying=applying)


class Away(Log):
    """The engine is not ready for some seconds after the second step, of which its pool says nothing."""

    def __init__(self, seconds: float, *, back: bool = True) -> None:
        self._seconds, self._back = seconds, back
        super().__init__(faults=False)

    def step(self, step: int, seconds: float) -> Record:
        if step == 3:
            self.engine("dead", self._number)
            self.at += self._seconds
            if self._back:
                self.engine("syncing", self._number)
                self.engine("ready", self._number)
        return super().step(step, seconds)


def said(records: list[Event], checker: type[Checker]) -> list[str]:
    return [violation.what for violation in judge.broken(records, [checker])]


def test_engine_that_syncs_all_run_and_made_the_samples_breaks_two_rules() -> None:
    log = NeverReady(step_s=10.0)
    [size] = said(log.records, PoolSizes)
    assert "0 of 1 engines by their own records, and 1 by the record of the pool" in size
    assert said(log.records, VersionsOfSamples)[0] == (
        "step 1 has samples of version 1, which no engine had that was ready")
    rules = {violation.rule for verdict in judge.judge(log.records) for violation in verdict.violations}
    assert {"I4", "I6"} <= rules
    short = NeverReady()
    assert said(short.records, VersionsOfSamples), "of however few seconds the run is"


def test_pool_whose_engines_are_what_it_says_is_sound() -> None:
    assert said(Log(step_s=10.0).records, PoolSizes) == said(Log(step_s=10.0).records, VersionsOfSamples) == []


@pytest.mark.parametrize(("seconds", "sound"), [(5.0, True), (150.0, True), (700.0, False)])
def test_pool_may_say_a_while_later_what_its_engines_are(seconds: float, sound: bool) -> None:
    assert (said(Away(seconds).records, PoolSizes) == []) == sound
    log = Away(seconds)
    log.records = [record for record in log.records if not str(record.get("key", "")).startswith(KEYS.engines_prefix())]
    assert said(log.records, PoolSizes) == [], "what stands in the place of a job has no engines"


def test_engines_that_were_not_seen_are_not_counted() -> None:
    """In a log that begins within a run, and after a gap, the records of the others are there all the same."""
    log = Away(700.0)
    later = [{**record, "revision": record["revision"] + 1000} if record["kind"] == Kind.CHANGE else record
             for record in log.records]
    assert said(later, PoolSizes) == []
    gap: dict[str, Any] = {"kind": Kind.GAP.value, "at": log.at, "first": 3, "last": 4}
    assert said([*log.records[:8], gap, *log.records[8:]], PoolSizes) == []


def test_engine_of_others_is_none_of_the_pool() -> None:
    log = Away(700.0)
    for record in log.records:
        if record.get("key") == KEYS.engine("rollout-1"):
            record["value"] = json.dumps({**json.loads(record["value"]), "external": True, "state": "ready"})
    assert len(said(log.records, PoolSizes)) == 1


def test_released_engines_are_there() -> None:
    log = Away(700.0)
    for record in log.records:
        if record.get("key") == KEYS.engine("rollout-1"):
            record["value"] = record["value"].replace('"dead"', '"released"')
    assert said(log.records, PoolSizes) == []


def test_run_waits_for_the_engines_themselves() -> None:
    """The first change that it sees is of no pool, and tells that it sees the cluster from its start."""
    log, presence = Away(5.0, back=False), Presence()
    changes = [record for record in of_kind(log.records, Kind.CHANGE)]
    dead = next(n for n, change in enumerate(changes) if '"dead"' in change["value"])
    late = {change["revision"]: max(1, change["revision"]) + (200 if n else 0) for n, change in enumerate(changes)}
    for change in changes[:dead + 1]:
        moved = late[change["revision"]]
        presence.see({**change, "revision": moved, "create": moved if change["create"] else 0})
    assert presence.short() == ["pool rollout: 0 of 1 engines by their own records, and 1 by the record of the pool"]


def engine(revision: int, version: int, state: str, *, at: float = 1.0, runner: str = "i") -> Event:
    return {"kind": Kind.CHANGE, "at": at, "revision": revision, "put": True, "create": 1, "key": KEYS.engine("e"),
            "value": json.dumps({"id": "e", "pool": "rollout", "state": state, "version": version,
                                 "incarnation": runner})}


def step(*versions: int, at: float = 5.0) -> Event:
    return {"kind": Kind.STEP, "at": at, "step": 1, "sample_versions": [*versions], "policy_version": 9}


@pytest.mark.parametrize(("history", "sound"), [
    ([(4, "syncing"), (4, "ready")], True), ([(4, "syncing")], False), ([(4, "syncing"), (5, "ready")], False),
    ([(3, "ready"), (4, "draining")], True), ([(3, "ready"), (4, "syncing")], True),
    ([(3, "ready"), (3, "released"), (4, "syncing")], False), ([(3, "ready"), (4, "quarantined")], False)],
    ids=["ready", "syncing", "ready with a later one", "leaving", "given up", "was released", "quarantined"])
def test_version_of_a_sample_was_in_an_engine_that_was_ready(history: list[tuple[int, str]], sound: bool) -> None:
    records = [engine(n, version, state) for n, (version, state) in enumerate(history, 1)]
    assert (said([*records, step(4)], VersionsOfSamples) == []) == sound


def test_next_runner_of_an_engine_and_one_that_left_long_ago_have_no_requests_under_way() -> None:
    ready = engine(1, 3, "ready")
    assert len(said([ready, engine(2, 4, "syncing", runner="next"), step(4)], VersionsOfSamples)) == 1
    assert len(said([ready, engine(2, 4, "draining", at=400.0), step(4, at=390.0)], VersionsOfSamples)) == 1


def test_versions_from_before_the_log_are_not_judged() -> None:
    later = {**engine(1000, 4, "syncing"), "create": 900}
    assert said([later, step(4)], VersionsOfSamples) == []
    assert len(said([later, step(5)], VersionsOfSamples)) == 1
