"""A recovery is seen in what the job did, and is bounded by what the same job took to start."""

from __future__ import annotations

import pytest
from support.chaos_log import START, Log, Record, of_kind

from chaos_tests.event_log import Kind
from chaos_tests.validate.faults import SaidWhatItWaitsFor
from chaos_tests.validate.judge import broken, judge

_TIMES = ("at", "injected_at", "detected_at", "healed_at")


def violations(records: list[Record]) -> list[str]:
    return [str(violation) for verdict in judge(records) for violation in verdict.violations]


def later(records: list[Record], after: float, by_s: float) -> list[Record]:
    """The same, where all that was after a moment was so much later."""
    return [record | {name: record[name] + by_s for name in _TIMES if name in record and record[name] > after}
            for record in records]


def fault(records: list[Record], name: str) -> Record:
    return next(record for record in of_kind(records, Kind.FAULT) if record["name"] == name)


@pytest.mark.parametrize(("start_s", "recovery_s", "broken"), [
    (0.0, 130.0, []), (0.0, 150.0, ["I10"]), (100.0, 150.0, []), (100.0, 420.0, []), (100.0, 460.0, ["I10"]),
    (0.0, 300.0, ["I6", "I10", "I11"]), (500.0, 880.0, []), (500.0, 920.0, ["I6", "I10"])])
def test_recovery_is_bounded_by_what_the_job_took_to_start(start_s: float, recovery_s: float, broken: list[str]
                                                           ) -> None:
    records = Log().records
    struck = float(fault(records, "engine_killed")["injected_at"])
    records = later(later(records, struck + 0.7, recovery_s - 11.0), START + 0.5, start_s)
    found = violations(records)
    assert [what.partition(":")[0] for what in found] == broken, found
    assert all("the whole job had its first" in what for what in found if not what.startswith("I6"))


def test_bound_is_for_a_cluster_of_its_own_alone() -> None:
    records = Log().records
    records = later(records, float(fault(records, "engine_killed")["injected_at"]) + 0.7, 400.0)
    records[0]["target"] = "job j in /runs"
    assert [what for what in violations(records) if what.startswith(("I10", "I11"))] == []


def test_recovery_without_a_step_is_none() -> None:
    records = Log().records
    fault(records, "engine_killed")["healed_at"] -= 5.0  # before the step
    assert [what.partition(" after")[0] for what in violations(records)] == [
        "I10: engine_killed of rollout-1 is said to have healed"]


_NONE_BEGAN = ("I10: trainer_rank_killed of trainer rank-0 is said to have healed, and no other member of the role "
               "trainer has begun")


def test_member_that_was_ended_has_another_in_its_place() -> None:
    records = [record for record in Log().records if "trainer-1" not in str(record.get("key"))]
    assert [what for what in violations(records) if what.startswith("I10")] == [_NONE_BEGAN]


@pytest.mark.parametrize(("late_s", "found"), [(29.0, []), (31.0, [_NONE_BEGAN])])
def test_member_that_begins_after_the_recovery_is_none_of_it(late_s: float, found: list[str]) -> None:
    """But for the time by which the observer may be late."""
    records = Log().records
    began = next(record for record in records if "trainer-1" in str(record.get("key")))
    began["at"] = float(fault(records, "trainer_rank_killed")["healed_at"]) + late_s
    assert [what for what in violations(records) if what.startswith("I10")] == found


@pytest.mark.parametrize(("pause_s", "target", "found"), [
    (600.0, "one host", True), (130.0, "one host", False), (600.0, "job j in /runs", False)])
def test_pause_beside_no_fault_is_no_longer_than_a_recovery(pause_s: float, target: str, found: bool) -> None:
    """On a cluster of its own: steps of a job of others may be as long."""
    steps = [{"at": at, "kind": Kind.STEP.value, "step": n + 1} for n, at in enumerate((101.0, 102.0, 102.0 + pause_s))]
    run = {"at": 100.0, "kind": Kind.RUN.value, "target": target}
    assert bool(broken([run, *steps], [SaidWhatItWaitsFor])) == found
