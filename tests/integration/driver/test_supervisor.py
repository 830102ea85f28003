"""The supervisor of the driver, on real etcd and with real processes: a stub takes the driver's place."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.etcd_server import EtcdServers
from support.tiers import parametrize
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.coordinator.membership import registry
from elastic_rl.coordinator.membership.suspicion import Suspicion, WitnessReports
from elastic_rl.coordinator.records import LastSeen
from elastic_rl.coordinator.targets import DRIVER, JOB
from elastic_rl.driver.restart_requests import open_requests
from elastic_rl.driver.supervisor import STOPPED, DriverSupervisor
from elastic_rl.errors import Conflict, EtcdUnavailable, Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.cluster_records import driver_of
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import (
    FAILURE_POLICY,
    Epoch,
    Evidence,
    GenerationCap,
    JobStatus,
    Member,
    RestartRequest,
    Severity,
)
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.etcd.transaction import TxnResult
from elastic_rl.host import processes
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.runtime.process import runs

_STUB = Path(__file__).with_name("stub_driver.py")


class SupervisedJob:
    """A job whose driver is a stub, and its supervisor in a thread."""

    def __init__(self, endpoints: list[str], keys: Keys, etcd: EtcdClient, folder: Path,
                 stop_timeout_s: float = 60.0, backoff_initial_s: float = 2.0) -> None:
        cfg = config.parse({"job": keys.job, "run_dir": str(folder),
                            "failure_policy": {"backoff_initial_s": backoff_initial_s},
                            "etcd": {"call_timeout_s": 2.0, "retry_budget_s": 1.0},
                            "trainer": {"stop_timeout_s": stop_timeout_s}})
        self.ctx = RunContext(config=cfg, etcd_endpoints=endpoints, job=keys.job, epoch=0, model_dir="", host=LOOPBACK)
        self.etcd, self.keys = etcd, keys
        self.code: int | None = None
        self._stopping = self.stopped = False

    def start(self, behaviour: str) -> None:
        context = self.ctx.save(JobPaths.of(self.ctx.config).context())
        self._client = self.ctx.connect()
        self._supervisor = DriverSupervisor(
            self.ctx, self._client, [sys.executable, str(_STUB), behaviour, "--context", str(context)], env={},
            on_tick=self._tick, stopped=lambda: self.stopped)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.code = self._supervisor.run()
        except KeyboardInterrupt:
            pass

    def _tick(self) -> None:
        if self._stopping:
            raise KeyboardInterrupt  # as Ctrl-C does in the thread that runs the supervisor

    def starts(self) -> list[str]:
        """Ids of the drivers that were started."""
        path = JobPaths.of(self.ctx.config).private / "starts"
        return path.read_text().split() if path.exists() else []

    def await_driver(self, number: int) -> int:
        """The epoch of the driver of this number, once it has registered."""
        def registered() -> Member | None:
            ids = self.starts()[number - 1:number]
            return next((m for m in members(self.etcd, self.keys, registry.DRIVER) if m.id in ids), None)

        return wait_until(registered, what=f"driver {number}").epoch

    def ray(self, epoch: int) -> psutil.Process:
        """What the driver that has begun an epoch has started in it."""
        return psutil.Process(int((JobPaths.of(self.ctx.config).private / f"ray-{epoch}").read_text()))

    def driver(self) -> psutil.Process:
        [process] = [p for p in psutil.process_iter(["cmdline"]) if self.starts()[-1] in (p.info["cmdline"] or [])]
        return process

    def await_polls(self) -> None:
        """Waits until the supervisor has read the requests twice: what must not happen would have happened."""
        read, reads = self._supervisor._request, list[RestartRequest | None]()

        def noted() -> RestartRequest | None:
            reads.append(read())
            return reads[-1]

        self._supervisor._request = noted
        wait_until(lambda: len(reads) >= 2, what="two reads of the requests")

    def count_stop_reads(self) -> list[str | None]:
        """The phases that the supervisor reads from here on to see whether a stop is over; None where etcd did not
        answer."""
        read, reads = self._supervisor._status, list[str | None]()

        def noted() -> JobStatus:
            reads.append(None)
            status = read()
            reads[-1] = status.phase
            return status

        self._supervisor._status = noted
        return reads

    def request_restart_of_driver(self, by: str = "") -> None:
        self.etcd.put(self.keys.restart(DRIVER), RestartRequest(target=DRIVER, generation=1, by=by).encode())

    def request_restart(self) -> None:
        """Asks for a restart as the leader does: the request and the end of the epoch are in one transaction."""
        epoch = fencing.current_epoch(self.etcd, self.keys)
        found = self.etcd.get(self.keys.restart(JOB))
        before = RestartRequest.decode(found.value) if found else RestartRequest(target=JOB, generation=0)
        request = before.replace(generation=before.generation + 1, epoch=epoch)
        guard, end = fencing.next_epoch(self.keys, epoch, holder="global restart")
        assert self.etcd.txn([guard], [end, Op.put(self.keys.restart(JOB), request.encode())]).succeeded

    def finish(self) -> int:
        """Lets the driver end with the job; the supervisor's exit code."""
        self.etcd.put(self.keys.job_status(), JobStatus(phase="finished").encode())
        return self.end()

    def end(self) -> int:
        self._thread.join(60)
        assert self.code is not None, "the supervisor has not ended"
        return self.code

    def interrupt(self) -> None:
        """Ends the supervisor as Ctrl-C does."""
        self._stopping = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "the supervisor goes on"

    def events(self) -> list[str]:
        """Kinds of the events, the oldest first."""
        return [e.kind for e in events.recent(self.etcd, self.keys)]

    def close(self) -> None:
        self._stopping = True
        self._thread.join(60)
        self._client.close()
        for ray in JobPaths.of(self.ctx.config).private.glob("ray-*"):
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(int(ray.read_text())).kill()


@pytest.fixture
def job(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[SupervisedJob]:
    job = SupervisedJob(etcd_servers.endpoints, keys, etcd, tmp_path)
    yield job
    job.close()


@parametrize("behaviour", ["works", "hangs"],
             proved_in="tests/integration/driver/test_supervisor.py",
             why="a driver that hangs")
def test_requested_restart_of_the_job_is_carried_out_once(job: SupervisedJob, behaviour: str) -> None:
    """A driver that works ends when it is fenced off, before the supervisor has seen the request; one that hangs has to
    be killed for it."""
    job.start(behaviour)
    first = job.await_driver(1)
    before = job.driver()
    job.request_restart()
    second = job.await_driver(2)
    assert second == first + 2, "the request began one epoch, the new driver another"
    assert not before.is_running()
    wait_until(lambda: not open_requests(job.etcd, job.keys), what="the acknowledgement")
    job.await_polls()
    assert len(job.starts()) == 2 and job.driver().is_running()
    assert job.events() == [], "the leader has reported this restart"


@parametrize("behaviour", ["hangs", "works"],
             proved_in="tests/integration/driver/test_supervisor.py",
             why="a driver that would end in order if it was asked to")
def test_requested_restart_of_the_driver_leaves_all_that_it_has_started_alone(job: SupervisedJob, behaviour: str
                                                                              ) -> None:
    job.start(behaviour)
    epoch = job.await_driver(1)
    before, ray = job.driver(), job.ray(epoch)
    job.request_restart_of_driver()
    assert job.await_driver(2) == epoch, "the second one takes over"
    assert not before.is_running() and ray.is_running()
    assert not open_requests(job.etcd, job.keys)
    assert [m.id for m in members(job.etcd, job.keys, registry.DRIVER)] == job.starts()[1:], "its end is no death"
    job.await_polls()
    assert len(job.starts()) == 2 and job.driver().is_running() and job.events() == []
    assert not JobPaths.of(job.ctx.config).hangs.exists(), "a person has asked for it: nothing hung"


def test_driver_that_the_failure_policy_ends_leaves_its_stacks_first(job: SupervisedJob) -> None:
    job.start("hangs")
    epoch = job.await_driver(1)
    before, ray = job.driver(), job.ray(epoch)
    job.request_restart_of_driver(by=FAILURE_POLICY)
    assert job.await_driver(2) == epoch and not before.is_running() and ray.is_running()
    [path] = JobPaths.of(job.ctx.config).hangs.iterdir()
    assert "the driver hangs" in path.read_text() and f"(pid {before.pid}" in path.read_text()
    [said] = [e for e in events.recent(job.etcd, job.keys) if e.kind == "driver.stacks"]
    assert said.data["file"] == str(path) and str(path) in said.message


def test_driver_that_was_seen_to_hang_keeps_its_entry_until_the_next_one_replaces_it(job: SupervisedJob) -> None:
    job.start("hangs")
    job.await_driver(1)
    entry = job.keys.registry_entry(registry.DRIVER, job.starts()[0])
    job.etcd.put(entry, LastSeen(role=registry.DRIVER, id=job.starts()[0], incarnation="i", first_seen=1.0,
                                 hung_at=2.0).encode())
    job.request_restart_of_driver()
    job.await_driver(2)
    assert job.etcd.get(entry) is not None


def test_driver_that_was_killed_is_followed_by_one_that_takes_over(job: SupervisedJob) -> None:
    job.start("works")
    epoch = job.await_driver(1)
    ray = job.ray(epoch)
    job.driver().kill()
    assert job.await_driver(2) == epoch
    assert ray.is_running() and job.events() == ["driver.restarted"]
    assert job.finish() == 0


@pytest.mark.parametrize("seen", [True, False])
def test_driver_that_ended_before_a_witness_saw_it_alive_is_not_only_suspected(seen: bool, job: SupervisedJob) -> None:
    """Its alert would go on until the time for which a member that may be slow is only suspected is over."""
    job.start("works")
    job.await_driver(1)
    driver_id, pid = job.starts()[0], job.driver().pid
    job.etcd.put(job.keys.member(registry.DRIVER, driver_id), Member(
        role=registry.DRIVER, id=driver_id, pid=pid, host="h", epoch=1, incarnation="i").encode())
    entry = LastSeen(role=registry.DRIVER, id=driver_id, incarnation="i", first_seen=1.0, pid=pid)
    if seen:
        job.etcd.put(job.keys.registry_entry(*entry.name), entry.encode())
    job.driver().kill()
    job.await_driver(2)
    found = [Evidence.decode(kv.value) for kv in job.etcd.range(job.keys.evidence_prefix())[0]]
    assert (job.etcd.get(job.keys.member(registry.DRIVER, driver_id)) is None) == bool(found) == seen, (
        "one that no leader has seen is found by its registration")
    if seen:
        reports = WitnessReports(0.0, evidence={(e.role, e.id): e for e in found})
        assert "its process is gone" in Suspicion(120.0, 30.0).why_dead(entry, reports)
    assert job.finish() == 0


def test_driver_that_stays_stopped_is_killed_and_followed_by_one_that_takes_over(job: SupervisedJob) -> None:
    job.start("works")
    epoch = job.await_driver(1)
    before, ray = job.driver(), job.ray(epoch)
    before.suspend()
    try:
        assert job.await_driver(2) == epoch
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            before.resume()
    assert not runs(before) and ray.is_running() and job.events() == ["driver.restarted"]
    assert job.finish() == 0


def test_request_that_a_newer_driver_has_carried_out_is_only_acknowledged(job: SupervisedJob) -> None:
    """The request came while the driver was starting: it ended the epoch before the one that this driver began."""
    epoch = fencing.raise_epoch(job.etcd, job.keys, holder="an earlier driver").number
    job.start("works")
    job.await_driver(1)
    job.etcd.put(job.keys.restart(JOB), RestartRequest(target=JOB, generation=1, epoch=epoch - 1).encode())
    wait_until(lambda: not open_requests(job.etcd, job.keys), what="the acknowledgement")
    job.await_polls()
    assert len(job.starts()) == 1 and job.finish() == 0


def test_requests_from_before_the_first_start_are_carried_out_by_it(job: SupervisedJob) -> None:
    job.request_restart()
    job.request_restart_of_driver()
    job.start("works")
    job.await_driver(1)
    assert not open_requests(job.etcd, job.keys)
    job.await_polls()
    assert len(job.starts()) == 1 and job.finish() == 0


@parametrize("behaviour", ["crashes", "crashes-later"],
             proved_in="tests/unit/coordinator/test_failure_policy.py",
             why="a driver that crashes later")
def test_run_whose_driver_crashes_without_progress_ends_as_a_crash_loop(job: SupervisedJob, behaviour: str) -> None:
    job.etcd.put(job.keys.job_status(), JobStatus(phase="rl", step=7, steps=20).encode())
    job.start(behaviour)
    assert job.end() == 1
    assert len(job.starts()) == job.ctx.config.failure_policy.max_global_restarts == 4
    assert job.events() == ["driver.restarted", "driver.restarted", "run.global_restart", "run.crash_loop"]
    # The last one finds nothing that it could take over.
    assert fencing.current_epoch(job.etcd, job.keys) == {"crashes": 1, "crashes-later": 3}[behaviour]
    status = JobStatus.decode(job.etcd.get(job.keys.job_status()).value)
    assert (status.phase, status.step, status.steps) == ("failed", 7, 20) and "crash loop" in status.message


def test_driver_that_crashes_and_makes_progress_in_between_is_restarted_without_end(job: SupervisedJob) -> None:
    job.start("crashes-later")
    for step in range(1, job.ctx.config.failure_policy.max_global_restarts + 2):
        wait_until(lambda step=step: len(job.starts()) >= step, what=f"driver {step}")
        job.etcd.put(job.keys.job_status(), JobStatus(phase="rl", step=step).encode())
    assert job.code is None


def test_driver_that_ends_since_shared_hosts_are_lost_is_restarted_however_often_and_no_fault(
        job: SupervisedJob) -> None:
    job.etcd.put(job.keys.job_status(), JobStatus(phase="rl", step=7, steps=20).encode())
    job.start("loses-hosts")
    wait_until(lambda: len(job.starts()) > job.ctx.config.failure_policy.max_global_restarts, what="further drivers")
    assert job.code is None and job.events() == []


def test_end_of_a_driver_that_another_one_fenced_off_is_not_reported(job: SupervisedJob) -> None:
    job.start("works")
    job.await_driver(1)
    fencing.raise_epoch(job.etcd, job.keys, holder="a driver on another host")
    job.await_driver(2)
    assert job.events() == []
    assert job.finish() == 0


def test_supervisor_waits_for_etcd_and_then_restarts_the_driver(keys: Keys, tmp_path: Path) -> None:
    servers = EtcdServers(tmp_path / "etcd", 1)
    try:
        servers.start()
        with servers.connect() as etcd:
            job = SupervisedJob(servers.endpoints, keys, etcd, tmp_path / "run")
            job.start("hangs")
            try:
                job.await_driver(1)
                driver = job.driver()
                servers.stop(0)
                driver.kill()
                time.sleep(4)  # several times the budget of a call
                assert job.code is None and len(job.starts()) == 1
                servers.cont(0)
                job.await_driver(2)
            finally:
                servers.cont(0)
                job.close()
    finally:
        servers.close()


def test_run_that_is_stopped_ends_once_its_actor_has_committed_and_said_so(job: SupervisedJob) -> None:
    job.start("works")
    job.await_driver(1)
    job.etcd.put(job.keys.job_status(), JobStatus(phase="rl", step=16).encode())
    job.stopped = True
    job.await_polls()
    assert job.driver().is_running() and job.code is None, "it has not committed yet"
    job.etcd.put(job.keys.job_status(), JobStatus(phase="stopped", step=16, message="of the actor").encode())
    assert job.end() == STOPPED
    assert _status(job).message == "of the actor" and "run.stopped" not in job.events(), "which the actor writes"
    assert len(job.starts()) == 1 and "driver.restarted" not in job.events()


def test_run_that_is_stopped_before_it_has_trained_anything_waits_for_no_commit(job: SupervisedJob) -> None:
    job.start("hangs")
    job.await_driver(1)
    job.etcd.put(job.keys.job_status(), JobStatus(phase="starting", step=10).encode())
    job.stopped = True
    assert job.end() == STOPPED
    status = _status(job)
    assert (status.phase, status.message) == ("stopped", "stopped by its operator at step 10")
    assert job.events().count("run.stopped") == 1


def test_run_that_does_not_commit_in_time_is_stopped_on_record_before_anything_of_it_ends(
        etcd: EtcdClient, keys: Keys, etcd_servers: EtcdServers, tmp_path: Path) -> None:
    """Else the end of its processes would look like their death, and its actor might write that it goes on."""
    job = SupervisedJob(etcd_servers.endpoints, keys, etcd, tmp_path, stop_timeout_s=0.1)
    try:
        job.start("hangs")
        epoch = job.await_driver(1)
        actor = fencing.FencedWriter.of_term(etcd, keys, epoch, fencing.begin_term(etcd, keys, epoch, "actor"))
        etcd.put(keys.job_status(), JobStatus(phase="rl", step=16).encode())
        job.stopped = True
        assert job.end() == STOPPED
        status = _status(job)
        assert status.phase == "stopped" and "could not be committed" in status.message
        [stop] = [e for e in events.recent(etcd, keys) if e.kind == "run.stopped"]
        assert stop.severity is Severity.INFO and stop.message == status.message
        with pytest.raises(Fenced):
            actor.require()
    finally:
        job.close()


def test_commit_of_a_run_that_is_stopped_is_waited_for_while_etcd_is_away(keys: Keys, tmp_path: Path) -> None:
    """The actor commits as soon as etcd answers; without an answer nobody knows that there is nothing to commit."""
    servers = EtcdServers(tmp_path / "etcd", 1)
    try:
        servers.start()
        with servers.connect() as etcd:
            job = SupervisedJob(servers.endpoints, keys, etcd, tmp_path / "run")
            job.start("hangs")
            try:
                job.await_driver(1)
                etcd.put(keys.job_status(), JobStatus(phase="rl", step=16).encode())
                reads = job.count_stop_reads()
                servers.stop(0)
                job.stopped = True
                wait_until(lambda: len(reads) >= 2 and reads[-1] is None, what="reads that etcd has not answered")
                assert job.code is None and job.driver().is_running()
                servers.cont(0)
                etcd.put(keys.job_status(), JobStatus(phase="stopped", step=17, message="of the actor").encode())
                job.driver().kill()
                assert job.end() == STOPPED and _status(job).message == "of the actor"
            finally:
                servers.cont(0)
                job.close()
    finally:
        servers.close()


def test_stop_is_recorded_once_etcd_is_back_in_its_time(keys: Keys, tmp_path: Path) -> None:
    servers = EtcdServers(tmp_path / "etcd", 1)
    try:
        servers.start()
        with servers.connect() as etcd:
            job = SupervisedJob(servers.endpoints, keys, etcd, tmp_path / "run")
            job.start("hangs")
            try:
                job.await_driver(1)
                etcd.put(keys.job_status(), JobStatus(phase="starting", step=4).encode())
                put, failed, running, driver = job._supervisor._put_stop, list[Exception](), list[bool](), job.driver()

                def tried() -> str:
                    if not failed:
                        servers.stop(0)
                    running.append(driver.is_running() and driver.status() != psutil.STATUS_ZOMBIE)
                    try:
                        return put()
                    except Exception as e:
                        failed.append(e)
                        servers.cont(0)
                        raise

                job._supervisor._put_stop = tried
                job.stopped = True
                assert job.end() == STOPPED and [type(e) for e in failed] == [EtcdUnavailable]
                assert running[:2] == [True, True], "before its processes end, whose end would look like a death"
                assert _status(job).phase == "stopped" and job.events().count("run.stopped") == 1
            finally:
                servers.cont(0)
                job.close()
    finally:
        servers.close()


def test_run_that_is_stopped_while_its_driver_is_down_commits_with_the_next_one(job: SupervisedJob) -> None:
    job.start("works")
    job.await_driver(1)
    job.etcd.put(job.keys.job_status(), JobStatus(phase="rl", step=16).encode())
    job.driver().suspend()
    job.stopped = True
    job.driver().kill()
    job.await_driver(2)
    assert _status(job).phase == "rl", "the actor has not committed yet"
    job.etcd.put(job.keys.job_status(), JobStatus(phase="stopped", step=16, message="of the actor").encode())
    assert job.end() == STOPPED and _status(job).message == "of the actor"


@pytest.fixture
def paused(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[SupervisedJob]:
    """A job whose driver has ended twice, so that the next one is started in five minutes, later than a test waits."""
    job = SupervisedJob(etcd_servers.endpoints, keys, etcd, tmp_path, backoff_initial_s=300.0)
    etcd.put(keys.job_status(), JobStatus(phase="starting", step=4).encode())
    job.start("crashes")
    wait_until(lambda: job.events().count("driver.restarted") == 2, what="the end of the second driver")
    yield job
    job.close()


def test_run_that_is_stopped_between_two_drivers_waits_for_no_further_one(paused: SupervisedJob) -> None:
    paused.stopped = True
    assert paused.end() == STOPPED
    assert _status(paused).phase == "stopped" and len(paused.starts()) == 2


def test_supervisor_is_interrupted_between_two_drivers(paused: SupervisedJob) -> None:
    paused.interrupt()
    assert paused.code is None and len(paused.starts()) == 2


class RacedStop:
    """A supervisor whose write of the stop races with another process: what that one does comes after the supervisor
    has read what it decides by, and before it writes."""

    def __init__(self, endpoints: list[str], keys: Keys, etcd: EtcdClient, folder: Path, *,
                 assignment: int = 0) -> None:
        ctx = SupervisedJob(endpoints, keys, etcd, folder).ctx.model_copy(update={"assignment": assignment})
        self.etcd, self.keys, self._own = etcd, keys, ctx.connect()
        self.epoch = fencing.raise_epoch(etcd, keys, holder="driver of this test").number
        fencing.begin_term(etcd, keys, self.epoch, "actor")
        self.put(phase="rl", step=16)
        self.supervisor = DriverSupervisor(ctx, self._own, ["true"], env={})
        self.supervisor._epoch = self.epoch

    def put(self, **status: Any) -> None:
        self.etcd.put(self.keys.job_status(), JobStatus(**status).encode())

    def put_stop(self, meanwhile: Callable[[], object], *, times: int = 1) -> str:
        """``times``: in so many of the supervisor's tries."""
        txn, reads = self._own.txn, list[object]()

        def raced(compares: Sequence[Compare], then: Sequence[Op], orelse: Sequence[Op] = ()) -> TxnResult:
            outcome = txn(compares, then, orelse)
            if all(op == Op.get(op.key) for op in then) and len(reads) < times:
                reads.append(meanwhile())
            return outcome

        self._own.txn = raced  # type: ignore[method-assign]
        return self.supervisor._put_stop()

    @property
    def status(self) -> JobStatus:
        return _status(self)

    def close(self) -> None:
        self._own.close()


@pytest.fixture
def raced(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[RacedStop]:
    race = RacedStop(etcd_servers.endpoints, keys, etcd, tmp_path)
    yield race
    race.close()


def test_stop_does_not_replace_the_end_that_the_actor_writes_at_the_same_time(raced: RacedStop) -> None:
    assert raced.put_stop(lambda: raced.put(phase="finished", step=20, message="of the actor")) == "finished"
    assert (raced.status.phase, raced.status.message) == ("finished", "of the actor")
    assert not [e for e in events.recent(raced.etcd, raced.keys) if e.kind == "run.stopped"]


def test_stop_says_the_step_that_the_actor_has_reached_at_the_same_time(raced: RacedStop) -> None:
    assert raced.put_stop(lambda: raced.put(phase="rl", step=17)) == "stopped"
    assert raced.status.step == 17 and "17" in raced.status.message


def test_stop_is_not_written_into_the_epoch_that_another_process_begins_at_the_same_time(raced: RacedStop) -> None:
    with pytest.raises(Fenced, match="another process"):
        raced.put_stop(lambda: fencing.raise_epoch(raced.etcd, raced.keys, holder="driver-elsewhere"))
    assert raced.status.phase == "rl"


def test_stop_fences_off_the_actor_that_takes_over_at_the_same_time_under_the_next_number(raced: RacedStop) -> None:
    assert raced.put_stop(lambda: fencing.begin_term(raced.etcd, raced.keys, raced.epoch, "next actor")) == "stopped"
    term = raced.etcd.get(raced.keys.actor_term())
    assert term is not None and Epoch.decode(term.value).holder == "stop"
    assert term.version == Epoch.decode(term.value).number == 3


def test_stop_gives_way_to_a_status_that_is_written_again_and_again(raced: RacedStop) -> None:
    """Its caller pauses then, and looks whether the time of the stop is over."""
    with pytest.raises(Conflict, match="concurrently"):
        raced.put_stop(lambda: raced.put(phase="rl", step=16), times=1000)
    assert raced.status.phase == "rl"


def test_stop_is_not_written_by_a_process_whose_assignment_is_over(
        etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> None:
    """The job is carried out on another host, in the same epoch: its driver takes over what runs."""
    raced = RacedStop(etcd_servers.endpoints, keys, etcd, tmp_path, assignment=1)
    key = ClusterKeys(keys.job).assignment(driver_of(keys.job))
    try:
        etcd.put(key, b"1")
        with pytest.raises(Fenced):
            raced.put_stop(lambda: etcd.put(key, b"2"))
        assert raced.status.phase == "rl"
    finally:
        etcd.delete(key)
        raced.close()


def test_drivers_that_crash_during_a_stop_are_no_crash_loop(
        etcd: EtcdClient, keys: Keys, etcd_servers: EtcdServers, tmp_path: Path) -> None:
    """A global restart would give up what is to be committed."""
    job = SupervisedJob(etcd_servers.endpoints, keys, etcd, tmp_path)
    try:
        etcd.put(keys.job_status(), JobStatus(phase="rl", step=7).encode())
        job.stopped = True
        job.start("crashes")
        wait_until(lambda: len(job.starts()) > job.ctx.config.failure_policy.max_global_restarts, what="many drivers")
        assert job.code is None and fencing.current_epoch(etcd, keys) == 0
        etcd.put(keys.job_status(), JobStatus(phase="stopped", step=7).encode())
        assert job.end() == STOPPED and {*job.events()} == {"driver.restarted"}
    finally:
        job.close()


def test_stop_ends_no_epoch_of_another_process(job: SupervisedJob) -> None:
    """This one may be stale: its host was cut off, and the run goes on elsewhere."""
    job.start("hangs")
    job.await_driver(1)
    job.etcd.put(job.keys.job_status(), JobStatus(phase="starting", step=4).encode())
    epoch = fencing.raise_epoch(job.etcd, job.keys, holder="driver-elsewhere").number
    actor = fencing.FencedWriter.of_term(job.etcd, job.keys, epoch, fencing.begin_term(
        job.etcd, job.keys, epoch, "actor"))
    job.stopped = True
    assert job.end() == STOPPED
    actor.require()
    assert _status(job).phase == "starting" and "run.stopped" not in job.events()


def test_recorded_stop_leaves_nothing_of_what_the_run_did_in_its_status(job: SupervisedJob) -> None:
    job.start("hangs")
    job.await_driver(1)
    job.etcd.put(job.keys.job_status(), JobStatus(
        phase="starting", step=4, stage="resume", waiting_for="the trainer", waiting_kind="trainer", waiting_since=1.0,
        generation_cap=GenerationCap.STALENESS).encode())
    job.stopped = True
    assert job.end() == STOPPED
    status = _status(job)
    assert (status.stage, status.waiting_for, status.waiting_kind, status.waiting_since, status.generation_cap) == (
        "", "", "", 0.0, GenerationCap.NONE)


def _status(job: SupervisedJob | RacedStop) -> JobStatus:
    found = job.etcd.get(job.keys.job_status())
    assert found is not None
    return JobStatus.decode(found.value)


_NOTES_ITS_END = """
import signal, subprocess, sys, pathlib
service = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
def end(*_):
    pathlib.Path(sys.argv[1]).write_text("it ended what runs")
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[2]).write_text(str(service.pid))
while True:
    signal.pause()
"""


@pytest.mark.parametrize("goes_on", [True, False])
def test_driver_is_told_to_end_what_runs_only_where_no_other_process_goes_on_with_the_run(
        etcd: EtcdClient, keys: Keys, etcd_servers: EtcdServers, tmp_path: Path, goes_on: bool) -> None:
    ended, started = tmp_path / "ended", tmp_path / "started"
    ctx = SupervisedJob(etcd_servers.endpoints, keys, etcd, tmp_path).ctx

    def interrupt() -> None:
        if started.exists() and started.read_text():
            raise KeyboardInterrupt

    supervisor = DriverSupervisor(ctx, etcd, [sys.executable, "-c", _NOTES_ITS_END, str(ended), str(started)], env={},
                                  on_tick=interrupt, goes_on=lambda: goes_on)
    with pytest.raises(KeyboardInterrupt):
        supervisor.run()
    assert ended.exists() != goes_on
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(started) in (p.info["cmdline"] or [])]
    service = int(started.read_text())
    try:
        lives = psutil.pid_exists(service) and runs(psutil.Process(service))
        assert lives == goes_on, "what it has started lives as long as the run goes on"
    finally:
        processes.stop(service)
