"""What the loop says while it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from elastic_rl.errors import ElasticRLError, EtcdUnavailable, Fenced
from elastic_rl.pipeline.waits import StopAsked, Waits


class Reports(list[tuple[str, str]]):
    def __call__(self, stage: str, kind: str, what: str) -> None:
        self.append((stage, kind))


def failing(*errors: Exception) -> Callable[[], str]:
    """A call that raises these, one a time, and then succeeds."""
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_successful_look_does_not_end_the_wait_around_it() -> None:
    """A wait whose every look ended it would never be old enough to be shown."""
    reports = Reports()
    waits = Waits(reports, threading.Event())
    waits.stage("sync")
    for _ in range(3):
        assert waits.retry("etcd", lambda: "found") == "found"
        waits.waits("engines", "engines that serve version 3")
    assert reports == [("sync", "")] + 3 * [("sync", "engines")]
    waits.works()
    assert reports[-1] == ("sync", "") and waits.take_idle_s().keys() == {"sync"}


def test_wait_in_progress_counts_up_to_the_moment_of_asking() -> None:
    """Else a wait of minutes would be of the step in which it ends, which takes a second."""
    waits = Waits(lambda *_: None, threading.Event())
    waits.stage("generate")
    began = time.monotonic()
    waits.waits("engines", "engines")
    time.sleep(0.02)
    first, took_s = waits.take_idle_s()["generate"], time.monotonic() - began
    assert 0.02 <= first <= took_s
    waits.works()
    rest = waits.take_idle_s()
    assert first + rest["generate"] <= time.monotonic() - began and waits.take_idle_s() == {}


def test_call_that_succeeds_ends_the_waits_for_its_own_attempts() -> None:
    reports = Reports()
    waits = Waits(reports, threading.Event())
    waits.stage("train")
    assert waits.retry("trainer", failing(EtcdUnavailable("away"), ElasticRLError("busy"))) == "done"
    assert reports == [("train", ""), ("train", "etcd"), ("train", "trainer"), ("train", "")]


def test_wait_for_a_failing_call_goes_on_while_it_is_repeated() -> None:
    """Each attempt begins stages and waits of its own. The wait would otherwise always be new, and never shown."""
    reports = Reports()
    waits = Waits(reports, threading.Event())
    attempts = failing(*[ElasticRLError("busy")] * 2)

    def attempt() -> str:
        waits.stage("advantage")
        waits.retry("advantages", lambda: "computed")
        waits.stage("train")
        return attempts()

    assert waits.retry("trainer", attempt) == "done"
    kinds = [kind for _, kind in reports]
    assert kinds == ["", "", *["trainer"] * (len(kinds) - 3), ""] and ("advantage", "trainer") in reports
    assert waits.take_idle_s().keys() <= {"advantage", "train"}


def test_waits_inside_a_repeated_call_count_to_it_until_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns with it, each would be too young to be seen."""
    now, said = [100.0], list[tuple[str, str]]()
    monkeypatch.setattr("elastic_rl.pipeline.waits.time.monotonic", lambda: now[0])
    waits = Waits(lambda stage, kind, what: said.append((kind, what)), threading.Event())

    def waited(seconds: int) -> set[tuple[str, str]]:
        said.clear()
        for _ in range(seconds):
            waits.waits("trainer", "the trainer")
            now[0] += 1.0
        return set(said)

    with waits.holding("dcs", "the commit"):
        waits.works()
        for _ in range(3):  # attempts
            assert waited(5) == {("dcs", "the commit")}
            assert waited(50) == {("dcs", "the commit (now for the trainer)")}
            waits.waits("engines", "engines")
            waits.works()
            assert said[-2:] == [("dcs", "the commit")] * 2
        assert waited(60)
        assert waited(9) == {("trainer", "the trainer")}, "this is no attempt of the commit any more"
        waits.works()
        assert said[-1] == ("dcs", "the commit")
    waits.works()
    assert said[-1] == ("", "")


def test_wait_goes_on_to_be_reported_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.pipeline.waits._SHOW_EVERY_S", 0.01)
    reports = Reports()
    waits = Waits(reports, threading.Event())
    waits.stage("save")
    waits.pause(0.05)
    assert reports == [("save", "")], "it works"
    with waits.holding("dcs", "the commit"):
        waits.works()
        waits.pause(0.0)
        assert reports == [("save", ""), ("save", "dcs")]
        waits.pause(0.05)
    assert len(reports) > 2 and set(reports[2:]) == {("save", "dcs")}


def test_loop_that_is_to_end_waits_no_more() -> None:
    stopping = threading.Event()
    waits = Waits(Reports(), stopping)
    stopping.set()
    with pytest.raises(Fenced):
        waits.retry("trainer", failing(ElasticRLError("busy")))


def test_stop_ends_waits_that_need_not_be_done_and_no_others() -> None:
    """What is trained is to be committed first, however long the checkpoint service lets the run wait."""
    stop = threading.Event()
    waits = Waits(lambda *_: None, threading.Event(), stop)
    with waits.interruptible():
        waits.waits("engines", "engines")
        stop.set()
        for wait in (lambda: waits.waits("engines", "engines"), lambda: waits.pause(60.0), lambda: waits.pause(0.0),
                     lambda: waits.retry("engines", failing(ElasticRLError("away")))):
            with pytest.raises(StopAsked):
                wait()
        with waits.interruptible(False):
            waits.waits("dcs", "a commit")
        with pytest.raises(StopAsked):
            waits.pause(0.0)
    waits.waits("dcs", "a commit")
    assert waits.retry("dcs", failing(ElasticRLError("away"))) == "done" and waits.stop_asked
