"""The election under thousands of seeds of pauses, cuts, lost and late messages, ended leases and wrong clocks (I1)."""

from __future__ import annotations

import pytest
from support.election_simulation import TTL_S, Seen, World

from elastic_rl.coordinator.election.protocol import Campaign, ElectionProtocol, ReadCandidates, Wait
from elastic_rl.etcd.transaction import KeyValue

QUIET_AT, END = 24.0, 44.0
SEEDS, BATCHES = 2000, 4


def _run(seed: int) -> Seen:
    return World(seed, replicas=2 + seed % 3, quiet_at=QUIET_AT).run(END)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_write_of_a_stale_leader_is_taken_and_somebody_leads_in_the_end(batch: int) -> None:
    refused = double = terms = 0
    for seed in range(batch, SEEDS, BATCHES):
        seen = _run(seed)
        assert seen.faults == [], f"seed {seed}"
        late = [at for at, _, _ in seen.applied if at > END - 2 * TTL_S]
        assert late, f"seed {seed}: nobody led at the end"
        after = {term for at, _, term in seen.applied if at > QUIET_AT + 4 * TTL_S}
        assert len(after) == 1, f"seed {seed}: the lead went from one to the other without a cause: {after}"
        refused, double, terms = refused + seen.refused, double + seen.double, terms + len(seen.terms)
    assert refused > SEEDS / BATCHES and double > 0 and terms > 2 * SEEDS / BATCHES, "the faults did not happen"


def test_a_seed_gives_the_same_history_each_time() -> None:
    assert _run(7) == _run(7)


# -- one stay, step by step ------------------------------------------------------------------------------------------
def _kv(key: str, created: int) -> KeyValue:
    return KeyValue(key, b"", created, created, 1, 0)


def test_a_candidate_waits_leads_and_is_over_when_its_key_is_gone() -> None:
    stay = ElectionProtocol("b", 3.0, lambda: True)
    steps = stay.steps()
    assert next(steps) == Campaign() and steps.send(9) == ReadCandidates()
    assert steps.send([_kv("b", 9), _kv("a", 4)]) == Wait(1.0) and not stay.leads
    assert steps.send(None) == ReadCandidates() and steps.send([_kv("b", 9)]) == Wait(1.0) and stay.leads
    assert steps.send(None) == ReadCandidates() and isinstance(steps.send(None), Wait) and stay.leads  # etcd is silent
    assert steps.send(None) == ReadCandidates()
    with pytest.raises(StopIteration):
        steps.send([_kv("b", 12)])  # another process of this name
    assert not stay.leads


def test_a_candidate_whose_lease_ended_by_its_own_clock_does_not_lead() -> None:
    alive = True
    stay = ElectionProtocol("a", 3.0, lambda: alive)
    steps = stay.steps()
    next(steps)
    steps.send(4)
    steps.send([_kv("a", 4)])
    assert stay.leads
    alive = False
    assert not stay.leads
    with pytest.raises(StopIteration):
        steps.send(None)


def test_a_name_that_is_taken_is_left_alone_for_a_while() -> None:
    stay = ElectionProtocol("a", 4.0, lambda: True)
    steps = stay.steps()
    next(steps)
    assert steps.send(0) == Wait(1.0) and not stay.leads
