"""Weight outliers: an engine is one only if a majority of its version and layout contradicts it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.membership.weight_outliers import outliers
from elastic_rl.etcd.records import Engine, EngineState

ENGINES = st.lists(st.builds(
    Engine, id=st.uuids().map(str), pool=st.just("rollout"), epoch=st.just(1), layout=st.sampled_from("xy"),
    state=st.sampled_from([EngineState.READY, EngineState.READY, EngineState.DEAD, EngineState.SYNCING]),
    version=st.integers(1, 2), applying=st.sampled_from([0, 0, 0, 2]), checksum=st.sampled_from(["a", "b", ""])))


def engine(name: str, checksum: str, **fields: object) -> Engine:
    return Engine(**{"id": name, "pool": "rollout", "state": EngineState.READY, "epoch": 1, "version": 5,
                     "layout": "bf16/tp1", "checksum": checksum, **fields})


def test_one_of_three_that_differs_is_an_outlier():
    assert [e.id for e in outliers([engine("a", "1"), engine("b", "2"), engine("c", "1")])] == ["b"]


def test_two_engines_that_differ_have_no_outlier():
    assert outliers([engine("a", "1"), engine("b", "2")]) == []


def test_other_versions_layouts_and_states_are_not_compared():
    alike = [engine("a", "1"), engine("b", "1")]
    for other in ({"version": 6}, {"layout": "bf16/tp2"}, {"applying": 6}, {"state": EngineState.SYNCING}):
        assert outliers([*alike, engine("c", "2", **other)]) == []
    assert outliers([*alike, engine("c", "")]) == []


@given(ENGINES)
def test_outliers_are_contradicted_by_a_majority(engines):
    gone = outliers(engines)
    assert all(e.state is EngineState.READY and e.checksum and not e.applying for e in gone)
    for lost in gone:
        like = [e for e in engines if (e.version, e.layout) == (lost.version, lost.layout) and e.checksum
                and e.state is EngineState.READY and not e.applying]
        winner, votes = Counter(e.checksum for e in like).most_common(1)[0]
        assert winner != lost.checksum and votes > len(like) / 2
