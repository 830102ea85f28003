"""The parts of a reconcile pass: the fault of one does not keep the driver from the others."""

from types import SimpleNamespace

import pytest

from elastic_rl import config
from elastic_rl.driver.compute import ComputePlane
from elastic_rl.driver.etcd_patience import Stopped
from elastic_rl.driver.parts import PartRunner
from elastic_rl.errors import ComputePlaneLost, EtcdFull, EtcdUnavailable, Fenced, PreflightFailed
from elastic_rl.host.paths import JobPaths


class Passes:
    """Parts that fail on demand, by a clock of their own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.failing: dict[str, Exception] = {}
        self.runs: dict[str, int] = {}
        self.reports: list[tuple[str, bool]] = []
        self.parts = PartRunner(lambda part, message, failed: self.reports.append((part, failed)),
                                clock=lambda: self.now, jitter=lambda: 0.0)

    def run(self, *names: str, for_s: float = 1.0) -> None:
        for _ in range(int(for_s)):
            self.now += 1.0
            for name in names:
                self.parts.run(name, lambda name=name: self._step(name))

    def _step(self, name: str) -> None:
        self.runs[name] = self.runs.get(name, 0) + 1
        if name in self.failing:
            raise self.failing[name]


@pytest.mark.parametrize("error", [PreflightFailed("no port"), KeyError("a bug"), OSError(28, "disk full"),
                                   EtcdFull("quota")], ids=lambda e: type(e).__name__)
def test_part_that_fails_does_not_keep_the_others_from_running(error):
    passes = Passes()
    passes.failing["router"] = error
    passes.run("router", "trainer", for_s=600)
    assert passes.runs["trainer"] == 600
    assert type(error).__name__ in passes.parts.faults["router"]


def test_part_that_fails_is_tried_again_with_backoff_and_without_end():
    passes = Passes()
    passes.failing["pool"] = PreflightFailed("no room")
    passes.run("pool", for_s=3600)
    assert 3600 / 16 < passes.runs["pool"] < 3600 / 10
    del passes.failing["pool"]
    passes.run("pool", for_s=16)
    assert passes.parts.faults == {}


def test_fault_is_reported_once_and_its_end_once():
    passes = Passes()
    passes.failing["pool"] = PreflightFailed("no room")
    passes.run("pool", for_s=3600)
    del passes.failing["pool"]
    passes.run("pool", for_s=100)
    assert passes.reports == [("pool", True), ("pool", False)]


def test_part_that_fails_and_works_in_turn_is_reported_seldom():
    passes = Passes()
    for second in range(3600):
        passes.failing = {"pool": PreflightFailed("no room")} if second % 3 else {}
        passes.run("pool")
    begun = [report for report in passes.reports if report[1]]
    assert 0 < len(begun) <= 61 and len(passes.reports) <= 2 * len(begun)


@pytest.mark.parametrize("error", [Fenced("epoch 3 is over"), EtcdUnavailable("no member")])
def test_only_a_newer_epoch_and_an_outage_of_etcd_end_a_pass(error):
    passes = Passes()
    passes.failing["trainer"] = error
    with pytest.raises(type(error)):
        passes.run("trainer")
    assert passes.parts.faults == {}, "the part has not failed"


def test_part_that_runs_elsewhere_is_reported_alike():
    passes = Passes()
    for fault in ("it ended", "it ended", "", ""):
        passes.parts.note("router", fault)
    assert passes.reports == [("router", True), ("router", False)]


def test_fault_of_the_folder_of_ray_says_what_to_do():
    """It is tried again without end, and only a person can remove what is there."""
    said = []
    plane = ComputePlane.__new__(ComputePlane)
    plane._parts = PartRunner(lambda part, message, failed: said.append(message))
    plane._report_phase, plane._pause = lambda phase: None, lambda seconds: True

    def refuse():
        raise PreflightFailed("/tmp/erl is not a folder of this user", hint="have it removed")

    plane._ray, plane._adopts = SimpleNamespace(start=refuse), False
    with pytest.raises(Stopped):
        plane._connect_ray()
    assert said == ["it does not start: /tmp/erl is not a folder of this user (have it removed)"]


def test_ray_that_cannot_be_adopted_is_not_replaced_in_the_same_epoch():
    plane = ComputePlane.__new__(ComputePlane)
    plane._paths = JobPaths.of(config.parse({}))
    plane._report_phase, plane._pause = lambda phase: None, lambda seconds: False
    plane._ray, plane._adopts = Ended(iter([True, False])), True
    with pytest.raises(ComputePlaneLost, match="it has ended: see .*ray.log"):
        plane._connect_ray()


class Ended:
    """A Ray that ends while a driver waits for it."""

    def __init__(self, runs):
        self._runs = runs

    @property
    def runs(self):
        return next(self._runs)

    def is_up(self):
        return False
