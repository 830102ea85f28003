"""The parts of a reconcile pass: the fault of one does not keep the driver from the others."""


from types import SimpleNamespace

import pytest

from elastic_rl import config
from elastic_rl.driver import compute
from elastic_rl.driver.compute import ComputePlane
from elastic_rl.driver.etcd_patience import Stopped
from elastic_rl.driver.parts import PartRunner
from elastic_rl.errors import (
    ComputePlaneLost,
    ConfigError,
    EtcdFull,
    EtcdUnavailable,
    Fenced,
    PreflightFailed,
    RayNodeLost,
)
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


class StubRay:
    """Ray as its nodes' supervisors see it."""

    is_cut_off = False

    def __init__(self, *, fault="", is_up=False, is_lost=False, error=""):
        self.faults, self.is_up, self.is_lost, self.error = {"ray-head": fault, "ray-worker": ""}, is_up, is_lost, error

    def start(self, *, adopts):
        pass

    def connect(self):
        if self.error:
            raise RuntimeError(self.error)


def plane_on(ray, said):
    plane = ComputePlane.__new__(ComputePlane)
    plane._parts = PartRunner(lambda part, message, failed: said.append((part, message)))
    plane._paths, plane._ray, plane.routers = JobPaths.of(config.parse({})), ray, {}
    plane._writer, plane._adopts, plane._require = SimpleNamespace(require=lambda: None), False, lambda: None
    plane._report_phase, plane._pause = lambda phase: None, lambda seconds: True
    return plane


def test_fault_of_a_node_of_ray_is_reported_while_the_driver_waits_for_it():
    said = []
    with pytest.raises(Stopped):
        plane_on(StubRay(fault="it could not be started: have the folder removed"), said)._connect_ray()
    assert said == [("ray-head", "it could not be started: have the folder removed")]


def test_ray_whose_head_does_not_start_again_is_lost():
    with pytest.raises(ComputePlaneLost, match="see .*ray-head.log"):
        plane_on(StubRay(is_lost=True), [])._connect_ray()


def test_ray_that_cannot_be_connected_to_is_lost_in_the_end(monkeypatch):
    plane = plane_on(StubRay(is_up=True, error="no raylet"), [])
    with pytest.raises(Stopped):
        plane._connect_ray()
    monkeypatch.setattr(compute, "_RAY_CONNECT_S", 0.0)
    with pytest.raises(ComputePlaneLost, match="cannot be connected to: RuntimeError: no raylet"):
        plane._connect_ray()


def test_driver_that_was_replaced_neither_waits_for_ray_nor_makes_a_pass():
    def refuse():
        raise Fenced("driver 1 has been replaced by driver 2")

    def pause(seconds):
        plane._require = refuse
        return False

    plane = plane_on(StubRay(fault="it ended"), [])
    plane._pause = pause
    with pytest.raises(Fenced):
        plane._connect_ray()
    plane.roles, plane._writer.require = object(), refuse
    with pytest.raises(Fenced):
        plane.reconcile()


def test_what_is_wrong_on_this_host_is_no_loss_of_ray(monkeypatch):
    monkeypatch.setattr(compute, "_RAY_CONNECT_S", 0.0)
    said, ray = [], StubRay(is_up=True)
    ray.connect = lambda: (_ for _ in ()).throw(ConfigError("the secret is damaged", hint="put it back"))
    with pytest.raises(Stopped):
        plane_on(ray, said)._connect_ray()
    assert said == [("ray", "it cannot be connected to: the secret is damaged (put it back)")]


@pytest.mark.parametrize("is_up", [False, True])
def test_driver_whose_node_has_ended_ends(is_up):
    plane = plane_on(StubRay(is_up=is_up), [])
    plane.roles, plane._ray.is_cut_off = object(), True
    with pytest.raises(RayNodeLost):
        plane.reconcile()


def test_nothing_is_asked_of_ray_while_a_node_does_not_work():
    said = []
    plane = plane_on(StubRay(fault="it ended"), said)
    plane.roles, plane.etcd = object(), None  # a pass of any part would need it
    plane.reconcile()
    assert said == [("ray-head", "it ended")]
