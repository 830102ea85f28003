"""Pure parts of the roles: when a pool is in sync, how the seconds of a step add up, when a run ends early."""

import json
import time

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd.records import Engine, EngineState
from elastic_rl.report.build import read_records
from elastic_rl.roles.loop import reached
from elastic_rl.roles.rollout_pool import in_sync
from elastic_rl.roles.run_log import RunLog
from elastic_rl.roles.step_timer import StepTimer


def engine(state=EngineState.READY, version=5, applying=0):
    return Engine(id="e", pool="rollout", state=state, epoch=1, version=version, applying=applying)


def test_pool_without_a_ready_engine_is_not_in_sync():
    assert not in_sync([], 1)
    assert not in_sync([engine(EngineState.STARTING)], 1)


def test_routable_engine_with_an_older_version_is_not_in_sync():
    assert in_sync([engine(version=5), engine(version=6)], 5)
    assert not in_sync([engine(version=4), engine(version=5)], 5)


def test_engines_that_are_not_routable_do_not_count():
    for state in (EngineState.STARTING, EngineState.QUARANTINED, EngineState.DEAD, EngineState.DRAINING):
        assert in_sync([engine(), engine(state, version=0)], 5)


@given(st.integers(0, 9))
def test_engine_that_is_applying_a_version_is_not_in_sync(version):
    assert not in_sync([engine(version=9, applying=10)], version)


def test_phases_of_a_step_add_up_to_its_total():
    timer = StepTimer()
    with timer.phase("total"):
        with timer.phase("generate"):
            time.sleep(0.002)
        with timer.phase("train"):
            time.sleep(0.004)
    seconds = timer.seconds(inside={"publish_stall": ("train", 0.001)})
    total = seconds.pop("total")
    assert abs(sum(seconds.values()) - total) < 1e-9
    assert seconds["publish_stall"] == 0.001


def test_incomplete_last_line_of_the_run_log_is_skipped(tmp_path):
    log = RunLog(tmp_path / "steps.jsonl")
    log.write("step", step=1)
    with log.path.open("a") as f:
        f.write(json.dumps({"kind": "step", "step": 2})[:-3])
    assert [r["step"] for r in read_records(log.path)] == [1]


def test_run_ends_early_only_after_two_consecutive_evaluations_at_the_goal():
    assert not reached([], 0.9) and not reached([0.95], 0.9)
    assert not reached([0.95, 0.8, 0.95], 0.9)
    assert reached([0.2, 0.9, 0.95], 0.9)
    assert not reached([1.0, 1.0], None)
