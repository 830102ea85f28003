"""The compute plane of a driver on real Ray, Serve, router and etcd; only engines, trainer and roles are stubs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from ray._raylet import AuthenticationTokenLoader
from support.cluster_files import make_secret
from support.etcd_server import EtcdServers
from support.plane_driver import LOST_S_ENV, stubs
from support.stub_actors import FAIL
from support.tiers import full
from support.waiting import PATIENCE_S, wait_until

from elastic_rl import config
from elastic_rl.config.groups import ACTOR
from elastic_rl.coordinator.targets import engine_target, role_target
from elastic_rl.driver import __main__ as driver
from elastic_rl.driver import compute
from elastic_rl.driver.restart_requests import open_requests
from elastic_rl.driver.role_deployments import RoleDeployments
from elastic_rl.engine.router import RouterClient
from elastic_rl.errors import EtcdUnavailable, Fenced
from elastic_rl.etcd import events, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Engine, EngineState, JobStatus, PoolSpec, PoolStatus, RestartRequest
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import leftovers, processes
from elastic_rl.host.compute_services import RAY_HEAD, RAY_WORKER, compute_services
from elastic_rl.host.job_secrets import engine_access
from elastic_rl.host.paths import JobPaths
from elastic_rl.net.addresses import LOOPBACK

_TOGETHER_S = 10.0
"""Time for which drivers that were suspended and the newest one run together."""


class Plane:
    """A driver in a thread, and what etcd says of it."""

    def __init__(self, folder: Path, keys: Keys) -> None:
        self.keys, self.servers = keys, EtcdServers(folder / "etcd", 1).start()
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        cfg = config.parse({"job": keys.job, "run_dir": str(folder), "device": {"type": "cpu"},
                            "rollout": {"engines": 2}, "etcd": {"call_timeout_s": 0.5, "retry_budget_s": 1.0}})
        make_secret(cfg)
        self.ctx = RunContext(config=cfg, etcd_endpoints=self.servers.endpoints, job=keys.job, epoch=0,
                              model_dir=str(model), host=LOOPBACK)
        self.stop, self.code = threading.Event(), []
        self.thread = threading.Thread(target=self._drive, daemon=True)
        self.planes: list[compute.ComputePlane] = []
        self.error: BaseException | None = None

    def _drive(self) -> None:
        try:
            self.code.append(driver.drive(self.ctx, "driver-1", self.stop))
        except BaseException as e:
            self.error = e

    @contextlib.contextmanager
    def etcd(self) -> Iterator[EtcdClient]:
        with self.servers.connect() as etcd:
            yield etcd

    def until(self, check: Callable[[EtcdClient], object], what: str) -> object:
        def looked() -> object:
            try:
                with self.etcd() as etcd:
                    return check(etcd)
            except EtcdUnavailable:
                return None

        return wait_until(looked, what=what, poll_s=0.2, alive=self.thread.is_alive)

    def engines(self, etcd: EtcdClient) -> dict[str, int]:
        found = readable(etcd.range(self.keys.engines_prefix())[0], Engine)
        return {e.id: e.pid for e, _ in found if e.state is EngineState.READY}

    def of_pool(self, etcd: EtcdClient, pool: str) -> dict[str, int]:
        found = readable(etcd.range(self.keys.engines_prefix())[0], Engine)
        return {e.id: e.pid for e, _ in found if e.state is EngineState.READY and e.pool == pool}

    def faults(self, etcd: EtcdClient) -> dict[str, str] | None:
        return next((m.info.get("faults") for m in members(etcd, self.keys, "driver")), None)


@pytest.fixture
def plane(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "of another epoch")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # as in this process, which has read it when it imported Ray
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # for Ray's workers
    for name, stub in stubs().items():
        monkeypatch.setattr(compute, name, stub)
    made = Plane(tmp_path, keys)
    monkeypatch.setattr(driver, "ComputePlane", lambda *args, **options: made.planes.append(
        compute.ComputePlane(*args, **options)) or made.planes[-1])
    AuthenticationTokenLoader.instance().reset_cache()  # this process has used, and will use, a Ray with another token
    yield made
    made.stop.set()
    made.servers.cont(0)
    if made.thread.is_alive():
        made.thread.join(90)
    made.servers.close()
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.mark.timeout(8 * PATIENCE_S)
def test_driver_outlives_an_outage_of_every_part(plane: Plane) -> None:
    # A role that cannot start, and an etcd that stops while the plane starts.
    JobPaths.of(plane.ctx.config).private.mkdir(parents=True, exist_ok=True)
    broken = JobPaths.of(plane.ctx.config).private / FAIL
    plane.thread.start()
    wait_until(lambda: plane.planes, what="the plane's start")
    plane.servers.stop(0)
    # Ray gives a start 30 s, a constant of its own, and the next one begins from nothing: on a busy machine many fail.
    wait_until(lambda: plane.planes[0].trainers, what="Ray", timeout_s=4 * PATIENCE_S, alive=plane.thread.is_alive)
    threading.Event().wait(4.0)  # several times the retry budget of a call
    assert plane.thread.is_alive()
    plane.servers.cont(0)
    before = plane.until(lambda etcd: len(found := plane.engines(etcd)) == 2 and found, "two engines")
    wait_until(lambda: plane.planes[0].waiting == {}, what="the role and the trainer")

    # All of Ray's processes have the token of this driver's epoch.
    token = JobPaths.of(plane.ctx.config).ray_token(plane.planes[0].ctx.epoch)
    of_ray = [p for p in psutil.Process().children(recursive=True) if p.name() in ("raylet", "gcs_server")]
    assert len(of_ray) == 3 and token.exists()
    for process in (*of_ray, *map(psutil.Process, before.values())):
        assert process.environ()["RAY_AUTH_TOKEN_PATH"] == str(token)

    # Both engines and the router end at once.
    router = plane.planes[0].routers["rollout"]
    os.kill(router._service.pid, signal.SIGKILL)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    plane.until(lambda etcd: len(found := plane.engines(etcd)) == 2 and not found.keys() & before.keys(), "two others")
    plane.until(lambda etcd: plane.faults(etcd) == {}, "the router")

    # Etcd is away, for longer than any lease, and an engine ends meanwhile.
    with plane.etcd() as etcd:
        before = plane.engines(etcd)
    plane.servers.stop(0)
    os.kill(next(iter(before.values())), signal.SIGKILL)
    threading.Event().wait(6.0)
    assert plane.thread.is_alive() and not plane.code
    plane.servers.cont(0)
    plane.until(lambda etcd: len(found := plane.engines(etcd)) == 2 and found != before, "the replacement")

    # A start that fails is no end either.
    broken.touch()
    with plane.etcd() as etcd:
        os.kill(next(iter(plane.engines(etcd).values())), signal.SIGKILL)
    plane.until(lambda etcd: "starts failed" in plane.planes[0].waiting.get("pools/rollout", ""), "the report")
    broken.unlink()
    plane.until(lambda etcd: len(plane.engines(etcd)) == 2, "two engines")

    with plane.etcd() as etcd:
        etcd.put(plane.keys.job_status(), JobStatus(phase="finished").encode())
    plane.thread.join(90)
    assert plane.code == [0] and plane.error is None
    assert not [p for p in psutil.Process().children(recursive=True) if "raylet" in p.name()]


class Drivers:
    """The drivers of a job, one after the other, each in a process of its own that the test kills or suspends."""

    def __init__(self, plane: Plane) -> None:
        self._plane, self._job = plane, JobPaths.of(plane.ctx.config)
        self._context = plane.ctx.save(self._job.context())
        self.process: subprocess.Popen[bytes] | None = None
        """The newest one."""
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        self.process = processes.spawn(
            processes.python("support.plane_driver", "--context", str(self._context), "--id", self._id(1)),
            log=self._job.log("driver"), env={"RAY_AUTH_MODE": "token", processes.RUN_MARK: str(self._job.private)})
        self._started.append(self.process)

    def _id(self, after: int = 0) -> str:
        return f"d{len(self._started) + after}"

    def kill(self) -> None:
        """Kills the newest one."""
        assert self.process
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def suspend(self) -> subprocess.Popen[bytes]:
        """Suspends the newest one, and returns it."""
        process = self.process
        assert process
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, what="SIGSTOP")
        return process

    def all_run(self, check: Callable[[dict[str, str]], object] = bool, *, engines: int = 2) -> dict[str, str]:
        """What the newest driver has found or made, once it waits for nothing and ``check`` holds: pids, and the
        addresses of services."""
        driver_id, wanted = self._id(), engines

        def running(etcd: EtcdClient) -> dict[str, str]:
            member = next((m for m in members(etcd, self._plane.keys, "driver") if m.id == driver_id), None)
            engines = self._plane.engines(etcd)
            if (member is None or member.info.get("faults") != {} or member.info.get("waiting") != {}
                    or len(engines) != wanted or open_requests(etcd, self._plane.keys)):
                return {}
            found = {name: str(pid) for name, pid in engines.items()}
            for record in filter(lambda r: r.named, compute_services(self._job).running()):  # else it is just starting
                found |= {record.name: str(record.pid), f"address of {record.name}": record.url}
            found["trainer"] = (self._job.folder.parent / "trainers").read_text().split()[-1]
            return found if check(found) else {}

        with self._plane.servers.connect() as etcd:
            return wait_until(lambda: running(etcd), what=f"all that {driver_id} keeps running", poll_s=0.2,
                              timeout_s=4 * PATIENCE_S, alive=lambda: self.process.poll() is None)

    def kill_child(self, service: str, program: str) -> None:
        """Kill -9 of a process of a node of Ray."""
        record = compute_services(self._job).get(service)
        assert record
        next(child for child in psutil.Process(record.pid).children() if child.name() == program).kill()

    def await_end(self) -> None:
        wait_until(lambda: self.process.poll() is not None, what="the end of the driver")


def differences(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before | after if before.get(name) != after.get(name)}


@pytest.fixture
def drivers(plane: Plane) -> Iterator[Drivers]:
    made = Drivers(plane)
    yield made
    made.kill_all()
    leftovers.sweep(JobPaths.of(plane.ctx.config))


@pytest.mark.timeout(20 * PATIENCE_S)
def test_drivers_and_ray_are_killed_in_turn(plane: Plane, drivers: Drivers) -> None:
    drivers.start()
    before = drivers.all_run()
    assert {RAY_HEAD, RAY_WORKER, "router-rollout", "trainer"} < before.keys()
    drivers.kill()
    drivers.start()
    assert drivers.all_run() == before
    with plane.etcd() as etcd:
        assert fencing.current_epoch(etcd, plane.keys) == 1 and etcd.get(plane.keys.driver()).version == 2

    # Ray's head ends with its GCS: the driver restarts it at its address, and nothing else changes.
    drivers.kill_child(RAY_HEAD, "gcs_server")
    after = drivers.all_run(lambda found: found.get(RAY_HEAD, before[RAY_HEAD]) != before[RAY_HEAD])
    assert differences(before, after) == {RAY_HEAD}

    # The driver works on it as before.
    before, lost = after, next(iter(after))
    os.kill(int(before[lost]), signal.SIGKILL)
    after = drivers.all_run(lambda found: lost not in found)
    assert len(differences(before, after)) == 2, "one engine has taken the place of the other"

    # The worker's raylet is lost, with what runs on it: the driver ends by itself, and the next one starts it again.
    before = after
    drivers.kill_child(RAY_WORKER, "raylet")
    drivers.await_end()
    drivers.start()
    after = drivers.all_run(lambda found: found["trainer"] != before["trainer"])
    assert before.keys() - differences(before, after) == {
        RAY_HEAD, "router-rollout", *(name for name in before if name.startswith("address"))}
    with plane.etcd() as etcd:
        assert fencing.current_epoch(etcd, plane.keys) == 1 and etcd.get(plane.keys.driver()).version == 3

    # All of Ray is lost with its driver: the next one starts it again, in the same epoch and at the same address.
    before = after
    drivers.kill()
    for node in (RAY_HEAD, RAY_WORKER):
        os.kill(int(before[node]), signal.SIGKILL)
    drivers.start()
    after = drivers.all_run(lambda found: found["trainer"] != before["trainer"])
    assert before.keys() - differences(before, after) == {
        "router-rollout", *(name for name in before if name.startswith("address"))}

    # The end of the job ends all of it.
    with plane.etcd() as etcd:
        etcd.put(plane.keys.job_status(), JobStatus(phase="finished").encode())
    assert drivers.process.wait(PATIENCE_S) == 0
    assert not processes.marked(str(JobPaths.of(plane.ctx.config).private)) and not compute_services(
        JobPaths.of(plane.ctx.config)).all()


@full(proved_in="tests/unit/driver/test_ray_service.py", why="a damaged store of a real head")
@pytest.mark.timeout(12 * PATIENCE_S)
def test_ray_whose_store_is_damaged_is_given_up_and_begun_anew(plane: Plane, drivers: Drivers,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOST_S_ENV, "5")
    drivers.start()
    before = drivers.all_run()
    for file in JobPaths.of(plane.ctx.config).ray_store(1).rglob("CURRENT"):
        file.write_text("damaged")
    drivers.kill_child(RAY_HEAD, "gcs_server")
    drivers.await_end()
    drivers.start()
    after = drivers.all_run()
    assert not set(after.values()) & set(before.values())
    with plane.etcd() as etcd:
        assert fencing.current_epoch(etcd, plane.keys) == 2
        assert [e.message.split(":")[0] for e in events.recent(etcd, plane.keys) if e.kind == "run.global_restart"] == [
            "global restart"]
    assert not JobPaths.of(plane.ctx.config).ray_store(1).exists()


def state_in_etcd(plane: Plane, etcd: EtcdClient) -> dict[str, int]:
    """The revision of each key of the job, but for those that members write about themselves."""
    found, _ = etcd.range(plane.keys.root)
    theirs = plane.keys.members_prefix(), plane.keys.processes_prefix("").rstrip("/")
    return {kv.key: kv.mod_revision for kv in found if not kv.key.startswith(theirs)}


@pytest.mark.timeout(12 * PATIENCE_S)
def test_drivers_that_were_suspended_change_nothing_beside_the_newest(plane: Plane, drivers: Drivers) -> None:
    drivers.start()
    first = drivers.all_run()
    oldest = drivers.suspend()

    # The next one takes over, and meanwhile everything is lost and changed that the oldest one remembers.
    drivers.start()
    assert drivers.all_run() == first
    with plane.etcd() as etcd:
        killed, restarted = plane.engines(etcd)
        spec = PoolSpec.decode(etcd.get(plane.keys.pool_spec("rollout")).value)
        etcd.put(plane.keys.pool_spec("rollout"), spec.replace(desired=3).encode())
        for target in (engine_target(restarted), role_target("stub"), ACTOR.name):
            etcd.put(plane.keys.restart(target), RestartRequest(target=target, generation=1, by="test").encode())
    for name in (killed, "router-rollout"):
        os.kill(int(first[name]), signal.SIGKILL)
    second = drivers.all_run(lambda found: all(found.get(part, first[part]) != first[part]
                                               for part in ("trainer", "router-rollout")), engines=3)
    assert not {killed, restarted} & second.keys() and second[RAY_HEAD] == first[RAY_HEAD]
    of_trainer = Path(tempfile.mkdtemp(prefix=JobPaths.of(plane.ctx.config).file_tag(ACTOR.name)))
    older = drivers.suspend()

    # A third one has it all when both go on; one of them was told to stop meanwhile, which ends what a driver keeps.
    drivers.start()
    before = drivers.all_run(engines=3)
    assert before == second
    router = RouterClient(second["address of router-rollout"], access=engine_access(plane.ctx.config))
    with plane.etcd() as etcd:
        urls = {e.url for e, _ in readable(etcd.range(plane.keys.engines_prefix())[0], Engine)}
        wait_until(lambda: router.workers() == dict.fromkeys(urls, True), what="the engines in the router")
        state = state_in_etcd(plane, etcd)
        oldest.send_signal(signal.SIGTERM)
        for process in (oldest, older):
            process.send_signal(signal.SIGCONT)
        threading.Event().wait(_TOGETHER_S)
        assert state_in_etcd(plane, etcd) == state
        assert drivers.all_run(engines=3) == before and router.workers() == dict.fromkeys(urls, True)
    assert of_trainer.exists() and drivers.process.poll() is None
    of_trainer.rmdir()
    assert [process.wait(PATIENCE_S) for process in (oldest, older)] == [1, 1]
    said = JobPaths.of(plane.ctx.config).log("driver").read_text()
    assert said.count("elastic_rl.errors.Fenced") == 2, "each has ended because it was replaced"

    # The newest one is told to stop too.
    drivers.process.terminate()
    assert drivers.process.wait(PATIENCE_S) == 0
    assert not processes.marked(str(JobPaths.of(plane.ctx.config).private)) and not compute_services(
        JobPaths.of(plane.ctx.config)).all()


@pytest.mark.parametrize("call", ["_connect_ray", "reconcile", "close"])
def test_driver_that_a_newer_one_has_replaced_neither_starts_nor_ends_ray(
        plane: Plane, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Suspended while Ray starts, it would take it for one that is not up in time. Without the Ray of its epoch it
    would end what is left."""
    with plane.etcd() as etcd:
        epoch, generation, adopts = driver._begin(etcd, plane.ctx, "older")
        older = compute.ComputePlane(plane.ctx.model_copy(update={"epoch": epoch, "generation": generation}), etcd,
                                     lambda phase: None, lambda seconds: False, adopts=adopts)
        older.roles, calls = RoleDeployments(older.ctx, {}), []
        for name in ("start", "end"):
            monkeypatch.setattr(older._ray, name, lambda name=name, **_: calls.append(name))
        fencing.begin_driver(etcd, plane.keys, epoch, holder="newer")
        with pytest.raises(Fenced):
            getattr(older, call)()
        assert calls == []


@full(proved_in="tests/unit/driver/test_driver_plan.py tests/integration/driver/test_parts_on_ray.py",
      why="several pools at once on a real Ray")
def test_pools_have_engines_routers_and_faults_of_their_own(plane: Plane, tmp_path: Path) -> None:
    judge = config.PoolConfig(model=str(tmp_path / "judge"), engines=1)
    plane.ctx = plane.ctx.model_copy(update={"config": plane.ctx.config.model_copy(update={"pools": {"judge": judge}})})
    plane.thread.start()
    plane.until(lambda etcd: len(plane.of_pool(etcd, "rollout")) == 2, "the policy's engines")
    plane.until(lambda etcd: len(plane.of_pool(etcd, "judge")) == 1, "the judge's engine")
    with plane.etcd() as etcd:
        spec = PoolSpec.decode(etcd.get(plane.keys.pool_spec("judge")).value)
        urls = [PoolStatus.decode(etcd.get(plane.keys.pool_status(name)).value).router_url
                for name in ("rollout", "judge")]
        assert (spec.desired, spec.model, spec.stream) == (1, str(tmp_path / "judge"), "")
        assert all(urls) and urls == [plane.planes[0].routers[name].url for name in ("rollout", "judge")]

        # One pool is scaled, the other one stays.
        policy = plane.of_pool(etcd, "rollout")
        etcd.put(plane.keys.pool_spec("judge"), spec.replace(desired=2).encode())
    plane.until(lambda etcd: len(plane.of_pool(etcd, "judge")) == 2, "a second judge")

    # A router and an engine of one pool end: nothing of the other one changes.
    routers = plane.planes[0].routers
    kept = routers["rollout"]._service.pid
    os.kill(routers["judge"]._service.pid, signal.SIGKILL)
    with plane.etcd() as etcd:
        before = plane.of_pool(etcd, "judge")
        os.kill(next(iter(before.values())), signal.SIGKILL)
    plane.until(lambda etcd: len(found := plane.of_pool(etcd, "judge")) == 2 and found != before, "the replacement")
    plane.until(lambda etcd: any(e.subject == "routers/judge" for e in events.recent(etcd, plane.keys, limit=100)),
                "the report about the router")
    plane.until(lambda etcd: plane.faults(etcd) == {}, "the router")
    assert routers["rollout"]._service.pid == kept
    with plane.etcd() as etcd:
        assert plane.of_pool(etcd, "rollout") == policy
