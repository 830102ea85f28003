"""Pure parts of the loop: when a pool is in sync, how the seconds of a step add up, when a run ends early."""

import json
import resource
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.waiting import wait_until

from elastic_rl.coordinator.stragglers.rule import FollowLimits
from elastic_rl.etcd.records import Engine, EngineState, Straggler
from elastic_rl.pipeline import pool_sync
from elastic_rl.pipeline.pool_sync import PoolSync, Republish
from elastic_rl.pipeline.records.run_log import LineFile, RunLog
from elastic_rl.pipeline.records.step_timer import StepTimer
from elastic_rl.pipeline.rollout_pool import describe, in_sync, serves
from elastic_rl.pipeline.schedule import reached
from elastic_rl.pipeline.waits import Waits
from elastic_rl.report.build import read_records


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


def test_engine_that_loads_weights_keeps_the_pool_out_of_sync():
    assert not in_sync([engine(), engine(EngineState.SYNCING, version=4)], 5)
    assert not in_sync([engine(), engine(EngineState.SYNCING, version=5)], 5)
    assert in_sync([engine(), engine(EngineState.SYNCING, version=0)], 5), "it has no weights yet, so it is starting"


class Watched:
    """A pool whose engines the test sets, and a wait for version 5 of it."""

    def __init__(self, monkeypatch, engines, *, timeout_s=1000.0, first_pull_s=1000.0, enough=in_sync, look=None):
        monkeypatch.setattr(pool_sync, "PoolWatch", lambda *_: self)
        self.found, self.shown, self.published, self.needed, self.is_lost = engines, [], [], [], False
        self.look, self.looks = look or (lambda: self.is_lost), 0
        self.sync = PoolSync(None, None, Waits(lambda *what: self.shown.append(what), threading.Event()),
                        self.published.append, is_lost=self._look,
                        needs=lambda version, at_once: self.needed.append((version, at_once)),
                        first_pull_s=first_pull_s, limits=FollowLimits("50%", timeout_s))
        self.wait = self.sync.begin(5, enough)

    def close(self):
        """As of ``PoolWatch``."""

    def _look(self):
        self.looks += 1
        return self.look()

    def engines(self, _timeout_s):
        return self.found


@pytest.mark.parametrize(("limit_s", "waits"), [(1000.0, True), (0.0, False)])
@pytest.mark.parametrize("other", [engine(EngineState.SYNCING, version=5), engine(version=9, applying=10)])
def test_wait_for_an_engine_that_gets_no_further_has_a_limit(monkeypatch, other, limit_s, waits):
    pool = Watched(monkeypatch, [engine(version=4), other], timeout_s=limit_s)
    assert not pool.wait.poll(), "no engine that takes requests may serve an older version"
    pool.found = [engine(version=5), other]
    assert pool.wait.poll() is not waits and ("engines" in pool.shown[-1]) is waits


def test_few_engines_of_many_do_not_get_all_requests_before_a_quorum_has_the_version(monkeypatch):
    loading = [engine(EngineState.SYNCING, version=4)] * 9
    pool = Watched(monkeypatch, [engine(version=5), *loading], timeout_s=0.0)
    assert not pool.wait.poll()
    pool.found = [*[engine(version=5)] * 5, *loading[:5]]
    assert pool.wait.poll()


@pytest.mark.parametrize("enough", [in_sync, serves])
def test_run_goes_on_without_an_engine_once_that_is_out_of_the_router_and_not_before(monkeypatch, enough):
    slow = engine(version=4).replace(straggler=Straggler(needs=5, missed=5, since=1.0))
    pool = Watched(monkeypatch, [engine(version=5), slow], enough=enough)
    assert not pool.wait.poll(), "the router may still have it"
    assert "behind v4" in pool.shown[-1][2]
    pool.found = [engine(version=5), slow.replace(state=EngineState.SYNCING)]
    assert pool.wait.poll() and pool.shown[-1][1] == ""
    assert not pool.published


def test_wait_says_which_version_it_is_for_and_at_once_only_when_it_lasts(monkeypatch):
    pool = Watched(monkeypatch, [engine(version=4)])
    pool.wait.poll()
    assert pool.needed == [(5, False)]
    pool.wait._began -= pool_sync._SAID_AFTER_S
    pool.wait.poll()
    assert pool.needed[-1] == (5, True)
    pool.found = [engine(version=5)]
    assert pool.wait.poll() and pool.needed[-1] == (5, False)


def test_version_is_published_again_when_it_is_lost_and_not_when_an_engine_is_slow(monkeypatch):
    monkeypatch.setattr(pool_sync, "FIRST_S", 0.0)
    pool = Watched(monkeypatch, [engine(version=5), engine(version=4)])
    assert not any(pool.wait.poll() for _ in range(50)) and not pool.published
    wait_until(lambda: not pool.wait.poll() and pool.looks > 1, what="a look that found nothing lost")
    assert not pool.published
    pool.is_lost = True
    wait_until(lambda: not pool.wait.poll() and pool.published, what="the publish")
    assert pool.published[0] == 5


def test_version_that_no_new_engine_can_get_while_samples_are_made_is_published_again(monkeypatch):
    """The wait for the version was over, with an engine that has ended since."""
    pool = Watched(monkeypatch, [engine(version=5)])
    monkeypatch.setattr(pool_sync, "unserved", lambda *_: pool.found if not serves(pool.found, 0) else None)
    assert pool.wait.poll() and pool.sync.no_engine() == "" and not pool.looks
    pool.found = [engine(EngineState.SYNCING, version=0).replace(unfetchable_version=5)]
    wait_until(lambda: pool.sync.no_engine() and pool.looks, what="a look at once, which finds nothing lost")
    assert not pool.published
    monkeypatch.setattr(pool_sync, "FIRST_S", 0.0)
    pool.is_lost = True
    wait_until(lambda: "version 5" in pool.sync.no_engine() and pool.published, what="the publish")
    assert pool.published[0] == 5
    pool.found = [engine(version=6)]
    assert pool.sync.no_engine() == ""


def test_wait_goes_on_beside_a_look_whether_the_version_is_lost_and_begins_no_second_one(monkeypatch):
    """A look asks nodes that may not answer: the loop would serve nobody meanwhile, and not end its wait."""
    monkeypatch.setattr(pool_sync, "FIRST_S", 0.0)
    begun, over, ended = threading.Event(), threading.Event(), threading.Event()

    def look():
        begun.set()
        over.wait(20)
        ended.set()
        return True

    pool = Watched(monkeypatch, [engine(version=4)], look=look)
    assert not any(pool.wait.poll() for _ in range(20)) and begun.wait(20)
    pool.found = [engine(version=5)]
    assert pool.wait.poll() and not ended.is_set(), "the wait was blocked by the look"
    pool.wait.close()
    assert pool.sync.looks.held_s is not None, "calls of later waits would wait in line for it"
    pool.found = [engine(version=4)]
    again = pool.sync.begin(5)
    assert not any(again.poll() for _ in range(20)) and pool.looks == 1 and not pool.published
    over.set()
    wait_until(lambda: not again.poll() and pool.published, what="a look of the later wait")
    assert pool.looks == 2


@given(st.integers(0, 9))
def test_engine_that_is_applying_a_version_is_not_in_sync(version):
    assert not in_sync([engine(version=9, applying=10)], version)


def test_engines_that_update_one_after_the_other_serve_what_all_have_had():
    rolling = [engine(version=10), engine(version=9, applying=10), engine(EngineState.SYNCING, version=8)]
    assert serves(rolling, 9) and not serves(rolling, 10) and not in_sync(rolling, 9)
    assert not serves([engine(EngineState.SYNCING, version=9)], 9) and not serves([], 1)


def test_phases_of_a_step_add_up_to_its_total():
    timer = StepTimer()
    with timer.stage("generate"):
        time.sleep(0.002)
    with timer.stage("train"):
        time.sleep(0.004)
    timer.move("train", "publish_stall", 0.001)
    seconds = timer.seconds()
    total = seconds.pop("total")
    assert abs(sum(seconds.values()) - total) < 1e-9
    assert seconds["publish_stall"] == 0.001 and seconds["train"] >= 0.003


def test_incomplete_last_line_of_the_run_log_is_skipped(tmp_path):
    path = tmp_path / "steps.jsonl"
    RunLog(LineFile(path)).write("step", step=1)
    with path.open("a") as f:
        f.write(json.dumps({"kind": "step", "step": 2})[:-3])
    assert [r["step"] for r in read_records(path)] == [1]


def test_line_that_was_cut_off_costs_no_other_record(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text('{"kind": "step", "st')
    log = RunLog(LineFile(path))
    log.write("step", step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, limits[1]))  # the disk is full
    try:
        log.write("step", step=2)
        log.write("step", step=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.write("step", step=4)
    log.write("step", step=5)
    assert [r["step"] for r in read_records(path)] == [1, 4, 5]


def test_run_ends_early_only_after_two_consecutive_evaluations_at_the_goal():
    assert not reached([], 0.9) and not reached([0.95], 0.9)
    assert not reached([0.95, 0.8, 0.95], 0.9)
    assert reached([0.2, 0.9, 0.95], 0.9)
    assert not reached([1.0, 1.0], None)


def looked_at(republish, behind, times, *, lost):
    """The times of the looks. ``behind``: the engines at a time."""
    found = []
    for now in times:
        if republish.is_due(float(now), behind(now)):
            republish.looked(float(now), lost=lost)
            found.append(now)
    return found


def test_version_that_is_lost_again_and_again_is_looked_at_ever_less_often():
    slow = engine(version=4).replace(pull_apply_s=10.0)
    republish = Republish(first_pull_s=100.0, version=5)
    assert looked_at(republish, lambda now: [slow], range(400), lost=True) == [30, 90, 210], \
        "three pulls, then twice as long each time"
    later = looked_at(republish, lambda now: [slow], range(400, 60_000), lost=True)
    assert later[-1] - later[-2] == later[-2] - later[-3] == 3600, "an hour at most"
    assert not looked_at(Republish(100.0, 5), lambda now: [], range(100), lost=True)
    assert not looked_at(Republish(100.0, 5), lambda now: [slow] if now % 20 else [], range(400), lost=True)


def test_version_that_is_not_lost_is_looked_at_at_the_same_interval():
    slow = engine(version=4).replace(pull_apply_s=10.0)
    assert looked_at(Republish(100.0, 5), lambda now: [slow], range(125), lost=False) == [30, 60, 90, 120]


def test_engines_that_come_do_not_put_off_the_look_for_one_that_lacks_the_version():
    """With ``all`` in the place of ``any`` a pool to which engines come, or that grows, would never look."""
    def behind(now):
        return [engine(version=4), engine(version=4).replace(id=f"new-{now // 10}")]

    assert looked_at(Republish(first_pull_s=100.0, version=5), behind, range(40), lost=False) == [15, 30]


def test_first_pull_of_an_engine_may_take_longer_than_later_ones():
    new = engine(EngineState.SYNCING, version=0)
    assert looked_at(Republish(first_pull_s=100.0, version=5), lambda now: [new], range(250), lost=True) == [100]


def test_corrupt_version_is_looked_at_at_once_and_then_as_often_as_others():
    corrupt = engine(EngineState.SYNCING, version=0).replace(unfetchable_version=4)
    found = looked_at(Republish(100.0, 4), lambda now: [corrupt] if now > 2 else [], range(40), lost=False)
    assert found == [3, 18, 33]
    assert looked_at(Republish(100.0, 4), lambda now: [corrupt], range(100), lost=True) == [0, 30, 90]
    has_it = engine(version=4).replace(unfetchable_version=4)
    assert looked_at(Republish(first_pull_s=100.0, version=5), lambda now: [has_it], range(20), lost=False) == [15]


def test_older_version_that_was_corrupt_says_nothing_of_the_one_that_is_waited_for():
    new = engine(EngineState.SYNCING, version=0).replace(unfetchable_version=3)
    for version, looks in ((3, [0]), (2, [0]), (4, [])):
        assert looked_at(Republish(100.0, version), lambda now: [new], range(15), lost=False) == looks
    assert looked_at(Republish(100.0, 4), lambda now: [new], range(250), lost=True) == [100], "its first pull"


def test_wait_for_engines_names_a_few_of_those_that_lack_the_version():
    assert describe([], 4) == "engines that serve version 4: there is none"
    text = describe([engine(version=3), *[engine(EngineState.SYNCING, version=2)] * 20, engine(version=4)], 4)
    assert "e ready v3" in text and "13 more" in text and len(text) < 400
