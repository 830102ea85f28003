"""The arithmetic and the load of the control plane's measurements. Nothing here is timed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic_rl.bench import control
from elastic_rl.bench.control import api, large_job, scale
from elastic_rl.config import parse
from elastic_rl.coordinator.operations import state_machine
from elastic_rl.coordinator.snapshot import ClusterSnapshot
from elastic_rl.etcd.records import Engine, EngineState, OperationState


def test_requests_have_rows_of_all_paths_together_and_of_each() -> None:
    found = {path: [float(n)] * 100 for n, path in enumerate(api.PATHS.values(), start=1)}
    rows = {row.id: row for row in api.request_rows(found, [0.5, 0.5, 0.7], [2.0], window_s=10.0)}
    assert rows.keys() == {row for row in control.SUITE.rows["api"] if row.startswith("api-")}
    assert rows["api-p99"].value == len(api.PATHS) and rows["api-p99"].met is True
    assert rows["api-p50"].limit == 0.5 and rows["api-p50"].alternatives.popitem()[1] == 2.0
    assert rows["api-rps"].value == 10.0 * len(api.PATHS)
    assert rows["api-p99-pools"].value == 2.0


def test_settings_of_the_large_job_keep_its_records() -> None:
    cfg = parse({"job": "bench", **large_job.SETTINGS})
    assert cfg.coordinator.max_events > large_job.EVENTS and cfg.dcs.keep_versions > large_job.VERSIONS


@pytest.mark.parametrize("n", [0, large_job.ENDED_OPERATIONS - 1])
def test_first_operations_of_the_large_job_have_ended(n: int) -> None:
    assert large_job.operation(n, now=1e9).state.ended


def test_other_operations_of_the_large_job_run_while_their_engines_live() -> None:
    op = large_job.operation(large_job.ENDED_OPERATIONS, now=1e9)
    engine_id = op.target.removeprefix("engines/")
    engine = Engine(id=engine_id, pool=op.params["pool"], state=EngineState.READY, epoch=1)
    now = state_machine.advance(op, ClusterSnapshot(job="bench", now=1e9, engines={engine_id: engine}))
    assert now.state is OperationState.RUNNING and now.phase == "draining"
    json.loads(now.encode())


def test_collected_heartbeats_are_beside_those_that_members_write_themselves_if_these_were_in_time() -> None:
    collected, own = scale.Cost(333, 0.4, 0.1, 0.3, 40, 0, 200), scale.Cost(3333, 0.8, 0.5, 1.1, 90, 0, 300)
    rows = {row.id: row for row in scale.rows(collected, own, members=10_000, hosts=1000)}
    assert tuple(rows) == control.SUITE.rows["scale"]
    assert rows["hosts-1000-writes"].value == 333 and [*rows["hosts-1000-writes"].alternatives.values()] == [3333]
    assert rows["hosts-1000-cpu"].met and rows["hosts-1000-api-p99"].met and rows["hosts-1000-late"].met
    assert rows["hosts-1000-cpu-follower"].value == 0.1 and rows["hosts-1000-cpu-etcd"].value == 0.3
    assert rows["hosts-1000-memory"].value == 200
    by_path = {row.id: row for row in scale.rows(replace(collected, p99_of_path_ms={"job": 12.0}), own, 10_000, 1000)}
    assert by_path["hosts-1000-api-p99"].alternatives["job"] == 12
    assert "job" not in by_path["hosts-1000-cpu"].alternatives
    late = {row.id: row for row in scale.rows(collected, replace(own, late=70), members=10_000, hosts=1000)}
    assert not late["hosts-1000-cpu"].alternatives
    assert "70 a second were late" in str(late["hosts-1000-cpu"].unmeasured_alternatives)
