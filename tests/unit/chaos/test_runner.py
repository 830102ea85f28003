"""What the runner reads of notifications, and what it makes of a job of which nothing is heard."""

from __future__ import annotations

import itertools
import json
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from support.waiting import wait_until

from chaos_tests import abort, collectors, results, runner
from chaos_tests.abort import AbortSwitch
from chaos_tests.event_log import Event, EventLog, Kind, read
from chaos_tests.nemesis.schedule import Schedule, Strike
from chaos_tests.observation import Observer
from chaos_tests.receiver import Notice, Receiver, notices
from chaos_tests.scenarios import SCENARIOS
from chaos_tests.traffic.traffic import Traffic
from chaos_tests.traffic.workloads import Workload
from elastic_rl import config
from elastic_rl.coordinator.alerts.message import compose
from elastic_rl.coordinator.alerts.receiver_queue import NotificationGroup
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.errors import ConfigError, ElasticRLError, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd.cluster_records import JobPhase
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Severity
from elastic_rl.faults.context import FaultContext
from elastic_rl.host.paths import ClusterPaths, JobPaths


@pytest.mark.parametrize("count", [1, 3, 12])
@pytest.mark.parametrize("phase", [Phase.FIRING, Phase.RESOLVED])
def test_notifications_of_the_product_are_read(count: int, phase: Phase) -> None:
    alerts = [Alert(id=f"id{n}", kind="engine.dead", subject=f"10.0.0.{n}:2379", phase=phase, severity=Severity.ERROR,
                    message="it: is dead\nphase=none in its last words", since=1.0, resolved_at=2.0)
              for n in range(count)]
    group = NotificationGroup(id="g", phase=phase, alerts=[alert.id for alert in alerts], created_at=1.0)
    found = [*notices(*compose("job", group, alerts))]
    assert {notice.key for notice in found} == {alert.id for alert in alerts} and len(found) == count
    assert {notice.phase for notice in found} == {phase.value}
    if count < 10:
        assert Notice("engine.dead", "10.0.0.0:2379", phase.value, "id0") in found


def test_receiver_takes_notices_of_who_knows_its_url_alone() -> None:
    got = list[Notice]()
    receiver = Receiver(got.append)
    try:
        url = receiver.url.replace("json://", "http://")
        sent = {"title": "[FIRING] job: engine.dead e", "message": "it is\nid=1 phase=firing severity=error"}
        assert httpx.post(url.rpartition("/")[0] + "/", json=sent).status_code == 404 and not got
        for bad in (b"[1]", b"\xff", b"{}"):
            assert httpx.post(url, content=bad).status_code == 400 and not got
        assert httpx.post(url, json=sent).status_code == 200 and got == [Notice("engine.dead", "e", "firing", "1")]
    finally:
        receiver.close()


def test_what_is_no_alert_is_no_notice() -> None:
    assert [*notices("[TEST] job: hello", "it works")] == []


def test_record_that_finds_no_room_is_not_in_the_log_nor_counted(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.write(Kind.LEFTOVER, what="a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "events.jsonl").stat().st_size + 10, hard))
    try:
        for _ in range(2):
            with pytest.raises(OSError):
                log.write(Kind.LEFTOVER, what="b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert log.error is not None and log.written == {"leftover": 1}
    log.write(Kind.LEFTOVER, what="c")
    log.close()
    lines = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["what"] for line in lines] == ["a", "c"] and log.written == {"leftover": 2}


def test_observer_that_has_ended_says_so_when_it_is_closed(tmp_path: Path) -> None:
    observer = Observer(["127.0.0.1:1"], "/", 1, lambda change: None, log=tmp_path / "missing" / "observer.log")
    wait_until(lambda: not observer._thread.is_alive(), what="the end of the observer")
    with pytest.raises(ElasticRLError, match="the observer has ended: FileNotFoundError"):
        observer.close()


def test_record_of_a_fault_has_what_the_catalogue_says_of_it(tmp_path: Path) -> None:
    event_log = EventLog(tmp_path / "events.jsonl")
    others = cast(Any, SimpleNamespace(write=lambda *_, **__: None))
    recorded = collectors.FaultCopier(event_log, others, lambda _: None)
    recorded.write("fault", name="raylet_killed", step=3, target="", problem="", injected_at=1.0, healed_at=2.0)
    event_log.close()
    [line] = (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line).items() >= {"parts": ["ray", "driver", "engines", "roles", "trainer"],
                                        "seen_in": ["driver", "engines", "ray", "roles", "trainer"]}.items()


# -- a run of a job of which nothing is heard --------------------------------------------------------------------------
class Away:
    """A target whose etcd does not answer, and whose job makes no step."""

    own, name = True, "one host"

    def __init__(self, folder: Path) -> None:
        self.cfg = config.parse({"job": "j", "run_dir": str(folder)})
        self.paths, self.keys, self.cluster_keys = JobPaths.of(self.cfg), Keys("j"), ClusterKeys("j")
        self.paths.folder.mkdir(parents=True)
        ClusterPaths.of(self.cfg).folder.mkdir(mode=0o700)
        self.folders, self.hosts = (self.paths,), dict[str, str]()
        self.observed = (self.keys.root,)
        self.info = SimpleNamespace(etcd_endpoints=["127.0.0.1:1"])
        self.cluster = SimpleNamespace(here=self.cfg, stop_run=self.away, dir=folder, cfg=self.cfg)
        self.etcd = self.reader = SimpleNamespace(revision=self.away, put=self.away, range=self.away, get=self.away)
        self.api = SimpleNamespace(get=self.away)
        self.reading = self.alerts = self.committed_steps = self.refused = self.away

    def away(self, *_: object, **__: object) -> Any:
        raise EtcdUnavailable("no member answers")

    def report(self) -> dict[str, Any]:
        return {"steps": 3}

    def heal(self) -> None:
        pass

    def stop_job(self) -> None:
        self.away()

    def context(self, undo: object) -> FaultContext:
        return FaultContext(self.cfg, cast(Any, self.etcd), self.keys, cast(Any, self.api))


class NoObserver:
    def __init__(self, *_: object, **__: object) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Broken(Traffic):
    def workers(self) -> list[Callable[[], None]]:
        return [self._work]

    def _work(self) -> None:
        raise RuntimeError("a client has a bug")


def followed(folder: Path, monkeypatch: pytest.MonkeyPatch, *, recovery_s: float = 0.2, why: str = "") -> Event:
    """The end of a run against ``Away``."""
    for name, value in (("Observer", NoObserver), ("_END_S", 0.0), ("_ALERTS_END_S", 0.0),
                        ("WORKLOADS", {"broken": Workload(lambda *_: Broken(), "")})):
        monkeypatch.setattr(runner, name, value)
    aborts = AbortSwitch(folder)
    if why:
        aborts.request(why)
    log = EventLog(folder / "events.jsonl")
    scenario = replace(SCENARIOS["quick"], traffic=("broken",))
    end = runner._Run(cast(Any, Away(folder / "runs")), scenario, Schedule(1, 10, (), scenario="quick"), folder, log,
                       aborts, runner.Limits(recovery_s=recovery_s), lambda line: None).run_to_end()
    return {**end, "aborted": aborts.why}


@pytest.mark.timeout(60)
def test_job_that_makes_no_step_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = followed(tmp_path, monkeypatch)
    assert end["aborted"] == "no step was made for 0.2 s"


@pytest.mark.timeout(60)
def test_job_that_never_recovers_from_a_fault_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where etcd is away for good, so that no time counts against the fault."""
    monkeypatch.setattr(runner, "_POLL_S", 0.01)
    aborts, injector = AbortSwitch(tmp_path), SimpleNamespace(under_way={"etcd_stopped": 1.0})
    play = runner._Run(cast(Any, Away(tmp_path / "runs")), SCENARIOS["quick"], Schedule(1, 10, (), scenario="quick"),
                       tmp_path, EventLog(tmp_path / "events.jsonl"), aborts, runner.Limits(recovery_s=0.2),
                       lambda line: None)
    play._await_end(cast(Any, injector), cast(Any, SimpleNamespace(done=3, newest=3)))
    assert aborts.why == "no step was made for 0.4 s"


@pytest.mark.parametrize("overlap", [1, 3])
def test_faults_are_injected_with_the_pauses_of_their_scenario(tmp_path: Path, overlap: int) -> None:
    """Also into a job of others, whose limits may let fewer happen at once."""
    injector = runner._Run(cast(Any, Away(tmp_path / "runs")), replace(SCENARIOS["every"], rest_steps=7), Schedule(
        1, 10, (Strike(3, ("dcs_killed",)),), scenario="every"), tmp_path, EventLog(tmp_path / "events.jsonl"),
        AbortSwitch(tmp_path), runner.Limits(overlap, recovery_s=5.0), lambda line: None)._injector()
    assert (injector._rest_steps, injector._rooms._value, injector._heal_timeout_s) == (7, overlap, 5.0)


@pytest.mark.timeout(60)
def test_run_that_is_aborted_while_etcd_is_away_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = followed(tmp_path, monkeypatch, recovery_s=600.0, why="SIGINT")
    assert (end["aborted"], end["report"], end["phase"], end["committed_steps"], end["alerts"], end["revision"]) == (
        "SIGINT", {"steps": 3}, "", None, [], None)


@pytest.mark.timeout(60)
def test_client_that_has_ended_by_an_error_is_a_problem_of_the_run(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert followed(tmp_path, monkeypatch)["problems"] == ["RuntimeError: a client has a bug"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("own", "strikes", "sampled"), [
    (True, (), {"store", "processes"}), (True, (Strike(3, ("engine_killed",)),), set[str]()), (False, (), set[str]())],
    ids=["without faults", "with faults", "of others"])
def test_what_a_run_takes_is_sampled_on_its_own_cluster_without_faults(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, strikes: tuple[Strike, ...], sampled: set[str]
        ) -> None:
    taken, target = set[str](), Away(tmp_path / "runs")
    monkeypatch.setattr(target, "own", own, raising=False)
    target.etcd.revision = lambda: 7
    monkeypatch.setattr(runner, "Observer", NoObserver)
    monkeypatch.setattr(runner, "_END_S", 1.0)
    for name in ("store", "processes"):
        monkeypatch.setattr(runner._Run, f"_sample_{name}", lambda self, name=name: taken.add(name))
    aborts, log = AbortSwitch(tmp_path), EventLog(tmp_path / "events.jsonl")
    aborts.request("SIGINT")
    runner._Run(cast(Any, target), replace(SCENARIOS["quick"], traffic=()), Schedule(
        1, 10, strikes, scenario="quick"), tmp_path, log, aborts, runner.Limits(), lambda line: None).run_to_end()
    assert taken == sampled


def test_poller_that_has_ended_by_an_error_says_so() -> None:
    def poll() -> None:
        raise KeyError("step")

    poller = collectors.Poller(poll, 0.01)
    with pytest.raises(KeyError, match="step"):
        poller.close()


class Stepping:
    """The steps of a job that has made another one each time that somebody looks."""

    newest = 7

    def __init__(self) -> None:
        self._before = True

    @property
    def done_at(self) -> float:
        """The first look finds one that was done before."""
        before, self._before = self._before, False
        return 0.0 if before else time.time()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("back", [True, False])
def test_job_is_asked_to_stop_once_all_is_back_and_a_step_was_made(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: bool) -> None:
    monkeypatch.setattr(runner, "_POLL_S", 0.01)
    target, log, aborts = Running(tmp_path / "runs"), EventLog(tmp_path / "events.jsonl"), AbortSwitch(tmp_path)
    play = runner._Run(cast(Any, target), SCENARIOS["quick"], Schedule(1, 10, (), scenario="quick"), tmp_path, log,
                        aborts, runner.Limits(recovery_s=600.0 if back else 0.2), lambda line: None)

    def change(revision: int, key: str, record: object) -> None:
        play._on_change({"revision": revision, "create": revision, "put": True, "key": key,
                         "value": json.dumps(record)})

    change(2, target.keys.pool_spec("rollout"), {"desired": 2})
    change(3, target.keys.pool_status("rollout"), {"ready": 1})
    waits = threading.Thread(target=play._await_return, args=(Stepping(),), daemon=True)
    waits.start()
    if back:
        waits.join(0.1)
        assert waits.is_alive(), "an engine is not back"
        change(4, target.keys.pool_status("rollout"), {"ready": 2})
    waits.join()
    [stop] = [event for event in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
              if event["kind"] == Kind.STOP]
    assert (stop["revision"], stop["step"]) == (4 if back else 3, 7) and stop["since"] <= stop["at"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("looks", [1, 3, None])
def test_key_that_outlives_all_leases_is_left_behind(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int | None) -> None:
    """``looks``: after how many it is gone; None: it stays."""
    monkeypatch.setattr(runner, "_POLL_S", 0.01)
    target, log = Running(tmp_path / "runs"), EventLog(tmp_path / "events.jsonl")
    monkeypatch.setattr(runner, "_LEASES_END_S", 0.2 - target.cfg.dcs.pin_ttl_s)
    left = itertools.count(1)
    monkeypatch.setattr(target, "unowned", lambda: [] if next(left) == looks else ["/elastic_rl/j/members/e/1"],
                        raising=False)
    runner._Run(cast(Any, target), SCENARIOS["quick"], Schedule(1, 10, (), scenario="quick"), tmp_path, log,
                AbortSwitch(tmp_path), runner.Limits(), lambda line: None)._await_leases()
    found = [json.loads(line)["what"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert found == ([] if looks else ["the key /elastic_rl/j/members/e/1, whose owner has ended,"])


def test_log_has_no_secret_of_the_settings_that_a_job_was_begun_with(tmp_path: Path) -> None:
    target, log = Running(tmp_path / "runs"), EventLog(tmp_path / "events.jsonl")
    play = runner._Run(cast(Any, target), SCENARIOS["quick"], Schedule(1, 10, (), scenario="quick"), tmp_path, log,
                        AbortSwitch(tmp_path), runner.Limits(), lambda line: None)
    kept = {"data.options": {"api_key": "hf_1234567", "rows": 5}}
    play._on_change({"revision": 2, "create": 2, "put": True, "key": target.keys.job_spec(),
                     "value": json.dumps({"settings": kept})})
    text = (tmp_path / "events.jsonl").read_text()
    assert "hf_1234567" not in text and "rows" in text


# -- a job on several hosts --------------------------------------------------------------------------------------------
def test_run_on_hosts_says_at_once_that_this_machine_cannot_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    def refuse() -> None:
        raise PreflightFailed("no host can be made on this machine", hint="run it as root")

    monkeypatch.setattr(runner.isolated_hosts, "require", refuse)
    with pytest.raises(PreflightFailed, match="no host can be made"):
        runner.run(Schedule(1, 0, (), 0.5, "hosts"), tmp_path / "results")
    assert [*tmp_path.iterdir()] == []


def test_steps_of_all_hosts_are_copied_once_in_the_order_of_their_times(tmp_path: Path) -> None:
    target = Away(tmp_path / "runs")
    other = JobPaths.of(config.parse({"job": "j", "run_dir": str(tmp_path / "host-2")}))
    other.folder.mkdir(parents=True)
    target.folders = (target.paths, other)
    log = EventLog(tmp_path / "events.jsonl")
    steps = collectors.StepCopier(cast(Any, target), log)
    for paths, records in ((target.paths, [(1, 10.0), (2, 11.0), (4, 14.0)]), (other, [(2, 12.0), (3, 13.0)])):
        with paths.steps.open("a") as file:
            file.writelines(json.dumps({"kind": "step", "step": step, "at": at}) + "\n" for step, at in records)
    steps.poll()
    steps.poll()
    assert [(event["step"], event["at"]) for event in read_steps(log.path)] == [
        (1, 10.0), (2, 11.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert steps.newest == 4


def read_steps(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- a job that runs already -------------------------------------------------------------------------------------------
class Running(Away):
    """A job of others, which makes steps."""

    own, name, over = False, "job j in a folder", False

    def __init__(self, folder: Path, alerts: Sequence[Alert] = ()) -> None:
        super().__init__(folder)
        self.cluster.here = self.cfg
        self.etcd.revision = lambda: 41
        self.reading = lambda: SimpleNamespace(phase=JobPhase.RUNNING, over=False)
        self.alerts = lambda: [*alerts]
        self.committed_steps = lambda: [1, 2]
        self.paths.steps.write_text('{"kind": "step", "step": 1, "at": 1.0}\n')

    def train(self, aborts: AbortSwitch) -> None:
        """Makes steps from now on."""
        def work() -> None:
            for step in itertools.count(2):
                with self.paths.steps.open("a") as file:
                    file.write(json.dumps({"kind": "step", "step": step, "at": float(step)}) + "\n")
                aborts.wait(0.05)
                if aborts.why or self.over:
                    return

        threading.Thread(target=work, daemon=True).start()


def attached(folder: Path, target: Running, monkeypatch: pytest.MonkeyPatch, minutes: float
             ) -> tuple[results.Outcome, list[Event]]:
    for name, value in (("Observer", NoObserver), ("_END_S", 0.0), ("_ALERTS_END_S", 0.0), ("_POLL_S", 0.05),
                        ("require_client", lambda: None)):
        monkeypatch.setattr(runner, name, value)
    try:
        outcome = runner.run_attached(Schedule(1, 0, (), minutes, "quick"), folder / "results", cast(Any, target),
                                      runner.Limits(aborts_itself=True), switch=target.train)
    finally:
        target.over = True
    return outcome, [*read(folder / "results" / "events.jsonl")]


def test_two_runs_do_not_strike_one_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Running(tmp_path / "runs")
    with (abort.alone(ClusterPaths.of(target.cfg).folder),
          pytest.raises(ConfigError, match="another chaos run strikes this cluster")):
        attached(tmp_path, target, monkeypatch, 0.005)
    assert not (tmp_path / "results").exists()
    with abort.alone(ClusterPaths.of(target.cfg).folder):
        pass


@pytest.mark.timeout(60)
def test_run_against_a_job_that_runs_ends_with_its_minutes_and_leaves_the_job(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, events = attached(tmp_path, Running(tmp_path / "runs"), monkeypatch, 0.005)
    begin, end = events[0], events[-1]
    assert (begin["target"], begin["traffic"], begin["baseline"]) == ("job j in a folder", [], False)
    assert (end["phase"], end["committed_steps"], end["aborted"], end["problems"], end["revision"]) == (
        "running", [1, 2], "", [], None)
    steps = [event["step"] for event in events if event["kind"] == Kind.STEP]
    assert steps and steps[0] > 1, "its steps of before are not of this run"
    assert not outcome.aborted and (outcome.folder / "report.html").exists()
    assert outcome.failed and "run: the observer saw no change of etcd" in outcome.wrong, "nobody has observed this one"
    assert "I1" in outcome.unseen


@pytest.mark.timeout(60)
def test_run_against_a_job_that_runs_aborts_itself_on_an_alert_of_no_fault(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alert = Alert(id="a", kind="engine.dead", subject="e", message="it has ended", phase=Phase.FIRING,
                  severity=Severity.ERROR, since=1.0)
    outcome, events = attached(tmp_path, Running(tmp_path / "runs", [alert]), monkeypatch, 60.0)
    assert outcome.failed and "engine.dead of e is of none of the faults" in outcome.aborted
    assert events[-1]["aborted"] == outcome.aborted and [a["id"] for a in events[-1]["alerts"]] == ["a"]
