"""The catalogue of faults: what schedules name is what the run's records name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos_tests.faults.catalogue import FAULTS, WEIGHTS, Need, weights
from elastic_rl import config
from elastic_rl.faults.context import FaultContext
from elastic_rl.faults.processes import PROCESS_KINDS, Struck, Way
from elastic_rl.faults.states import PUBLISHING


@pytest.fixture
def context(tmp_path: Path) -> FaultContext:
    nothing: Any = None
    return FaultContext(config.parse({"job": "j", "run_dir": str(tmp_path)}), nothing, nothing, nothing)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_has_the_name_of_its_entry(context: FaultContext, name: str) -> None:
    entry = FAULTS[name]
    assert entry.make(context).name == name
    assert entry.weight > 0 and entry.what and "\n" not in entry.what


def test_faults_are_left_out_whose_needs_are_not_met() -> None:
    has = {Need.PTRACE, Need.ONE_HOST}
    assert "trainer_rank_exited" in weights(has) and "trainer_rank_exited" not in weights(has - {Need.PTRACE})
    assert WEIGHTS.keys() < FAULTS.keys()
    assert weights({*Need}).keys() == FAULTS.keys()
    on_one_host, on_hosts = (weights({*Need} - {other}).keys() for other in (Need.TEST_HOSTS, Need.ONE_HOST))
    assert on_one_host | on_hosts == FAULTS.keys() and not on_one_host & on_hosts
    assert "leader_host_apart" in on_hosts and "engine_killed" in on_one_host


def test_combinations_that_make_no_sense_are_refused(context: FaultContext) -> None:
    assert {*PROCESS_KINDS} >= {
        "engine", "scheduler", "trainer_rank", "driver", "coordinator", "dcs", "etcd", "host_agent"}
    for way, state, seconds in ((Way.KILLED, None, 3.0), (Way.PAUSED, None, 0.0), (Way.EXITED, PUBLISHING, 0.0)):
        with pytest.raises(ValueError, match="trainer_rank cannot be"):
            Struck(context, "trainer_rank", way, state=state, seconds=seconds)


@pytest.mark.parametrize(("name", "role"), [
    ("engine_killed_generating", "engine"), ("scheduler_exited", "engine"), ("trainer_agent_killed", "trainer"),
    ("trainer_rank_stopped", "trainer"), ("driver_terminated", "driver"), ("actor_exited", "actor"),
    ("engine_paused", ""), ("router_exited", ""), ("dcs_killed", ""), ("run_killed", "")])
def test_fault_that_ends_members_of_the_job_says_of_which_role(name: str, role: str) -> None:
    """In their place others have to begin; a process that goes on, and one of the cluster, is none of them."""
    assert FAULTS[name].loses == role
