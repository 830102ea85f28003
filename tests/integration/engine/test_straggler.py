"""A real engine that cannot follow, beside one that does: it leaves the router, the run goes on without it, and it
comes back. The leader, the driver's part of the pool and of its router, the wait of the loop and the job's status are
those of a run; the trainer is the test, which publishes a version for each step."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from support.engine_testbed import EngineTestbed
from support.leader import Leader
from support.placed_actors import stand_in_for_ray
from support.tiers import full
from support.waiting import wait_until

from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.coordinator.stragglers.rule import FollowLimits
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.driver import external_engines, pool
from elastic_rl.driver.pool import EnginePool
from elastic_rl.driver.router_supervisor import RouterSupervisor
from elastic_rl.errors import NodeUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.records import EngineState, PoolSpec
from elastic_rl.pipeline.pool_sync import PoolSync
from elastic_rl.pipeline.records.run_log import JobStatusWriter
from elastic_rl.pipeline.waits import Waits

SLOW, FAST = "rollout-slow", "rollout-fast"
LIMITS = FollowLimits("50%", timeout_s=1.0, catch_up_s=10_000.0)


class SlowFetch:
    """Stands between the engine and its checkpoint node. While ``slow`` is set a pull of it does not end: it gets no
    part, as from a node whose network is almost gone, and its runner sees nothing else meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow, self.over = threading.Event(), threading.Event()
        self.stuck = threading.Event()
        whole = Puller.pull

        def pull(puller: Puller, *args: object, **options: object) -> object:
            while puller._name == f"engine-{SLOW}" and self.slow.is_set():
                self.stuck.set()
                if self.over.wait(0.05):
                    raise NodeUnavailable("the test is over")
            return whole(puller, *args, **options)

        monkeypatch.setattr(Puller, "pull", pull)


class Run:
    """The parts of a run that decide about its engines, beside the testbed's engines, router and node."""

    def __init__(self, testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> None:
        stand_in_for_ray(monkeypatch, pool, external_engines)
        self.testbed, self.fetches, etcd, keys = testbed, SlowFetch(monkeypatch), testbed.etcd, testbed.keys
        config = testbed.context(follow_timeout_s=LIMITS.timeout_s, catch_up_timeout_s=LIMITS.catch_up_s).config
        coordinator = config.coordinator.model_copy(update={"reconcile_interval_s": 0.1, "hang_min_s": 10_000.0,
                                                            "hang_max_s": 20_000.0})
        self.config = config.model_copy(update={"coordinator": coordinator})
        etcd.put(keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=0, stream="policy").encode())
        term = fencing.begin_term(etcd, keys, testbed.ctx.epoch, "test")
        self.status = JobStatusWriter(etcd, keys, FencedWriter.of_term(etcd, keys, testbed.ctx.epoch, term), steps=9,
                                      seed=0)
        self.status.write("rl")
        self.shown: list[str] = []
        self.published_again: list[int] = []
        self.sync = PoolSync(etcd, keys, Waits(lambda stage, kind, what: self.shown.append(what), threading.Event()),
                             self.published_again.append, is_lost=lambda: False, needs=self.status.needs,
                             first_pull_s=10_000.0, limits=LIMITS)
        self.supervisor = RouterSupervisor(testbed.router, epoch=testbed.ctx.epoch, interval_s=0.1,
                                           access=testbed.access)
        self.supervisor.start()
        self.pool = EnginePool(testbed.ctx, etcd, has_left=self.supervisor.has_left)
        self.leaders: list[Leader] = []
        self._over = threading.Event()
        self._driver = threading.Thread(target=self._drive, daemon=True)

    def start(self) -> None:
        self.lead()
        self._driver.start()

    def lead(self) -> Leader:
        self.leaders.append(Leader(self.testbed.etcd, self.testbed.keys, self.config, f"c{len(self.leaders)}"))
        return self.leaders[-1]

    def _drive(self) -> None:
        while not self._over.wait(0.1):
            self.supervisor.observe(self.pool.reconcile({}))

    def step(self, seed: int) -> int:
        """A step of the run: its version is published, the loop waits for it and samples with it."""
        version = self.testbed.publish(seed=seed)
        self.sync.wait(version)
        self.testbed.assert_serves(version)
        self.status.write("rl")
        return version

    def open_alerts(self) -> list[str]:
        found = [Alert.decode(kv.value) for kv in self.testbed.etcd.range(self.testbed.keys.alerts_prefix())[0]]
        return [a.key for a in found if a.phase is Phase.FIRING and a.kind.startswith("engine.")]

    def close(self) -> None:
        self.fetches.over.set()
        self.fetches.slow.clear()
        self._over.set()
        self._driver.join(30)
        for leader in self.leaders:
            leader.close()
        self.supervisor.leave()


@pytest.fixture
def run(testbed: EngineTestbed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    testbed.stop_engines()
    made = Run(testbed, monkeypatch)
    try:
        for name in (SLOW, FAST):
            testbed.start_engine(name)
        for name in (SLOW, FAST):
            testbed.wait_ready(name)
        made.start()
        yield made
    finally:
        made.close()
        testbed.stop_engines()


@full(proved_in="tests/unit/coordinator/test_stragglers.py tests/unit/engine/test_engine_record.py "
                "tests/unit/pipeline/test_pool_and_log.py", why="all of it with real servers")
def test_run_makes_steps_without_an_engine_that_does_not_follow_and_has_it_back_afterwards(run: Run) -> None:
    testbed = run.testbed
    old, url = testbed.published, testbed.record(SLOW).url
    run.step(seed=101)

    run.fetches.slow.set()
    versions = [run.step(seed=102)]
    found = testbed.record(SLOW)
    assert (found.state, found.version, found.is_behind) == (EngineState.SYNCING, versions[0] - 1, True)
    assert url not in testbed.workers(), "its samples would be of no use"
    assert any("rollout-slow" in text for text in run.shown), "the wait was shown"
    versions += [run.step(seed=103), run.step(seed=104)]
    wait_until(lambda: testbed.record(SLOW).straggler.needs == versions[-1],
               what="that it is asked for what the run needs by now")
    wait_until(lambda: run.open_alerts() == [f"engine.lagging/{SLOW}"], what="the alert")
    run.leaders.pop().close()
    run.lead()  # another leader goes on with what was decided

    run.fetches.slow.clear()
    back = testbed.wait_ready(SLOW, versions[-1])
    assert not back.is_behind and testbed.workers()[url]
    assert run.open_alerts() == [f"engine.lagging/{SLOW}"], "that it is back is not that it follows"
    run.step(seed=105)
    wait_until(lambda: not run.open_alerts(), what="the end of the alert")
    assert testbed.record(SLOW).straggler is None
    kinds = [e.kind for e in testbed.events(SLOW)]
    assert kinds.count("engine.behind") == kinds.count("engine.follows") == 1 and "engine.dead" not in kinds
    assert not run.published_again and old < versions[0]
