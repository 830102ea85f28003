"""When an outage of the loop's bench begins and ends, and the arithmetic of its rows. Nothing here is timed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.bench.loop import outages
from elastic_rl.bench.loop.outages import Outage, TimedOutage
from elastic_rl.faults.context import Fault


def step(number: int, at: float, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "at": at, "seconds": {"total": 1.0}, **more}


# -- one outage -------------------------------------------------------------------------------------------------------
class Context:
    """A run that does a step each two times that it is asked."""

    cfg = SimpleNamespace(rollout=SimpleNamespace(engines=2))

    def __init__(self) -> None:
        self.asked: Iterator[int] = count(8)
        self.engines: list[str] = []

    def step(self) -> int:
        return next(self.asked) // 2

    def ready(self) -> list[str]:
        return self.engines


class Away(Fault):
    name, said = "away", "waits"

    def __init__(self) -> None:
        self.clock, self.over = 100.0, False

    def inject(self) -> tuple[str, str]:
        self.clock += 20.0
        return "target", "witness"

    def detected(self) -> bool:
        return True

    def healed(self) -> bool:
        return self.over


@pytest.fixture
def made() -> tuple[Any, Any, Outage, TimedOutage]:
    context, fault, noted = Context(), Away(), Outage()
    return context, fault, noted, TimedOutage(fault, context, noted, lambda: fault.clock)  # type: ignore[arg-type]


def test_outage_begins_two_steps_later_and_ends_when_it_was_injected(made: tuple[Any, Any, Outage, TimedOutage]
                                                                     ) -> None:
    context, fault, noted, outage = made
    assert outage.inject() == ("target", "witness")
    assert (noted.step, noted.began, noted.ended, noted.healed) == (6, 100.0, 120.0, None)
    assert (outage.name, outage.said, outage.detected()) == ("away", "waits", True)
    assert not outage.may_go_unnoticed
    fault.may_go_unnoticed = True
    assert TimedOutage(fault, context, noted).may_go_unnoticed


def test_outage_is_over_when_the_pool_is_whole_again(made: tuple[Any, Any, Outage, TimedOutage]) -> None:
    context, fault, noted, outage = made
    context.engines = ["a", "b"]
    assert not outage.healed()
    fault.over, context.engines = True, ["a"]
    assert not outage.healed() and noted.healed is None
    context.engines, fault.clock = ["a", "b"], 150.0
    assert outage.healed() and noted.healed == 150.0


def test_plan_has_one_outage_of_each_kind_after_the_other() -> None:
    context: Any = SimpleNamespace(cfg=SimpleNamespace(train=SimpleNamespace(max_staleness=0)))
    planned = outages.plan_of({"etcd": [Outage(), Outage()], "router": [Outage(), Outage()]})(context, 50)
    assert [fault.name for _, [fault] in planned] == ["etcd_stopped", "router_killed"] * 2


# -- rows -------------------------------------------------------------------------------------------------------------
def test_next_step_counts_from_the_end_of_the_outage() -> None:
    found = [step(1, 1.0), step(2, 2.0), step(3, 25.0), step(4, 26.0)]
    assert outages.seconds_until(found, [Outage(2, 1.5, 20.0)], 1) == [5.0]
    assert outages.seconds_until(found, [Outage(2, 1.5, 20.0)], 2) == [6.0]


def test_repeated_steps_are_no_progress() -> None:
    found = [step(4, 4.0), step(5, 5.0), {"kind": "rewind", "to_step": 3}, step(4, 9.0), step(5, 10.0), step(6, 11.0)]
    assert outages.seconds_until(found, [Outage(5, 5.0, 6.0)], 1) == [5.0]


def test_step_that_the_dead_actor_had_finished_is_not_the_next_one() -> None:
    found = [step(5, 5.0), step(6, 8.0, seconds={}), step(7, 10.0), step(8, 11.0)]
    assert outages.seconds_until(found, [Outage(5, 5.5, 6.0)], 1) == [4.0]
    assert outages.seconds_until(found, [Outage(5, 5.5, 6.0)], 2) == [5.0]


def test_outage_that_never_recovered_leaves_its_row_without_a_value() -> None:
    found = [step(1, 1.0), step(2, 7.0)]
    [row] = outages.rows(found, {"etcd": [Outage(1, 4.0, 5.0), Outage(2, 8.0, 9.0)]})
    assert row.value is None and "1 of 2" in str(row.why) and row.goal == 5.0
    [row] = outages.rows(found, {"etcd": [Outage(1, 4.0, 5.0), Outage(2, 8.0)]})
    assert row.value is None, "it could not be injected to its end"
    beyond, seconds = outages.engine_rows(found, {"engines": [Outage(2, 8.0, 9.0)]}, 1.0)
    assert beyond.value is None and beyond.why == seconds.why != "no sample was taken"


def test_outage_that_a_run_did_not_come_to_is_no_outage() -> None:
    found = [step(1, 1.0), step(2, 7.0)]
    [row] = outages.rows(found, {"etcd": [Outage(1, 4.0, 5.0), Outage()]})
    assert (row.value, row.samples) == (2.0, 1)
    [row] = outages.rows(found, {"etcd": [Outage()]})
    assert row.value is None and "ended before" in str(row.why)


def test_undisturbed_step_is_one_that_no_outage_touched() -> None:
    found = [step(n, at) for n, at in enumerate([0.0, 1.0, 2.0, 3.0, 30.0, 35.0, 36.5, 38.0], 1)]
    happened = {"etcd": [Outage(4, 3.5, 25.0, 33.0)], "router": [Outage()]}
    assert outages.undisturbed(found, happened["etcd"]) == [1.0, 1.0, 1.5, 1.5]
    [etcd, _] = outages.rows(found, happened)
    assert etcd.alternatives["an undisturbed step"] == 1.25
    assert outages.undisturbed(found, [Outage(4, 3.5, 25.0)]) == [1.0, 1.0], "it was never over"


def test_engines_are_measured_beyond_their_start() -> None:
    found = [step(1, 1.0), step(2, 2.0), step(3, 14.0), step(4, 15.0)]
    killed = {"engines": [Outage(2, 2.0, 2.0, 14.0)]}
    beyond, seconds = outages.engine_rows(found, killed, 8.0)
    assert (beyond.value, seconds.value) == (4.0, 12.0) and beyond.met is False
    assert seconds.alternatives["start of a bare engine"] == 8.0
    assert outages.engine_rows(found, killed, 9.5)[0].met is True
