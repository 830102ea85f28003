"""What the driver writes into the record of an engine that is to leave its pool."""

from __future__ import annotations

import pytest

from elastic_rl.driver.pool import draining
from elastic_rl.etcd.records import Engine, EngineState


def record(state: EngineState) -> bytes:
    return Engine(id="e", pool="rollout", state=state, epoch=1, version=7, reason="why").encode()


@pytest.mark.parametrize("state", [state for state in EngineState if not state.ended])
def test_engine_that_lives_is_asked_to_drain(state: EngineState) -> None:
    written = draining(record(state))
    assert written is not None
    found = Engine.decode(written)
    assert (found.state, found.version) == (EngineState.DRAINING, 7) and found.updated_at > 0


@pytest.mark.parametrize("raw", [record(EngineState.DEAD), record(EngineState.QUARANTINED), None, b"a later release"])
def test_end_of_an_engine_is_not_overwritten(raw: bytes | None) -> None:
    assert draining(raw) is raw
