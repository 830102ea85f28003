"""Who is at fault when an engine cannot fetch: the engine, or the checkpoint service."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic_rl.engine import fetch_failures
from elastic_rl.engine.fetch_failures import FetchEvidence, FetchFailures, evidence
from elastic_rl.etcd.client import KeyValue
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState


def engine(name: str, version: int, state: EngineState = EngineState.READY, pool: str = "rollout") -> Engine:
    return Engine(id=name, pool=pool, state=state, epoch=1, version=version)


OWN = engine("e0", 4)


@given(st.lists(st.integers(0, 4), max_size=8))
def test_engine_waits_while_no_other_engine_is_ahead_of_it(versions) -> None:
    others = [engine(f"e{i}", version) for i, version in enumerate(versions, 1)]
    assert not evidence(OWN, [OWN, *others], nodes=True).blames_engine


@given(st.integers(0, 20), st.integers(0, 20))
def test_engine_is_at_fault_when_most_others_are_ahead_of_it(ahead, level) -> None:
    others = [engine(f"a{i}", 5) for i in range(ahead)] + [engine(f"b{i}", 4) for i in range(level)]
    found = evidence(OWN, others, nodes=True)
    assert found == FetchEvidence(ahead + level, ahead, True)
    assert found.blames_engine == (ahead > 0 and ahead >= level)


def test_engine_waits_while_no_node_is_registered() -> None:
    assert not evidence(OWN, [engine("e1", 9)], nodes=False).blames_engine


def test_engines_of_other_pools_or_that_do_not_serve_are_no_evidence() -> None:
    others = [engine("e1", 9, pool="eval"), engine("e2", 9, EngineState.DEAD), engine("e3", 9, EngineState.DRAINING),
              engine("e0", 9)]
    assert evidence(OWN, others, nodes=True) == FetchEvidence(0, 0, True)


def test_engine_is_overdue_after_enough_failures_over_enough_time() -> None:
    failures = FetchFailures(300.0, min_failures=5)
    for now in (10.0, 20.0, 400.0, 401.0):
        failures.failed(now)
        assert not failures.overdue(now), "too few"
    failures.failed(402.0)
    assert failures.overdue(402.0) and failures.lasted_s(402.0) == 392.0
    failures.succeeded()
    failures.failed(500.0)
    assert failures.count == 1 and not failures.overdue(1000.0)


def test_time_without_etcd_or_with_a_suspended_catalog_does_not_count() -> None:
    failures = FetchFailures(300.0, min_failures=1)
    for now in range(0, 3000, 10):
        failures.failed(float(now))
        failures.excused()
        assert not failures.overdue(float(now))
    failures.failed(3000.0)
    assert not failures.overdue(3299.0) and failures.overdue(3300.0)


class Etcd:
    """Pages of keys, as the real client reads them; counts what it gives out."""

    def __init__(self, keys: list[tuple[str, bytes]]) -> None:
        self.keys, self.read = sorted(keys), 0

    def page(self, prefix: str, *, limit: int, after: str = "", before: str = ""):
        found = [KeyValue(k, v, 1, 1, 1, 0) for k, v in self.keys
                 if k.startswith(prefix) and k > after and (not before or k < before)][:limit]
        self.read += len(found)
        return type("Page", (), {"kvs": found})


SOME = st.sampled_from([0, 1, 40, 700])


@settings(max_examples=30, deadline=None)
@given(SOME, SOME, st.sets(st.sampled_from(["000001", "fffff1"])), st.sampled_from(["000000", "0fffff", "ffffff"]))
@example(700, 0, {"fffff1"}, "0fffff")
def test_engines_of_a_pool_with_a_longer_name_are_not_its_neighbours(before, between, own, at) -> None:
    """However many there are: they have keys among those of the pool."""
    keys = Keys("job")
    there = [engine(f"a-b-{i:06x}", 5, pool="a-b") for i in range(before)] + [
        engine(f"a-b-c-{i:06x}", 5, pool="a-b-c") for i in range(between)] + [
        engine(f"a-{name}", 5, pool="a") for name in own]
    etcd = Etcd([(keys.engine(e.id), e.encode()) for e in there])
    assert fetch_failures.others_serve(etcd, keys, "a", f"a-{at}") == bool(own)
    found = fetch_failures.read_evidence(etcd, keys, engine(f"a-{at}", 4, pool="a"))
    assert (found.peers, found.ahead) == (len(own), len(own))


@given(st.integers(0, 100), st.integers(0, 99))
def test_evidence_is_read_from_a_bounded_number_of_records(size, at) -> None:
    keys = Keys("job")
    etcd = Etcd([(keys.engine(f"rollout-e{i:03}"), engine(f"rollout-e{i:03}", 5).encode()) for i in range(size)]
                + [(keys.dcs_node("n0"), b"{}")])
    found = fetch_failures.read_evidence(etcd, keys, engine(f"rollout-e{at:03}", 4))
    others = size - (at < size)
    assert found == FetchEvidence(min(others, 32), min(others, 32), True) and etcd.read <= 33
