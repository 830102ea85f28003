"""The arithmetic and the load of the control plane's measurements. Nothing here is timed."""

from __future__ import annotations

import json

import pytest

from elastic_rl.bench import control
from elastic_rl.bench.control import api, large_job
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
