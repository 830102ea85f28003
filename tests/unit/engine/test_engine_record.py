"""What a runner writes in the place of a record in which something was requested."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.engine.record import requested
from elastic_rl.etcd.records import Engine, EngineState, Straggler

VERSIONS = st.integers(0, 4)
STRAGGLERS = st.one_of(st.none(), st.builds(Straggler, needs=VERSIONS, missed=st.just(1), since=st.just(7.0)))
RECORDS = st.builds(Engine, id=st.just("e"), pool=st.just("p"), epoch=st.just(1), state=st.sampled_from(
    sorted(EngineState)), version=VERSIONS, straggler=STRAGGLERS)
WRITES = st.builds(Engine, id=st.just("e"), pool=st.just("p"), epoch=st.just(1), state=st.sampled_from(
    sorted(EngineState)), version=VERSIONS)


@given(RECORDS, WRITES)
def test_request_is_overwritten_by_nothing_but_what_it_asks_for_and_the_end(before: Engine, record: Engine) -> None:
    written = requested(before, record)
    if before.state is EngineState.DEAD:
        assert written is before, "nothing takes the end back, or makes another one of it"
    elif record.state.ended:
        assert written is record
    elif before.state.ended:
        assert written is before
    elif before.state is EngineState.DRAINING:
        assert written.state is EngineState.DRAINING
    elif before.state is EngineState.SYNCING and before.straggler is not None and before.straggler.needs:
        assert written.state is not EngineState.READY, "the router does not have it"
    else:
        assert written.state is record.state
    if not record.state.ended and not before.state.ended:
        assert (written.straggler is None) == (before.straggler is None), "only the leader adds it, or takes it away"
        assert written.version == record.version
        if before.straggler is not None and before.straggler.needs > record.version:
            assert written.is_behind
        assert not (written.straggler and 0 < written.straggler.needs <= written.version), "it has caught up"


def test_engine_that_has_caught_up_is_ready_with_the_write_after_the_next() -> None:
    before = Engine(id="e", pool="p", state=EngineState.SYNCING, epoch=1, version=4,
                    straggler=Straggler(needs=5, missed=5, since=7.0))
    ready = before.replace(state=EngineState.READY, version=5, straggler=None)
    first = requested(before, ready)
    assert first == ready.replace(state=EngineState.SYNCING, straggler=Straggler(needs=0, missed=5, since=7.0))
    assert requested(first, ready).state is EngineState.READY
