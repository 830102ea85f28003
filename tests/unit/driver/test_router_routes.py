"""Which workers the driver adds to the router and removes from it."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.driver.routing import Routes, Unconfirmed, WorkerChanges, compare
from elastic_rl.etcd.records import Engine, EngineState, Straggler

urls = st.frozensets(st.sampled_from([f"http://e{i}" for i in range(5)]))
NOTHING = WorkerChanges()


def engine(name: str, state: EngineState, epoch: int = 1, url: str = "") -> Engine:
    return Engine(id=name, pool="rollout", state=state, epoch=epoch, url=url or f"http://{name}")


def routes(*engines: Engine) -> Routes:
    return Routes.from_engines(engines, epoch=1)


def test_only_ready_engines_of_this_epoch_are_routable():
    found = routes(engine("a", EngineState.READY), engine("b", EngineState.SYNCING), engine("c", EngineState.DRAINING),
                   engine("d", EngineState.DEAD), engine("e", EngineState.QUARANTINED),
                   engine("f", EngineState.READY, epoch=0))
    assert found.routable == {"http://a"}
    assert found.owned == {"http://a", "http://b", "http://c"}


def test_engine_that_is_missing_twice_is_added():
    ready = routes(engine("a", EngineState.READY))
    first, unconfirmed = compare(ready, set(), Unconfirmed())
    second, unconfirmed = compare(ready, set(), unconfirmed)
    assert first == NOTHING and second == WorkerChanges(add=frozenset({"http://a"}))
    assert compare(ready, {"http://a"}, unconfirmed) == (NOTHING, Unconfirmed())


def test_engine_that_routes_itself_at_this_moment_is_left_alone():
    """It is in the router before its record says READY, and its record says DRAINING before it leaves the router."""
    unconfirmed = Unconfirmed()
    for state in (EngineState.SYNCING, EngineState.READY, EngineState.DRAINING):
        changes, unconfirmed = compare(routes(engine("a", state)), {"http://a"}, unconfirmed)
        assert changes == NOTHING
    # The runner has removed itself, and its record was deleted in the meantime.
    changes, unconfirmed = compare(routes(), {"http://a"}, unconfirmed)
    assert changes == NOTHING
    assert compare(routes(), set(), unconfirmed) == (NOTHING, Unconfirmed())


def test_worker_that_no_engine_owns_twice_is_removed():
    first, unconfirmed = compare(routes(), {"http://a"}, Unconfirmed())
    second, _ = compare(routes(engine("a", EngineState.DEAD)), {"http://a"}, unconfirmed)
    assert first == NOTHING and second == WorkerChanges(remove=frozenset({"http://a"}))


def test_engine_that_is_behind_is_removed_at_once_and_added_to_no_router():
    behind = {state: engine("a", state).replace(version=4, straggler=Straggler(needs=5, missed=5, since=7.0))
              for state in (EngineState.READY, EngineState.SYNCING)}
    for record in behind.values():
        found = routes(record, engine("b", EngineState.READY))
        assert found.routable == found.owned == {"http://b"} and found.behind == {"http://a": 7.0}
        changes, _ = compare(found, {"http://a", "http://b"}, Unconfirmed())
        assert changes == WorkerChanges(remove=frozenset({"http://a"}))
        assert compare(found, {"http://b"}, Unconfirmed(), is_new=True)[0] == NOTHING
    caught_up = routes(behind[EngineState.SYNCING].replace(version=5))
    assert not caught_up.behind and compare(caught_up, {"http://a"}, Unconfirmed())[0] == NOTHING, "it joins by itself"


def test_new_router_gets_all_ready_engines_at_once():
    ready = routes(engine("a", EngineState.READY), engine("b", EngineState.READY), engine("c", EngineState.DRAINING))
    changes, _ = compare(ready, set(), Unconfirmed(), is_new=True)
    assert changes == WorkerChanges(add=frozenset({"http://a", "http://b"}))


@given(urls, urls, urls)
def test_two_comparisons_make_the_list_right_and_the_third_changes_nothing(routable, others, listed):
    found = Routes(routable, routable | others)
    unconfirmed = Unconfirmed()
    for _ in range(2):
        changes, unconfirmed = compare(found, listed, unconfirmed)
        assert changes.add <= found.routable and not changes.remove & found.owned
        listed = (listed | changes.add) - changes.remove
    assert found.routable <= listed <= found.owned
    assert compare(found, listed, unconfirmed)[0] == NOTHING


@given(st.lists(st.tuples(urls, urls), max_size=8))
def test_nothing_is_changed_that_one_comparison_alone_has_shown(readings):
    unconfirmed, before = Unconfirmed(), None
    for routable, listed in readings:
        changes, unconfirmed = compare(Routes(routable, routable), listed, unconfirmed)
        if before is None:
            assert changes == NOTHING
        else:
            assert changes.add <= before[0] - before[1] and changes.remove <= before[1] - before[0]
        before = routable, listed
