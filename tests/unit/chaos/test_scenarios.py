"""Scenarios: what they draw from their seeds, and that their jobs' settings are settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import chaos_tests
from chaos_tests import results
from chaos_tests.faults.catalogue import FAULTS
from chaos_tests.history import Unknown
from chaos_tests.model import models
from chaos_tests.scenarios import SCENARIOS
from chaos_tests.target import own_config
from chaos_tests.traffic import cluster_changes, pool_changes, workloads
from chaos_tests.traffic.job_clients import JobClients
from chaos_tests.traffic.workloads import WORKLOADS
from chaos_tests.validate.growth import FEWEST_STEPS

SCHEDULES = Path(chaos_tests.__file__).parent / "schedules"


@pytest.mark.parametrize("name", SCENARIOS)
def test_schedule_of_each_scenario_follows_from_its_seed(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.schedule(5) == scenario.schedule(5)
    found = scenario.schedule(5)
    assert found.faults == (2 if scenario.resume_fault else scenario.count) and found.scenario == name
    assert (found.steps, found.minutes) == (scenario.steps, scenario.minutes)
    assert {fault for strike in found.strikes for fault in strike.faults} <= FAULTS.keys()


@pytest.mark.parametrize("name", SCENARIOS)
def test_job_of_each_scenario_can_be_configured_with_further_settings(name: str, tmp_path: Path) -> None:
    cfg = own_config(tmp_path, SCENARIOS[name].settings, ("--train.lr=0.25",), seed=9)
    assert (cfg.seed, cfg.train.lr, cfg.train.stop_eval_accuracy) == (9, 0.25, None)
    assert cfg.run_dir.is_relative_to(tmp_path) and cfg.job != own_config(tmp_path, {}, seed=9).job


def test_soak_has_the_faults_that_others_have_published() -> None:
    found = SCENARIOS["soak"].schedule(1)
    assert found.minutes == 30.0 and found.faults >= 62 and SCENARIOS["soak"].baseline


def test_longer_run_has_more_faults_and_a_short_one_as_many_as_find_room() -> None:
    drawn = SCENARIOS["drawn"]
    assert drawn.schedule(1, minutes=2 * drawn.minutes).faults == 2 * drawn.count
    assert drawn.schedule(1, steps=280).faults == round(drawn.count * 280 / (drawn.minutes * drawn.steps_per_minute))
    assert 1 <= drawn.schedule(1, minutes=2.0).faults < drawn.schedule(1, minutes=10.0).faults
    assert drawn.schedule(1, minutes=2.0).by_time


@pytest.mark.parametrize("file", sorted(SCHEDULES.glob("*.json")), ids=lambda file: file.stem)
def test_schedule_of_a_run_whose_figures_are_published_can_be_run_again(file: Path) -> None:
    found = results.schedule_at(file)
    assert file.stem == f"{found.scenario}-{found.seed}" and found.faults
    own_config(Path(), SCENARIOS[found.scenario].settings, found.settings, seed=found.seed)


def test_growth_loses_what_its_run_is_on_twice_where_it_is_long_enough() -> None:
    growth = SCENARIOS["growth"]
    found = growth.schedule(1)
    assert [(strike.step, strike.faults) for strike in found.strikes] == [(300, ("raylet_killed",)), (
        found.steps - 300, ("raylet_killed",))]
    assert found.fault_free_steps == found.steps - 600
    assert growth.schedule(1, steps=FEWEST_STEPS).strikes == growth.schedule(1, faults=0).strikes == ()


def test_only_what_is_allowed_is_drawn() -> None:
    found = SCENARIOS["drawn"].schedule(1, faults=4, only=["engine_killed"])
    assert {name for strike in found.strikes for name in strike.faults} == {"engine_killed"} and found.faults == 4
    with pytest.raises(ValueError, match="a schedule has faults"):
        SCENARIOS["drawn"].schedule(1, only=[])


def test_scenarios_name_traffic_that_there_is() -> None:
    for scenario in SCENARIOS.values():
        assert {*scenario.traffic} <= {*WORKLOADS} and bool(scenario.traffic) == bool(scenario.floor_answers)
    assert all({"pools", "silences", "watches"} <= {*SCENARIOS[name].traffic} for name in ("quick", "drawn", "soak"))


@pytest.mark.parametrize("name", [name for name in WORKLOADS if WORKLOADS[name].model not in ("", models.STREAM)])
def test_what_clients_do_is_of_the_model_that_their_traffic_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(*_: Any, **__: Any) -> Any:
        raise Unknown

    api = cluster_changes.ApiTarget({"r": "https://r"}, "j", {}, False, {"a": "10.0.0.1"})
    for module in (cluster_changes, pool_changes):
        monkeypatch.setattr(module, "send", unanswered)
    monkeypatch.setattr(cluster_changes.ClusterCalls, "ready_engine", lambda *_: "engine")
    monkeypatch.setattr(cluster_changes.ClusterCalls, "engine_at", lambda *_: "")
    monkeypatch.setattr(workloads, "_api", lambda target: api)
    monkeypatch.setattr(workloads, "_engines", lambda target: 1)
    nothing: Any = None
    clients = WORKLOADS[name].make(nothing, 1, nothing)
    assert isinstance(clients, JobClients)
    clients.stop()  # no pause between calls
    for seed in range(200):
        clients.act("r", random.Random(seed))
    assert {operation.model for operation in clients.recorder.operations()} == {WORKLOADS[name].model}


def test_no_fault_writes_the_pool_that_clients_read() -> None:
    for scenario in SCENARIOS.values():
        if {"pools", "scales"} & {*scenario.traffic}:
            assert "racing_requests" not in scenario.faults


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_strike_has_two_faults_of_one_part_or_of_one_host(name: str) -> None:
    strikes = [strike for seed in range(40) for strike in SCENARIOS[name].schedule(seed).strikes]
    for strike in strikes:
        struck = [one for fault in strike.faults for one in FAULTS[fault].victims or {FAULTS[fault].part}]
        assert len({*struck}) == len(struck), strike
    if name == "every":  # weights are compared after each fault alone
        assert SCENARIOS[name].rest_steps and not SCENARIOS[name].together
    assert bool(SCENARIOS[name].count and SCENARIOS[name].together) == any(len(strike.faults) > 1 for strike in strikes)
