"""The election under many seeds of pauses, partitions, lost and late messages, expired leases and wrong clocks (I1)."""

from __future__ import annotations

import pytest
from support.budget import seeds

from chaos_tests.sim.election import run
from elastic_rl.coordinator.election.protocol import Campaign, ElectionProtocol, ReadCandidates, Wait
from elastic_rl.etcd.transaction import KeyValue

SEEDS, BATCHES = seeds(40), 4


@pytest.mark.parametrize("batch", range(BATCHES))
def test_stale_leaders_write_nothing_and_one_replica_leads_in_the_end(batch: int) -> None:
    refused = double = terms = 0
    for seed in range(batch, SEEDS, BATCHES):
        try:
            seen = run(seed)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e
        refused, double, terms = refused + seen.refused, double + seen.double, terms + len(seen.terms)
    assert refused > SEEDS / BATCHES and double > 0 and terms > 2 * SEEDS / BATCHES, "too few faults happened"


def test_seed_reproduces_the_same_history() -> None:
    assert run(7) == run(7)


# -- one candidacy, step by step ---------------------------------------------------------------------------------------
def _kv(key: str, created: int) -> KeyValue:
    return KeyValue(key, b"", created, created, 1, 0)


def test_candidate_waits_leads_and_ends_when_its_key_is_gone() -> None:
    protocol = ElectionProtocol("b", 3.0, lambda: True)
    steps = protocol.steps()
    assert next(steps) == Campaign() and steps.send(9) == ReadCandidates()
    assert steps.send([_kv("b", 9), _kv("a", 4)]) == Wait(3.0) and not protocol.leads
    assert steps.send(None) == ReadCandidates() and steps.send([_kv("b", 9)]) == Wait(3.0) and protocol.leads
    assert steps.send(None) == ReadCandidates()
    assert isinstance(steps.send(None), Wait) and protocol.leads  # etcd did not answer
    assert steps.send(None) == ReadCandidates()
    with pytest.raises(StopIteration):
        steps.send([_kv("b", 12)])  # another process of this name
    assert not protocol.leads


def test_candidate_whose_lease_expired_by_its_own_clock_does_not_lead() -> None:
    alive = True
    protocol = ElectionProtocol("a", 3.0, lambda: alive)
    steps = protocol.steps()
    next(steps)
    steps.send(4)
    steps.send([_kv("a", 4)])
    assert protocol.leads
    alive = False
    assert not protocol.leads
    with pytest.raises(StopIteration):
        steps.send(None)


def test_candidate_waits_while_its_name_is_taken() -> None:
    protocol = ElectionProtocol("a", 4.0, lambda: True)
    steps = protocol.steps()
    next(steps)
    assert steps.send(0) == Wait(1.0) and not protocol.leads
