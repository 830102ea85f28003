"""Fault statistics: faults, restarts and their durations, each event counted once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.failure.statistics import DETECT_S, RECOVER_S, EventCursor, FaultStatistics, count
from elastic_rl.etcd.records import Event


def at(second: float, kind: str, subject: str = "x", **data: Any) -> Event:
    return Event(id=f"{second}-{kind}-{subject}", at=second, kind=kind, subject=subject, message="", data=data)


def recovered(statistics: FaultStatistics, part: str) -> tuple[int, float]:
    histogram = statistics.recover[part]
    return sum(histogram.counts), histogram.total_s


def test_engine_failure_is_one_fault_until_its_replacement_is_ready() -> None:
    statistics = count(FaultStatistics(), [
        at(10, "engine.dead", "e0", detect_s=0.3), at(10.5, "engine.replaced", "e0"),
        at(11, "engine.dead", "e0", by="leader", detect_s=3.1), at(30, "engine.ready", "e2", start_s=19.0)])
    assert (statistics.faults, statistics.restarts, statistics.open) == ({"engine": 1}, {"engine": 1}, {})
    assert recovered(statistics, "engine") == (1, 20.0)
    assert sum(statistics.detect["engine"].counts) == 1 and statistics.detect["engine"].total_s == 0.3


def test_removed_external_engine_ends_its_fault_without_a_recovery() -> None:
    statistics = count(FaultStatistics(), [at(10, "engine.dead", "e0"), at(11, "engine.dead", "a0"),
                                      at(12, "engine.removed", "a0")])
    assert (statistics.faults, statistics.open, statistics.recover) == ({"engine": 2}, {"engine/e0": 10.0}, {})
    statistics = count(statistics, [at(20, "engine.dead", "a1"),
                                    at(40, "engine.ready", "a1", start_s=5.0, external=True)])
    assert statistics.open == {"engine/e0": 10.0} and recovered(statistics, "engine") == (1, 20.0)


def test_engine_started_before_the_fault_is_no_replacement() -> None:
    statistics = count(FaultStatistics(), [at(100, "engine.quarantined", "e0"),
                                           at(101, "engine.ready", "e1", start_s=20.0)])
    assert statistics.open == {"engine/e0": 100.0} and not statistics.recover
    statistics = count(statistics, [at(125, "engine.ready", "e2", start_s=24.0)])
    assert recovered(statistics, "engine") == (1, 25.0)


def test_replacement_recovers_the_oldest_fault_only() -> None:
    statistics = count(FaultStatistics(), [at(1, "engine.dead", "e0"), at(5, "engine.dead", "e1"),
                            at(30, "engine.ready", "e2", start_s=20.0)])
    assert statistics.open == {"engine/e1": 5.0} and recovered(statistics, "engine") == (1, 29.0)


def test_trainer_group_fails_and_recovers_as_one() -> None:
    statistics = count(FaultStatistics(), [
        at(10, "trainer.failed", "trainer", detect_s=1.0), at(12, "trainer.dead", "rank-1", by="leader"),
        at(12, "trainer.dead", "rank-0", by="leader"), at(15, "trainer.restarted", "trainer"),
        at(16, "trainer.returned", "rank-1"), at(18, "trainer.recovered", "trainer")])
    assert (statistics.faults, statistics.restarts, statistics.open) == ({"trainer": 1}, {"trainer": 1}, {})
    assert recovered(statistics, "trainer") == (1, 8.0)


def test_faults_of_two_trainer_groups_are_counted_apart() -> None:
    found = count(FaultStatistics(), [
        at(10, "critic.failed", "critic", detect_s=1.0), at(11, "trainer.dead", "rank-1"),
        at(12, "critic.dead", "rank-0"), at(14, "critic.recovered", "critic")])
    assert found.faults == {"critic": 1, "trainer": 1} and list(found.open) == ["trainer/"]
    assert recovered(found, "critic") == (1, 4.0)


def test_durable_part_returns_under_its_id_and_role_is_replaced() -> None:
    statistics = count(FaultStatistics(), [
        at(1, "dcs.dead", "n0"), at(1, "dcs.dead", "n1"), at(4, "dcs.returned", "n1"),
        at(5, "rollout.dead", "r1", detect_s=3.5), at(7, "rollout.recovered", "r1")])
    assert statistics.faults == {"dcs": 2, "rollout": 1} and statistics.open == {"dcs/n0": 1.0}
    assert statistics.restarts == {"dcs": 1, "rollout": 1}
    assert recovered(statistics, "dcs") == (1, 3.0) and recovered(statistics, "rollout") == (1, 2.0)


def test_hung_part_that_resumes_counts_as_fault_without_restart() -> None:
    statistics = count(FaultStatistics(), [at(5, "engine.hung", "e0", detect_s=8.0), at(9, "engine.resumed", "e0"),
                            at(20, "trainer.hung", "rank-0"), at(26, "trainer.resumed", "rank-0"),
                            at(30, "actor.hung", "a1"), at(33, "actor.dead", "a1"), at(35, "actor.recovered", "a1")])
    assert statistics.faults == {"engine": 1, "trainer": 1, "actor": 1} and statistics.open == {}
    assert statistics.restarts == {"actor": 1}
    assert [recovered(statistics, part)[1] for part in ("engine", "trainer", "actor")] == [4.0, 6.0, 5.0]


def test_other_events_open_no_fault() -> None:
    statistics = count(FaultStatistics(), [at(1, "dcs.durable_failed", "n0"), at(2, "dcs.durable_recovered", "n0"),
                            at(3, "publish.failed"), at(4, "run.finished"), at(5, "run.global_restart", "job")])
    assert statistics.faults == {} and statistics.open == {} and statistics.restarts == {"job": 1}


def test_recovery_after_an_hour_is_not_measured() -> None:
    statistics = count(FaultStatistics(), [at(0, "engine.dead", "e0"), at(7200, "engine.ready", "e1", start_s=20.0)])
    assert statistics.open == {} and statistics.recover == {}


def test_statistics_stay_bounded() -> None:
    story = [at(i, f"kind{i}.dead", f"m{i}") for i in range(1000)]
    statistics = count(FaultStatistics(), story)
    assert len(statistics.open) <= 256 and len(statistics.events) <= 201 and sum(statistics.events.values()) == 1000


KINDS = ["engine.dead", "engine.replaced", "engine.ready", "trainer.failed", "trainer.recovered", "dcs.dead",
         "dcs.returned", "router.restarted", "pool.scaled"]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("abc")), max_size=60), st.integers(0, 60))
def test_next_leader_continues_the_count(story: list[tuple[str, str]], cut: int) -> None:
    reported = [at(float(i), kind, subject, start_s=2.0, detect_s=0.5) for i, (kind, subject) in enumerate(story)]
    first = EventCursor(revision=cut, statistics=count(FaultStatistics(), reported[:cut]))
    assert count(EventCursor.decode(first.encode()).statistics, reported[cut:]) == count(FaultStatistics(), reported)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("abc")), max_size=60))
def test_counters_never_decrease_and_recoveries_match_faults(story: list[tuple[str, str]]) -> None:
    statistics = FaultStatistics()
    for i, (kind, subject) in enumerate(story):
        after = count(statistics, [at(float(i), kind, subject)])
        for name in ("events", "faults", "restarts"):
            before_n, after_n = getattr(statistics, name), getattr(after, name)
            assert all(after_n[k] >= n for k, n in before_n.items())
        statistics = after
    recovered_faults = sum(sum(s.counts) for s in statistics.recover.values())
    assert recovered_faults + len(statistics.open) == sum(statistics.faults.values())
    assert all(len(s.counts) == len(RECOVER_S) + 1 for s in statistics.recover.values())
    assert all(len(s.counts) == len(DETECT_S) + 1 for s in statistics.detect.values())
