"""What is short when a run asks its job to stop has not come back: of whatever length the run is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.chaos_log import KEYS, START, Log, of_kind

from chaos_tests.event_log import Kind
from chaos_tests.validate.judge import judge
from chaos_tests.validate.running import Presence

Edit = Callable[["Ended"], object]


class Ended(Log):
    """A run by time on a cluster of its own, whose job was asked to stop once all was back. ``before``: what happens
    after its last fault. ``stop``: whether the log says when it was asked."""

    def __init__(self, before: Edit = lambda log: None, *, stop: bool = True, waited_s: float = 3.0) -> None:
        self._before, self._stop, self._waited_s = before, stop, waited_s
        super().__init__()

    def _end(self, faults: bool) -> None:
        self.records[0]["schedule"].update(minutes=1.0, steps=0)
        since = self.at
        self.step(self.steps, 1.0)
        self._before(self)
        self.at += self._waited_s
        if self._stop:
            self.add(Kind.STOP, since=since, revision=self.revision, step=self.steps)
        self.at += 1.0
        super()._end(faults)
        end = self.records[-1]
        end["report"].update(versions_committed=self._number + 1)
        end["phase"] = "stopped"


def found(log: Log) -> list[str]:
    return [str(violation) for verdict in judge(log.records) for violation in verdict.violations]


def broken(log: Log) -> set[str]:
    return {what.partition(":")[0] for what in found(log)}


def operation(state: str) -> Edit:
    return lambda log: log.put((KEYS.operation("p"), {"id": "p", "state": state}))


SHORT: dict[str, tuple[str, Edit, Edit]] = {
    "pool": ("I6", lambda log: log.pool(0), lambda log: log.pool(1)),
    "driver": ("I12", lambda log: log.put((KEYS.member("driver", "driver-0"), None)),
               lambda log: log.put((KEYS.member("driver", "driver-1"), {"role": "driver"}))),
    "actor": ("I12", lambda log: log.put((KEYS.member("actor", "actor-0"), None)),
              lambda log: log.put((KEYS.member("actor", "actor-0"), {"role": "actor"}))),
    "coordinator": ("I12", lambda log: log.put((KEYS.member("coordinator", "coordinator-0"), None)),
                    lambda log: log.put((KEYS.member("coordinator", "coordinator-0"), {"role": "coordinator"}))),
    "trainer": ("I12", lambda log: log.put((KEYS.member("trainer", "trainer-1"), None)),
                lambda log: log.put((KEYS.member("trainer", "trainer-2"), {"role": "trainer"}))),
    "operation": ("I10", operation("running"), operation("succeeded")),
}


def test_run_that_was_asked_to_stop_when_all_was_back_keeps_the_rules() -> None:
    assert found(Ended()) == []
    assert found(Ended(stop=False)) == []


@pytest.mark.parametrize("name", SHORT)
def test_what_is_short_when_the_job_is_asked_to_stop_has_not_come_back(name: str) -> None:
    rule, lost, back = SHORT[name]
    assert broken(Ended(lost)) == {rule}, "however short the run is"
    assert broken(Ended(lambda log: (lost(log), back(log)))) == set()


@pytest.mark.parametrize("name", SHORT)
def test_change_that_the_observer_shows_after_the_stop_is_of_its_own_revision(name: str) -> None:
    """The record of the stop may come before, or after, what the observer shows of the same moment."""
    rule, lost, back = SHORT[name]
    for edit, wrong in ((lambda log: (lost(log), back(log)), set()), (lost, {rule})):
        log = Ended(edit)
        stop = next(of_kind(log.records, Kind.STOP))
        for at in (1, len(log.records) - 1):
            records = [record for record in log.records if record is not stop]
            records.insert(at, stop)
            log.records = records
            assert broken(log) == wrong


@pytest.mark.parametrize("name", SHORT)
def test_what_was_lost_by_the_stop_itself_is_not_short(name: str) -> None:
    rule, lost, _ = SHORT[name]

    class Stopping(Ended):
        def put(self, *pairs: tuple[str, Any]) -> None:
            if any(key == KEYS.operation("o") for key, _ in pairs) and not getattr(self, "_stopping", False):
                self._stopping = True
                lost(self)
            super().put(*pairs)

    assert broken(Stopping()) == set()


@pytest.mark.parametrize("name", SHORT)
def test_job_that_ends_by_itself_may_not_be_short_for_longer_than_its_parts_took(name: str) -> None:
    rule, lost, back = SHORT[name]
    assert broken(Ended(lost, stop=False, waited_s=200.0)) == {rule, "I11"}
    assert broken(Ended(lost, stop=False, waited_s=5.0)) == set(), "a moment before the end"
    slow = Ended(lost, stop=False, waited_s=200.0)
    next(of_kind(slow.records, Kind.FAULT))["healed_at"] += 150.0
    assert broken(slow) == {"I10"}, "a recovery that was as slow: it alone is to blame"
    aborted = Ended(lost, stop=False, waited_s=200.0)
    aborted.records[-1]["aborted"] = "an operator"
    assert broken(aborted) == {"run"}


def test_job_that_makes_no_step_when_it_is_waited_for_has_stopped_before() -> None:
    log = Ended(waited_s=100.0)
    stop = next(of_kind(log.records, Kind.STOP))
    stop["since"] = stop["at"] - 90.0
    assert broken(log) == {"I11"} and "for 90 s" in found(log)[0]
    assert broken(Ended(stop=False, waited_s=200.0)) == {"I11"}
    by_steps = Ended(stop=False, waited_s=200.0)
    by_steps.records[0]["schedule"].update(minutes=0.0, steps=by_steps.steps)
    assert broken(by_steps) == set(), "its end commits what it has"


def clients(log: Log, answered: int, count: int, at: float) -> None:
    for n in range(count):
        log.records.insert(1, {
            "at": at, "kind": Kind.OPERATION.value, "client": f"c{n}", "model": "created", "key": f"k{n}",
            "call": "create", "argument": None, "began_s": float(n), "ended_s": n + 0.5 if n < answered else None,
            "result": f"a{n}" if n < answered else None})


def test_clients_get_answers_while_no_fault_is_under_way() -> None:
    for answered, rules in ((40, set()), (20, set()), (19, {"I10"}), (0, {"I10"})):
        log = Ended()
        clients(log, answered, 40, START - 50.0)
        assert broken(log) == rules, answered
    log = Ended()
    clients(log, 0, 40, next(of_kind(log.records, Kind.FAULT))["injected_at"] + 1.0)
    assert broken(log) == set(), "the fault took their answers"


@pytest.mark.parametrize("name", SHORT)
def test_what_comes_back_has_not_been_away_for_longer_than_two_recoveries_take(name: str) -> None:
    """By the time that the job took to start: less than what a run waits for a recovery before it gives up."""
    rule, lost, back = SHORT[name]

    def away(seconds: float) -> Edit:
        def edit(log: Log) -> None:
            lost(log)
            log.at += seconds
            back(log)
        return edit

    log = Ended(away(870.0))
    assert broken(log) == {rule} and "the whole job had its first step after 1 s" in found(log)[0]
    assert broken(Ended(away(200.0))) == set()
    log.records[0]["target"] = "job j in /runs"
    assert rule not in broken(log)
    slow = Ended(away(870.0))
    slow.records[0]["at"] -= 100.0
    assert broken(slow) == set(), "its start took as long"


def calls(log: Log, *heard: tuple[float, bool]) -> None:
    """Calls of one client. ``heard``: seconds since the begin, and whether there was an answer."""
    log.records[1:1] = [
        {"at": START + at, "kind": Kind.OPERATION.value, "client": "replica 0", "model": "created", "key": f"k{at}",
         "call": "create", "argument": None, "began_s": at, "ended_s": at + 0.5, "result": f"a{at}"} if answered else
        {"at": START + at, "kind": Kind.UNANSWERED.value, "client": "replica 0", "model": "created", "key": f"k{at}",
         "call": "create"} for at, answered in heard]


@pytest.mark.parametrize(("silent_from", "silent_to", "sound"), [
    (100, 155, True), (100, 165, False), (100, 300, False), (-50, 15, True), (-80, 15, False)],
    ids=["a moment", "for a while", "until the end", "also beside a fault", "and before it"])
def test_client_is_answered_again_once_no_fault_is_under_way(silent_from: int, silent_to: int, sound: bool) -> None:
    """However many answers it had before, and however few of its calls had none."""
    log = Ended(waited_s=320.0)
    calls(log, *((float(at), not silent_from < at < silent_to) for at in range(-200, 300, 2)
                 if not silent_from + 10 < at < silent_to - 10))
    said = found(log)
    assert [what.partition(":")[0] for what in said] == ([] if sound else ["I10"]), said
    assert all("replica 0 got no answer for" in what for what in said)


def test_call_that_takes_long_is_a_time_without_an_answer() -> None:
    """Also one that is answered in the end, and one that is under way when the log ends."""
    for answered in (True, False):
        log = Ended(waited_s=320.0)
        calls(log, *((float(at), True) for at in range(100, 150, 2)), (290.0, True))
        last = [*of_kind(log.records, Kind.OPERATION)][-1]
        last.update(began_s=151.0, ended_s=290.0 if answered else None)
        assert any("replica 0 got no answer for" in what for what in found(log)), answered


def test_tries_without_an_answer_count_as_what_they_are() -> None:
    log = Ended(waited_s=320.0)
    calls(log, *((float(at), at % 40 == 0) for at in range(100, 300, 2)))
    assert any("operations (create of created) got no answer" in what for what in found(log))


def test_run_knows_what_is_short_as_the_checkers_do() -> None:
    log, presence = Ended(), Presence()
    for record in log.records:
        if record["kind"] == Kind.CHANGE:
            presence.see(record)
    assert presence.short() == [] and presence.revision == log.revision
    for _, lost, _ in SHORT.values():
        log = Ended(lost)
        presence, ended = Presence(), False
        for record in log.records:
            ended = ended or record["kind"] == Kind.STOP
            if record["kind"] == Kind.CHANGE and not ended:
                presence.see(record)
        assert len(presence.short()) == 1
        presence.gap({"first": 1, "last": 2})
        assert presence.short() == [], "of what came in a gap nothing is known"


