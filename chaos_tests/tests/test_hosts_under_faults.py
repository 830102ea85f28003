"""Test hosts of a cluster, their network and what runs on them under faults, with clients that change what is wanted of
the cluster through every coordinator."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from light_runs import OF_RUNS_WITHOUT_FAULTS, records
from support.hosts import require_namespaces
from support.tiers import full, parametrize

from chaos_tests import results, runner, target_hosts
from chaos_tests.event_log import Kind, read
from chaos_tests.nemesis.schedule import Schedule, Strike
from chaos_tests.scenarios import SCENARIOS

pytestmark = pytest.mark.timeout(3600)
_PROVED_IN = ("chaos_tests/tests/test_runner_with_light_job.py tests/unit/chaos/test_runner.py "
              "tests/unit/faults/test_host_faults.py tests/integration/host/test_links_of_hosts.py")
"""The runner with the same run on one host; what is special to hosts; when their faults strike; and their network."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Each host has a /tmp of its own, so the results are elsewhere."""
    require_namespaces()
    made = Path(tempfile.mkdtemp(prefix="erl-chaos-", dir="/var/tmp"))
    try:
        yield made / "results"
    finally:
        shutil.rmtree(made, ignore_errors=True)


@parametrize("fault", ["leader_host_apart", "leader_host_coordinator_killed"], proved_in=_PROVED_IN,
             why="three hosts with all that a cluster has need 80 to 95 s for one fault")
def test_run_on_hosts_is_struck_watched_and_judged(fault: str, folder: Path) -> None:
    schedule = Schedule(1, 0, (Strike(0, (fault,), 3.0),), 0.25, "hosts")
    outcome = runner.run(schedule, folder, say=print)
    assert [*outcome.wrong] == [] and not outcome.failed
    [played] = records(folder, Kind.FAULT)
    assert played["name"] == fault and played["healed_at"] >= played["detected_at"] >= played["injected_at"]
    assert {event["kind"] for event in read(folder / "events.jsonl")} >= {*Kind} - {
        Kind.GAP, Kind.PRESENT, Kind.LEFTOVER, Kind.UNANSWERED, *OF_RUNS_WITHOUT_FAULTS
        }, "a kind that nobody has written"
    assert {"I1", "I2", "I3", "I5", "I8", "I9", "I10", "I11", "I12", "I14"} <= {*outcome.kept}
    assert results.outcome_of(folder) == outcome and results.schedule_at(folder) == schedule
    logs = [path.name for path in (folder / "cluster" / target_hosts.LOGS).rglob("*.log*")]
    assert sum(name.startswith("coordinator-") for name in logs) == target_hosts.HOSTS, "each host's"


@full(proved_in=_PROVED_IN, why="a power cut while the leader is killed, two faults at once")
def test_cluster_keeps_every_rule_when_a_host_loses_its_power_and_the_leader_is_killed(folder: Path) -> None:
    at_once = Strike(0, ("holder_host_powered_off", "leader_host_coordinator_killed"), 5.0)
    outcome = runner.run(Schedule(1, 0, (at_once,), 0.5, "hosts"), folder, say=print)
    assert [*outcome.wrong] == [] and not outcome.failed


@full(proved_in=_PROVED_IN, why="every fault of hosts, in orders and pairs that nobody has chosen")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cluster_keeps_every_rule_under_drawn_faults_of_hosts(seed: int, folder: Path) -> None:
    outcome = runner.run(SCENARIOS["hosts"].schedule(seed, minutes=10.0, faults=12), folder, say=print)
    assert [*outcome.wrong] == [] and not outcome.failed
