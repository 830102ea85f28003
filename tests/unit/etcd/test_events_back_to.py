"""The newest events, as many as somebody has not seen yet."""

from __future__ import annotations

import pytest

from chaos_tests.sim.election import SimulatedEtcd
from chaos_tests.sim.store import SimClient
from elastic_rl.etcd import events
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Event
from elastic_rl.etcd.transaction import Op

KEYS = Keys("j")


@pytest.mark.parametrize(("known", "found"), [(850, 200), (800, 200), (799, 800), (200, 800), (199, 1000), (-1, 1000)])
def test_events_are_read_back_to_one_that_is_known(known: int, found: int) -> None:
    """``known``: the newest that is."""
    etcd = SimClient(SimulatedEtcd(), lambda: 0.0)
    for n in range(1000):
        etcd.model.txn([], [Op.put(KEYS.event(f"{n:06d}"), Event(
            id=str(n), at=float(n), kind="engine.dead", subject="e", message="m").encode())])
    read = events.back_to(etcd, KEYS, lambda event: event.at <= known, most=1000)
    assert [event.id for event in read] == [str(n) for n in range(1000 - found, 1000)]
