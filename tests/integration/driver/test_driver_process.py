"""The driver's loop when etcd is away, and when passes fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.driver import __main__ as driver
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import JobStatus, Member
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.net.addresses import LOOPBACK


class StubPlane:
    """Takes the compute plane's place: each pass reads etcd, as a real one does."""

    passes = 0
    bugs = 0
    """Passes that are to fail."""
    unavailable = False
    """Whether passes find no etcd."""
    faults: dict[str, str] = {}
    waiting: dict[str, str] = {}

    def __init__(self, ctx: RunContext, etcd: EtcdClient, report_phase: object, pause: object, *, adopts: bool) -> None:
        self._ctx, self._etcd = ctx, etcd

    def start(self) -> None:
        pass

    def reconcile(self) -> None:
        fencing.require_epoch(self._etcd, self._ctx.keys, self._ctx.epoch)
        if self.unavailable:
            raise EtcdUnavailable("no member answers")
        type(self).passes += 1
        if self.bugs:
            type(self).bugs -= 1
            raise KeyError("a bug")

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass


class RunningDriver:
    """A driver in a thread, with an etcd of its own and a stub for the compute plane."""

    def __init__(self, folder: Path, keys: Keys) -> None:
        self.keys, self.servers = keys, EtcdServers(folder, 1).start()
        cfg = config.parse({"job": keys.job, "run_dir": str(folder),
                            "etcd": {"call_timeout_s": 0.5, "retry_budget_s": 1.0}})
        self.ctx = RunContext(config=cfg, etcd_endpoints=self.servers.endpoints, job=keys.job, epoch=0,
                              model_dir="", host=LOOPBACK)
        self.code: list[int] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(
            target=lambda: self.code.append(driver.drive(self.ctx, "driver-1", self.stop)), daemon=True)

    def outage(self, seconds: float = 4.0) -> None:
        """Etcd is stopped, for several times the retry budget of a call; the driver is still there after it."""
        self.servers.stop(0)
        if not self.thread.is_alive():
            self.thread.start()
        time.sleep(seconds)
        assert self.thread.is_alive() and not self.code
        self.servers.cont(0)

    def await_pass(self) -> None:
        passes = StubPlane.passes
        wait_until(lambda: StubPlane.passes > passes, what="a pass", alive=self.thread.is_alive)

    def finish(self) -> int:
        with self.servers.connect() as etcd:
            etcd.put(self.keys.job_status(), JobStatus(phase="finished").encode())
        self.thread.join(60)
        return self.code[0]

    def close(self) -> None:
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join(60)
        self.servers.close()


@pytest.fixture
def running(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDriver]:
    monkeypatch.setattr(driver, "ComputePlane", StubPlane)
    running = RunningDriver(tmp_path, keys)
    yield running
    running.close()


def test_driver_keeps_the_compute_plane_while_etcd_is_away(running: RunningDriver) -> None:
    running.thread.start()
    running.await_pass()
    running.outage()
    running.await_pass()
    assert running.finish() == 0


def test_driver_that_starts_while_etcd_is_away_waits_for_it(running: RunningDriver) -> None:
    """It has no epoch yet, and neither a member's entry."""
    running.outage()
    running.await_pass()
    with running.servers.connect() as etcd:
        assert [m.id for m in members(etcd, running.keys, "driver")] == ["driver-1"]
    assert running.finish() == 0


def test_driver_that_waits_for_etcd_ends_on_a_signal(running: RunningDriver) -> None:
    running.servers.stop(0)
    running.thread.start()
    running.stop.set()
    running.thread.join(60)
    assert running.code == [0]


def test_outage_of_etcd_does_not_look_like_a_hang_of_the_driver(running: RunningDriver,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat thread may reach etcd while its passes do not yet: what it writes then must show progress."""
    running.thread.start()
    running.await_pass()
    with running.servers.connect() as etcd:
        def entry() -> Member:
            [found] = members(etcd, running.keys, "driver")
            return found

        monkeypatch.setattr(StubPlane, "unavailable", True)
        began = entry().beat_at
        wait_until(lambda: entry().beat_at > began + 6.0, what="heartbeats")
        assert entry().progress_at > began + 3.0


def test_bug_in_a_pass_does_not_end_the_driver(running: RunningDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubPlane, "bugs", 3)
    running.thread.start()
    wait_until(lambda: not StubPlane.bugs, what="the bugs")
    running.await_pass()
    assert running.finish() == 0


def test_driver_reports_what_fails_and_what_waits(running: RunningDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StubPlane, "faults", {"router": "it ended"})
    monkeypatch.setattr(StubPlane, "waiting", {"trainer": "no room"})
    running.thread.start()
    running.await_pass()
    running.await_pass()

    def info() -> object:
        with running.servers.connect() as etcd:
            return next((m.info for m in members(etcd, running.keys, "driver") if m.info), None)

    assert wait_until(info, what="the report") == {
        "faults": {"router": "it ended"}, "waiting": {"trainer": "no room"}}
