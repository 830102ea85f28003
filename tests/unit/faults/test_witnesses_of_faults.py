"""What faults say that they did is what they did, and what they leave is noted: processes are real, the job is not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

import psutil
import pytest
from support.fault_gate import end_waits
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.dcs.manifest import Packer
from elastic_rl.errors import DeadlineExceeded, EtcdUnavailable, Fenced
from elastic_rl.etcd.cluster_records import driver_of
from elastic_rl.etcd.records import EngineState
from elastic_rl.faults import outages, stale, states, storage
from elastic_rl.faults.context import FaultContext, ForeignProcess, InjectionEnded, VictimTaken, stopped
from elastic_rl.faults.hosts import EtcdQuorumStopped, HostsContext, Victim, etcd_killed
from elastic_rl.faults.kinds import TrainerRankStopped
from elastic_rl.faults.outages import ActorKilled, SecondActor, TrainerStopped
from elastic_rl.faults.processes import PROCESS_KINDS, Struck, Way
from elastic_rl.faults.stale import RacingRequests
from elastic_rl.faults.states import VictimState, provoked
from elastic_rl.faults.storage import ChunksDamaged, DiskRefusesWrites
from elastic_rl.faults.undo import UndoRegistry
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import OWNER_ENV, RUN_MARK

NOTHING: Any = None
Start = Callable[..., subprocess.Popen[bytes]]


class Context(FaultContext):
    """Of a job whose pool is to have seven engines, none of its settings says so."""

    def __init__(self, folder: Path, api: Any = None) -> None:
        super().__init__(config.parse({"job": "j", "run_dir": str(folder)}), NOTHING, NOTHING, api,
                         undo=UndoRegistry(folder / "undo"))
        self.processes_of_engines = list[int]()

    def desired(self, pool: str = "") -> int:
        return 7

    def step(self) -> int:
        return 9

    def engines(self, pool: str = "") -> list[Any]:
        return [SimpleNamespace(id=f"e{pid}", state=EngineState.READY, external=False, pid=pid, started_at=pid)
                for pid in self.processes_of_engines]


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(tmp_path)


@pytest.fixture
def start(context: Context) -> Iterator[Start]:
    """Starts processes of the job, or ones that have this code and this in their environment."""
    started = list[subprocess.Popen[bytes]]()

    def one(env: Mapping[str, str] | None = None, code: str = "import signal; signal.pause()"
            ) -> subprocess.Popen[bytes]:
        env = {RUN_MARK: str(JobPaths.of(context.cfg).private)} if env is None else env
        started.append(subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **env}))
        wait_until(lambda: psutil.Process(started[-1].pid).environ().items() >= env.items() and psutil.Process(
            started[-1].pid).cmdline(), what="its environment")
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("pid", "disk_fault", "refused"), [
    (0, "", False), (0, "File too large", True), (0, "Input/output error", False), (1, "File too large", False)])
def test_disk_has_refused_what_its_node_says_that_it_has(
        pid: int, disk_fault: str, refused: bool, context: Context, start: Start, monkeypatch: pytest.MonkeyPatch
        ) -> None:
    """Chunks wait for their turn also where the disk takes each of them. ``pid``: 1 for another node."""
    node = start()
    before = resource.prlimit(node.pid, resource.RLIMIT_FSIZE)
    monkeypatch.setattr(storage, "_node", lambda of: node.pid)
    monkeypatch.setattr(storage, "_records", lambda of: [
        SimpleNamespace(pid=pid or node.pid, unsaved=3, disk_fault=disk_fault)])
    fault = DiskRefusesWrites(context, 0.01)
    _, witness = fault.inject()
    assert fault.detected() is bool(witness) is refused
    assert not witness or "3 chunks were not on its disk" in witness
    assert resource.prlimit(node.pid, resource.RLIMIT_FSIZE) == before and context.undo.pending() == []


@pytest.mark.parametrize("chunks", [0, 2])
def test_damage_is_of_so_many_chunks_and_kills_two_processes(
        chunks: int, context: Context, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, engine = start(), start()
    context.processes_of_engines = [engine.pid]
    (tmp_path / "ab").mkdir()
    for n in range(chunks):
        (tmp_path / "ab" / f"c{n}").write_bytes(b"12345678")
    # The model is published once: its only copy is not to be lost by the schedule.
    packer = Packer(64)
    packer.add("t", "uint8", (64,))
    once = {"m0": packer.manifest(["c9"]).encode(), "c9": b"87654321"}
    for name, data in once.items():
        (tmp_path / name[:2]).mkdir(exist_ok=True)
        (tmp_path / name[:2] / name).write_bytes(data)
    versions = {"model": [SimpleNamespace(manifest="m0"), SimpleNamespace(manifest="gone")], "run_log": []}
    monkeypatch.setattr(storage, "_node", lambda of: node.pid)
    monkeypatch.setattr(storage, "_records", lambda of: [])
    monkeypatch.setattr(ChunksDamaged, "_folder", staticmethod(lambda pid: tmp_path))
    monkeypatch.setattr(storage, "reads", SimpleNamespace(
        head=lambda etcd, keys, stream: None, list_versions=lambda etcd, keys, stream: versions[stream]))
    _, witness = ChunksDamaged(context, torn=True).inject()
    assert all((tmp_path / name[:2] / name).read_bytes() == data for name, data in once.items())
    if chunks:
        assert "each of 2 chunks" in witness and witness.count("was sent SIGKILL") == 2
        assert [path.read_bytes() for path in (tmp_path / "ab").iterdir()] == [b"1234"] * 2
    else:
        assert witness == "", "nothing was damaged"
    assert [what for _, what in context.struck] == [f"pid {pid} was sent SIGKILL" for pid in (node.pid, engine.pid)]


def test_damage_has_healed_once_the_trainer_has_saved_another_state(
        context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had saved is damaged, too: before that, the next fault of the trainer would leave nothing to resume
    from."""
    heads = {"policy": 9, "trainer_state": 3}
    monkeypatch.setattr(storage, "reads", SimpleNamespace(
        head=lambda etcd, keys, stream: SimpleNamespace(number=heads[stream])))
    monkeypatch.setattr(context, "ready", lambda pool: {"new"})
    fault = ChunksDamaged(context, torn=True)
    fault._victim, fault._desired, fault._state = "old", 1, 3
    assert not fault.is_back()
    heads["policy"] = 11
    assert not fault.is_back()
    heads["trainer_state"] = 4
    assert fault.is_back()


def test_clients_that_race_put_the_size_of_the_pool_back_which_is_noted_before(tmp_path: Path) -> None:
    asked, noted = list[int](), list[Any]()

    def patch(path: str, body: dict[str, int]) -> None:
        noted.append(context.undo.pending())
        asked.append(body["desired"])

    context = Context(tmp_path, SimpleNamespace(patch=patch))
    fault = RacingRequests(context, clients=2, rounds=3)
    assert "desired=7 was accepted" in fault.inject()[1]
    assert set(asked) == {7, 8} and asked[-1] == 7
    assert all((entry["undo"], entry["desired"], entry["job"]) == ("resize", 7, "j") for [entry] in noted)
    assert all(set(asked) == {entry["desired"], *entry["during"]} for [entry] in noted), "every size that it sets"
    assert context.undo.pending() == []


def test_first_request_of_clients_that_race_is_over_when_the_injection_has_ended(tmp_path: Path) -> None:
    waits = list[bool]()
    context = Context(tmp_path, SimpleNamespace(patch=lambda path, body: waits.append(end_waits(context))))
    RacingRequests(context, clients=1, rounds=3).inject()
    assert waits == [True, False, False, False], "the first one is the strike"


def test_term_of_a_second_actor_is_begun_before_the_injection_has_ended_or_never(
        context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[bool]()

    def begin_term(*_: Any) -> int:
        waits.append(end_waits(context))
        raise Fenced("the epoch is over")

    monkeypatch.setattr(outages, "fencing", SimpleNamespace(current_epoch=lambda *_: 1, begin_term=begin_term))
    with pytest.raises(Fenced):
        SecondActor(context, 1.0).inject()
    context.end()
    with pytest.raises(InjectionEnded):
        SecondActor(context, 1.0).inject()
    assert waits == [True]


def test_clients_end_with_the_injection(tmp_path: Path) -> None:
    asked = list[int]()

    def patch(path: str, body: dict[str, int]) -> None:
        asked.append(body["desired"])
        context.end()

    context = Context(tmp_path, SimpleNamespace(patch=patch))
    with pytest.raises(InjectionEnded):
        RacingRequests(context, clients=1, rounds=50).inject()
    assert asked == [7]


class Hosts(HostsContext):
    """Three hosts, each with a member of etcd, whose leader is on the first one."""

    def __init__(self, folder: Path, members: Mapping[str, psutil.Process]) -> None:
        self.members_of_etcd, self.leads_now, self.waits = members, "a", list[bool]()
        isolated = SimpleNamespace(processes=lambda name: [members[name]])
        hosts = SimpleNamespace(isolated=isolated, all=lambda: [SimpleNamespace(name=n, address=n) for n in members])
        super().__init__(cast(Any, hosts), config.parse({"job": "j", "run_dir": str(folder)}),
                         cast(Any, SimpleNamespace(revision=self.revision)), NOTHING, 3,
                         undo=UndoRegistry(folder / "undo"))

    def revision(self) -> int:
        self.waits.append(end_waits(self))
        raise EtcdUnavailable("no member answers")

    def candidates(self, victim: Victim) -> list[str]:
        return [self.leads_now] if victim is Victim.ETCD_LEADER else []

    def names_on(self, host: str) -> list[str]:
        return [host]

    def leads(self) -> None:
        return None

    def processes_on(self, host: str, part: str) -> list[psutil.Process]:
        return [self.members_of_etcd[host]]


@pytest.fixture
def hosts(start: Start, tmp_path: Path) -> Hosts:
    return Hosts(tmp_path, {name: psutil.Process(start({}).pid) for name in "abc"})


def test_members_of_etcd_that_are_stopped_are_noted_and_an_abort_does_not_wait_for_the_witness(hosts: Hosts) -> None:
    fault, [one, two, other] = EtcdQuorumStopped(hosts, 0.0), hosts.members_of_etcd.values()
    assert "etcd does not answer" in fault.inject()[1] and hosts.waits == [False]
    assert [entry["pid"] for entry in hosts.undo.pending()] == [one.pid, two.pid]
    assert [p.status() == psutil.STATUS_STOPPED for p in (one, two, other)] == [True, True, False]
    fault.give_up()
    wait_until(lambda: psutil.STATUS_STOPPED not in (one.status(), two.status()), what="the members to go on")
    assert hosts.undo.pending() == []


def test_member_of_etcd_that_another_fault_has_killed_is_not_killed_again(hosts: Hosts) -> None:
    member = hosts.members_of_etcd["a"]
    hosts.take(member)
    with pytest.raises(VictimTaken):
        etcd_killed(hosts, Victim.ETCD_LEADER).inject()
    assert hosts.struck == [] and member.is_running()
    hosts._taken.clear()
    fault = etcd_killed(hosts, Victim.ETCD_LEADER)
    fault._prepare = lambda: setattr(hosts, "leads_now", "b")  # type: ignore[method-assign]
    with pytest.raises(VictimTaken, match="no more"):
        fault.inject()
    assert hosts.struck == [] and member.is_running()
    hosts.leads_now = "a"
    assert "SIGKILL" in etcd_killed(hosts, Victim.ETCD_LEADER).inject()[1], "who was not struck was not taken"


def test_each_attempt_to_provoke_a_state_is_in_the_witness(context: Context) -> None:
    kills, caught = iter(("pid 1 was sent SIGKILL", "pid 2 was sent SIGKILL")), iter((0, 5))
    state = VictimState("taking_over", lambda of, pid: "", provoke=lambda of: next(kills))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elastic_rl.faults.states.wait_until", lambda attempt, **_: attempt() or _passed())
        assert provoked(state, context, lambda: next(caught)) == (
            5, "pid 1 was sent SIGKILL; pid 2 was sent SIGKILL")


def _passed() -> int:
    raise DeadlineExceeded("no process was caught")


def test_reading_after_the_strike_waits_for_etcd_and_the_strike_is_made_once(
        context: Context, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.faults.context.AWAY_PAUSES_S", (0.01, 0.01))
    answers = iter([False, False, True])

    def read() -> str:
        if not next(answers):
            raise EtcdUnavailable("no member answers")
        return "read"

    victim = start()
    context.kill(victim.pid)
    assert context.answered(read) == "read" and len(context.struck) == 1


@pytest.mark.parametrize(("way", "unnoticed"), [(Way.KILLED, False), (Way.PAUSED, True)])
def test_only_what_goes_on_may_go_unnoticed(way: Way, unnoticed: bool, context: Context) -> None:
    assert Struck(context, "engine", way, seconds=0.0 if way.ends else 1.0).may_go_unnoticed is unnoticed


def test_coordinator_is_back_when_there_are_as_many_as_before(context: Context, start: Start,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    pids = [start().pid, start().pid]
    replicas = [SimpleNamespace(name=f"coordinator-{n}", pid=pid) for n, pid in enumerate(pids)]
    monkeypatch.setattr("elastic_rl.faults.processes.ServiceFiles",
                        lambda path: SimpleNamespace(running=lambda: replicas))
    monkeypatch.setattr(Context, "leader", lambda self: SimpleNamespace(pid=leading[0]))
    leading = [pids[0]]
    assert PROCESS_KINDS["coordinator"].pids(context) == pids, "the one that leads first"
    fault = Struck(context, "coordinator", Way.KILLED)
    fault.inject()
    leading[0] = pids[1]
    replicas.pop(0)
    assert not fault.is_back()
    replicas.append(SimpleNamespace(name="coordinator-0", pid=start().pid))
    assert fault.is_back()


@pytest.mark.parametrize(("refused", "lives"), [(True, True), (True, False), (False, True)])
def test_zombie_driver_is_one_that_goes_on_and_whose_write_is_refused(
        refused: bool, lives: bool, context: Context, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = subprocess.Popen([sys.executable, "-uc", "import signal, sys; signal.signal(signal.SIGCONT, lambda *_: "
                               "sys.exit(0)); print('ready'); signal.pause()"], stdout=subprocess.PIPE,
                              env={RUN_MARK: str(JobPaths.of(context.cfg).private)})
    assert driver.stdout is not None and driver.stdout.readline(), "it ends when it goes on, as one that is fenced"

    def require() -> None:
        if refused:
            raise Fenced("driver 3 is over")

    def begin_driver(*_: Any) -> int:
        if not lives:
            driver.kill()
            driver.wait()
        return 4

    monkeypatch.setattr(Context, "members", lambda self, role: [SimpleNamespace(pid=driver.pid)])
    monkeypatch.setattr(stale, "fencing", SimpleNamespace(
        current_driver=lambda *_: 3, current_epoch=lambda *_: 1, begin_driver=begin_driver))
    monkeypatch.setattr(stale, "FencedWriter", SimpleNamespace(of_driver=lambda *_: SimpleNamespace(require=require)))
    fault = stale.ZombieDriver(cast("Any", context))
    try:
        if not lives:
            assert fault.inject()[1] == "", "its run had ended it: it never went on"
        elif refused:
            assert "generation 4 began; it went on and ended; a write under its generation was refused" in (
                fault.inject()[1])
        else:
            with pytest.raises(stale.FencingBroken, match="was accepted"):
                fault.inject()
        wait_until(lambda: driver.poll() is not None, what="the end of the driver, which goes on")
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()


def test_process_is_the_victim_of_one_fault(context: Context, start: Start) -> None:
    ended, victim = start(), start()
    ended.kill()
    ended.wait()
    for pid in (ended.pid, 0x7fffffff):
        with pytest.raises(VictimTaken):
            context.kill(pid)
    assert context.struck == [], "nothing was done"
    context.take(psutil.Process(victim.pid))
    with pytest.raises(VictimTaken):
        context.kill(victim.pid)
    assert victim.poll() is None and context.struck == []


@pytest.mark.parametrize("fault", [ActorKilled, TrainerStopped, TrainerRankStopped])
def test_fault_whose_victim_is_away_for_a_moment_is_begun_again(fault: Any, context: Context,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "training", lambda of: "at step 9")
    monkeypatch.setattr(Context, "members", lambda of, role: [], raising=False)
    monkeypatch.setattr(Context, "trainer_ranks", lambda of: [], raising=False)
    with pytest.raises(VictimTaken):
        fault(context).inject()
    assert context.struck == []


def test_run_of_another_job_of_the_cluster_is_not_struck(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [SimpleNamespace(name=quote(driver_of(job), safe=""), pid=pid) for job, pid in (("a", 11), ("j", 12))]
    monkeypatch.setattr("elastic_rl.faults.processes.ServiceFiles.running", lambda files: runs)
    assert PROCESS_KINDS["run"].pids(context) == [12]


@pytest.mark.parametrize("env", [{}, {RUN_MARK: "/runs/another/cluster"}])
def test_process_that_is_none_of_the_job_or_its_cluster_is_left_alone(env: dict[str, str], context: Context,
                                                                     start: Start) -> None:
    other = psutil.Process(start(env).pid)
    limit = resource.prlimit(other.pid, resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROCESS_KINDS, "dcs", replace(PROCESS_KINDS["dcs"], pids=lambda of: [other.pid]))
        patch.setattr(storage, "_node", lambda of: other.pid)
        caught = Struck(context, "dcs", Way.PAUSED, seconds=1.0, state=VictimState("busy", lambda of, pid: "busy"))
        for strike in (lambda: context.kill(other.pid), lambda: context.take(other), lambda: context.stop(other),
                       lambda: stopped(context, other).__enter__(), lambda: DiskRefusesWrites(context, 1.0).inject(),
                       *(Struck(context, "dcs", way, seconds=0.0 if way.ends else 1.0).inject for way in Way),
                       caught.inject):
            with pytest.raises(ForeignProcess, match=f"pid {other.pid} is no process of the job j or its cluster"):
                strike()
    assert other.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    assert context.struck == [] and context.undo.pending() == []
    assert resource.prlimit(other.pid, resource.RLIMIT_FSIZE) == limit


def test_services_of_the_cluster_are_its_own_as_are_those_that_have_lost_their_marks_to_their_titles(
        context: Context, start: Start) -> None:
    service = start({OWNER_ENV: str(ClusterPaths.of(context.cfg).folder)})
    parent = start(code="import signal, subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import signal, "
                        "setproctitle; setproctitle.setproctitle(\"sglang::scheduler\"); signal.pause()'])")

    def titled() -> list[psutil.Process]:
        return [p for p in psutil.Process(parent.pid).children() if p.cmdline()[:1] == ["sglang::scheduler"]]

    [scheduler] = wait_until(titled, what="its title")
    assert not scheduler.environ() and context.owns(scheduler) and context.owns(psutil.Process(service.pid))
    context.kill(scheduler.pid)


def test_process_of_another_user_is_none_of_the_job(context: Context, start: Start,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    process = psutil.Process(start().pid)
    assert context.owns(process)
    monkeypatch.setattr(os, "geteuid", lambda: process.uids().real + 1)
    assert not context.owns(process)


def test_process_that_is_sent_sigterm_is_not_the_victim_of_a_kill(context: Context, start: Start,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    node = start()
    monkeypatch.setitem(PROCESS_KINDS, "dcs", replace(PROCESS_KINDS["dcs"], pids=lambda of: [node.pid]))
    assert "was sent SIGTERM" in Struck(context, "dcs", Way.TERMINATED).inject()[1]
    for way in (Way.KILLED, Way.TERMINATED):
        with pytest.raises((VictimTaken, psutil.NoSuchProcess)):
            Struck(context, "dcs", way).inject()


def test_outage_of_all_engines_kills_those_that_no_other_fault_has_killed(
        context: Context, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = start(), start()
    context.processes_of_engines = [one.pid, other.pid]
    monkeypatch.setattr(Context, "desired", lambda self, pool="": 2)
    monkeypatch.setattr(Context, "ready", lambda self, pool="": {e.id for e in self.engines()})
    context.kill(one.pid)
    _, witness = outages.AllEnginesKilled(context).inject()
    assert witness.count("SIGKILL") == 1 and f"pid {other.pid} " in witness
    with pytest.raises(VictimTaken):
        outages.AllEnginesKilled(context).inject()
