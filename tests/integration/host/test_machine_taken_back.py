"""A spot machine that its provider takes back: real etcd, a leader, agents, and notices in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.host_agents import KEYS, Hosts, times
from support.waiting import wait_until

from elastic_rl.coordinator.cluster_pass import ClusterLimits
from elastic_rl.coordinator.cluster_reconciler import ClusterReconciler
from elastic_rl.coordinator.election.election import Election
from elastic_rl.coordinator.hosts import changes
from elastic_rl.coordinator.hosts.view import HostView, get_host
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import (
    HostPhase,
    HostState,
    JobPhase,
    JobRecord,
    PreemptionNotice,
    RunStatus,
    driver_of,
)
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys

TTL_S = 5.0
DRIVER = driver_of("j")


@pytest.fixture
def leader(own_etcd: EtcdClient) -> Iterator[ClusterReconciler]:
    election = Election(own_etcd, KEYS, "r0", "", 10).start()
    reconciler = ClusterReconciler(own_etcd, KEYS, election, ClusterLimits(times(TTL_S)))
    reconciler.start()
    yield reconciler
    reconciler.stop()
    election.stop()


def test_run_leaves_a_machine_that_is_taken_back_and_the_next_one_of_its_name_is_used(
        own_etcd: EtcdClient, leader: ClusterReconciler, host: Hosts, tmp_path: Path) -> None:
    notice, spot, other = tmp_path / "notice", host("spot", ttl_s=TTL_S), host("other", ttl_s=TTL_S)

    def shown(name: str = "spot") -> HostView:
        return get_host(own_etcd, KEYS, name)

    def followed() -> PreemptionNotice | None:
        state = readable_one(own_etcd.get(KEYS.host_state("spot")), HostState)
        return state.preemption if state is not None else None

    def await_phase(phase: HostPhase) -> None:
        wait_until(lambda: own_etcd.get(KEYS.host("spot")) is not None and shown().phase is phase, what=phase.value)

    agent = spot.start_here(str(notice))
    await_phase(HostPhase.READY)
    own_etcd.put(KEYS.job("j"), JobRecord(submission=1).encode())
    own_etcd.put(KEYS.run_status("j"), RunStatus(submission=1, phase=JobPhase.RUNNING).encode())
    spot.await_service(DRIVER)
    other.start_here()
    wait_until(lambda: own_etcd.get(KEYS.host("other")) is not None and shown("other").phase is HostPhase.READY,
               what="the other host")

    # The notice: the run moves, once, and the job's event log says why.
    notice.write_text('{"reason": "rack b4 is switched off"}')
    other.await_service(DRIVER)
    await_phase(HostPhase.LEFT)
    assert shown().preemption is not None and "rack b4 is switched off" in shown().reason
    said = [event for event in events.recent(own_etcd, Keys("j")) if event.kind == "host.preemption"]
    assert [event.subject for event in said] == ["spot"]

    # It is withdrawn: the drain stays, until an operator takes it back.
    notice.unlink()
    wait_until(lambda: followed() is None, what="the withdrawal")
    assert shown().phase is HostPhase.LEFT and shown().spec.drain is not None
    changes.change(own_etcd, KEYS, "spot", {"cordoned": False, "drain": None}, by="ann")
    await_phase(HostPhase.READY)

    # Another notice, which the operator overrules: it is not followed twice.
    notice.write_text("")
    await_phase(HostPhase.LEFT)
    changes.change(own_etcd, KEYS, "spot", {"cordoned": False, "drain": None}, by="ann")
    await_phase(HostPhase.READY)
    assert shown().preemption is not None

    # A third one, and the machine ends. Another machine gets its name.
    notice.write_text('{"reason": "at last"}')
    await_phase(HostPhase.LEFT)
    agent.close()
    spot.power_off()
    wait_until(lambda: own_etcd.get(KEYS.host("spot")) is None, what="the end of its lease")
    assert shown().phase is HostPhase.LEFT
    notice.unlink()
    (spot.folder / "incarnation").unlink()
    spot.start_here(str(notice))
    await_phase(HostPhase.READY)
    assert shown().spec.drain is None and other.await_service(DRIVER)
    assert len([event for event in events.recent(own_etcd, Keys("j")) if event.kind == "host.preemption"]) == 3
