"""Hosts of a cluster, their network and what runs on them under faults, with clients that change what is wanted of the
cluster through every coordinator, judged by the log of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hosts import require_namespaces
from support.tiers import full

from chaos_tests import target_hosts
from chaos_tests.event_log import read
from chaos_tests.faults.catalogue import HOST_FAULTS
from chaos_tests.nemesis.schedule import Schedule, Strike, drawn
from chaos_tests.validate.hosts import check

FAULTS, STEPS = 12, 90


def violations(schedule: Schedule, folder: Path) -> list[str]:
    """Of a run that is played now."""
    require_namespaces()
    print(schedule.to_json())
    log = folder / "events.jsonl"
    target_hosts.play(schedule, log, print)
    return [*map(str, check(read(log), cluster=target_hosts.CLUSTER))]


@full(proved_in="tests/integration/host/test_faults_of_hosts.py tests/integration/host/test_links_of_hosts.py",
      why="partition, power cut and a killed leader under clients that change the cluster")
@pytest.mark.timeout(3600)
def test_cluster_keeps_every_rule_when_hosts_are_apart_and_lose_power(tmp_path: Path) -> None:
    """The host whose coordinator leads is apart from the others, but not from its clients; then the host with the run
    loses its power while the leader is killed."""
    assert violations(Schedule(1, 9, (
        Strike(3, ("leader_host_apart",)),
        Strike(6, ("holder_host_powered_off", "leader_host_coordinator_killed")))), tmp_path) == []


@full(proved_in="tests/integration/host/test_faults_of_hosts.py tests/integration/host/test_links_of_hosts.py",
      why="every fault of hosts, in orders and pairs that nobody has chosen")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cluster_keeps_every_rule_under_drawn_faults_of_hosts(seed: int, tmp_path: Path) -> None:
    weights = {name: entry.weight for name, entry in HOST_FAULTS.items()}
    assert violations(drawn(seed, STEPS, FAULTS, weights), tmp_path) == []
