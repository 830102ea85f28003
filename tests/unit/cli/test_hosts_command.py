"""``elastic-rl hosts``: which cluster it addresses, and how it shows what it gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic_rl.cli import completion, hosts, main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.hosts.view import HostAssignment, HostView
from elastic_rl.etcd.cluster_records import Drain, HostPhase, HostSpec, PreemptionNotice, RunState, ServiceStatus
from elastic_rl.net import http_client

Asked = list[str]
READY = HostView(id="h1", phase=HostPhase.READY, registered=True, phase_age_s=7300.0, address="10.0.0.7", cpus=8,
                 memory_bytes=1 << 34, shm_bytes=1 << 33, labels={"rack": "b4"}, release="0.2.0", incarnation="i2")


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main.main(args)
    return int(e.value.code or 0)


def reasons(**changes: Any) -> str:
    return str(hosts.row(READY.model_copy(update=changes).model_dump(mode="json"))["reason"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the command asks of replicas that all have the one host ``READY``."""
    found: Asked = []

    def request(method: str, url: str, **_: object) -> httpx.Response:
        found.append(url)
        host = READY.model_dump(mode="json")
        return httpx.Response(200, json=host if "/hosts/" in url else {"items": [host], "next": None})

    monkeypatch.setattr(http_client, "request", request)
    return found


@pytest.fixture
def up(tmp_path: Path) -> Callable[..., str]:
    """Writes the file of a cluster that is up, and returns the option that names the folder of all."""
    def make(*folders: str) -> str:
        for folder in folders:
            path = tmp_path / folder / "cluster.json"
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o700)
            ClusterInfo("", [], [f"http://{folder.replace('/', '.')}"], "").save(path)
        return f"--run_dir={tmp_path}"

    return make


# -- the cluster -------------------------------------------------------------------------------------------------------
def test_remote_cluster_is_asked_for_its_hosts_whichever_jobs_it_has(
        asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hosts", "--url=http://a") == run("hosts", "--url=http://a", "--job=x") == Exit.OK
    assert asked == ["http://a/v1/hosts?limit=1000"] * 2
    assert run("hosts", "--url=http://a", "--phase=lost") == Exit.OK
    assert asked[2:] == ["http://a/v1/hosts?phase=lost&limit=1000"]
    assert run("hosts", "a/b", "--url=http://a", "-o", "json") == Exit.OK
    assert asked[3:] == ["http://a/v1/hosts/a%2Fb"]
    said = capsys.readouterr().out
    assert json.loads(said[said.index("\n{"):]) == READY.model_dump(mode="json")


def test_cluster_is_named_by_itself_by_a_job_or_is_the_only_one_that_is_up(
        asked: Asked, up: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    at = up("_clusters/lab")
    assert run("hosts", at) == Exit.OK, "no job is on it"
    assert run("hosts", "--cluster=lab", at) == Exit.OK
    up("a/cluster")
    assert run("hosts", "--job=a", at) == Exit.OK
    assert [url.partition("/v1")[0] for url in asked] == ["http://_clusters.lab"] * 2 + ["http://a.cluster"]
    capsys.readouterr()
    assert run("hosts", at) == Exit.USAGE
    said = capsys.readouterr().err
    assert "several clusters are up: --job=a, --cluster=lab" in said and "name one with --cluster=NAME or --job" in said
    assert run("hosts", "--cluster=other", at) == Exit.UNAVAILABLE and "'other' is not up" in capsys.readouterr().err
    assert run("hosts", at, "--cluster=lab", "--train.stepz=3") == Exit.USAGE
    assert len(asked) == 3


def test_filter_and_a_host_are_not_for_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hosts", "h1", "--phase=lost", "--url=http://a") == Exit.USAGE
    assert "leave out HOST or --phase" in capsys.readouterr().err
    assert run("hosts", "h1", "h2", "--url=http://a") == Exit.USAGE


def test_command_knows_every_phase() -> None:
    """It names them without reading the records."""
    assert [phase.value for phase in hosts.HostPhases] == [phase.value for phase in HostPhase]


def test_hosts_of_the_cluster_complete_a_command_line(asked: Asked) -> None:
    import typer
    ctx = typer.Context(typer.main.get_command(main.app))
    ctx.params = {"url": "http://a", "host": ["--job=x"]}
    assert completion.hosts(ctx, "h") == ["h1"] and completion.hosts(ctx, "x") == []
    assert asked[0] == "http://a/v1/hosts?limit=200"


# -- the tables --------------------------------------------------------------------------------------------------------
def test_services_that_have_ended_come_first_and_many_are_counted() -> None:
    found = {name: ServiceStatus(state=state).model_dump(mode="json") for name, state in (
        ("b", RunState.RUNNING), ("a", RunState.RUNNING), ("z", RunState.ENDED), ("c", RunState.COMPLETED))}
    assert hosts.services(found) == "z (ended), a, b, c (completed)"
    found["d"] = found["e"] = found["a"]
    assert hosts.services(found) == "z (ended), a, b, c (completed) and 2 more"
    assert hosts.services({}) == ""


def test_reason_names_what_has_no_consequence_yet() -> None:
    assert reasons() == ""
    assert reasons(reason="x", not_ready="x") == "x"
    assert reasons(registered=False) == "its agent is not registered"
    assert reasons(registered=False, phase=HostPhase.LOST, reason="not heard") == "not heard"
    cordoned = HostSpec(cordoned=True)
    assert reasons(spec=cordoned) == "is to be cordoned"
    assert reasons(spec=cordoned, phase=HostPhase.CORDONED, reason="cordoned") == "cordoned"
    assert reasons(spec=cordoned.replace(drain=Drain(within_s=60.0))) == "is to be drained"
    notice = PreemptionNotice(reason="aws: stop")
    assert reasons(preemption=notice) == "is about to be taken back: aws: stop"
    assert "is not drained: notices drain as many" in reasons(preemption=notice, preemption_pending=True)
    assert reasons(preemption=notice, reason="drained by x: aws: stop") == "drained by x: aws: stop"
    assert reasons(preemption_problem="no answer") == "notices of preemption cannot be read: no answer"
    assert reasons(phase=None, unreadable={"/k": "no HostState: …"}) == "cannot be read: /k"


def test_host_is_shown_with_its_services_and_assignments(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    host = READY.model_copy(update={
        "services": {"driver/j": ServiceStatus(state=RunState.ENDED, generation=3, reason="restarted in 2 s")},
        "assignments": {"driver/j": HostAssignment(generation=3, incarnation="i2", reason="host g is lost")},
        "spec": HostSpec(drain=Drain(within_s=600.0), reason="new kernel", by="ann", at=1.7e9)})
    monkeypatch.setattr(http_client, "request", lambda *_, **__: httpx.Response(200, json=host.model_dump(mode="json")))
    assert run("hosts", "h1", "--url=http://a") == Exit.OK
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in ("phase ready", "phase age 2h", "memory 16.0 GiB", "labels rack=b4", "registered yes", "cordoned no",
                 "drain within 10m", "driver/j ended 0 3 0 restarted in 2 s",
                 "driver/j 3 i2 host g is lost"):
        assert line.split() in words, line
    assert any(line[0] == "asked" and line[3:] == ["by", "ann:", "new", "kernel"] for line in words if line)


# -- changes -----------------------------------------------------------------------------------------------------------
@dataclass
class Replica:
    """Stands in for a replica with one host, of which each reading is the next of ``readings``; the last one stays."""

    readings: list[HostView]
    sent: list[tuple[str, str, Any]] = field(default_factory=list)

    def __call__(self, method: str, url: str, *, json: Any = None, **_: object) -> httpx.Response:
        if method != "GET":
            self.sent.append((method, url, json))
        host = self.readings[0]
        if len(self.readings) > 1:
            self.readings.pop(0)
        return httpx.Response(200, json=host.model_dump(mode="json"), headers={"ETag": host.etag})


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Replica]:
    def make(*readings: HostView) -> Replica:
        made = Replica(list(readings))
        monkeypatch.setattr(http_client, "request", made)
        monkeypatch.setattr(hosts, "_POLL_S", 0.0)
        return made

    return make


HOLDS = {"driver/j": HostAssignment(generation=3, incarnation="i2", reason="")}


def reading(phase: HostPhase = HostPhase.READY, *, drain: bool = False, holds: bool = False) -> HostView:
    return READY.model_copy(update={
        "phase": phase, "assignments": HOLDS if holds else {},
        "spec": HostSpec(drain=Drain(within_s=600.0) if drain else None, by="ann", at=1.7e9)})


def test_cordon_and_uncordon_say_what_follows(
        replica: Callable[..., Replica], capsys: pytest.CaptureFixture[str]) -> None:
    asked = replica(reading(holds=True))
    assert run("cordon", "h1", "--url=http://a", "--reason=ECC errors") == Exit.OK
    assert "host h1 is given nothing more; it keeps driver/j\n" in capsys.readouterr().out
    assert run("uncordon", "h1", "--url=http://a", "--dry-run") == Exit.OK
    assert "would be done: host h1 is given work again\n" in capsys.readouterr().out
    assert asked.sent == [
        ("PATCH", "http://a/v1/hosts/h1", {"cordoned": True, "reason": "ECC errors"}),
        ("PATCH", "http://a/v1/hosts/h1?dry_run=true", {"cordoned": False, "drain": None})]


def test_drain_names_what_moves_and_the_commands_that_follow_it_or_take_it_back(
        replica: Callable[..., Replica], capsys: pytest.CaptureFixture[str]) -> None:
    asked = replica(reading(drain=True, holds=True))
    assert run("drain", "h1", "--url=http://a", "--within=120") == Exit.OK
    said = capsys.readouterr().out
    assert "host h1 is emptied of driver/j after 2m, once another host is fit; follow it with" in said
    assert "`elastic-rl hosts h1 --url=http://a --watch`" in said
    assert "`elastic-rl uncordon h1 --url=http://a`" in said
    assert asked.sent == [("PATCH", "http://a/v1/hosts/h1", {"drain": {"within_s": 120.0}})]
    for wrong in ("inf", "nan", "1e9"):
        assert run("drain", "h1", "--url=http://a", f"--within={wrong}") == Exit.USAGE
    assert len(asked.sent) == 1


def test_drain_waits_until_the_host_has_left_and_shows_each_change_once(
        replica: Callable[..., Replica], capsys: pytest.CaptureFixture[str]) -> None:
    draining = reading(HostPhase.DRAINING, drain=True, holds=True)
    replica(reading(), draining, draining, draining, reading(HostPhase.LEFT, drain=True))
    assert run("drain", "h1", "--url=http://a", "--wait") == Exit.OK
    said = capsys.readouterr()
    assert "host h1 holds no run any more" in said.out
    assert said.err.count("host h1: draining, holds driver/j") == 1


def test_host_that_is_lost_while_it_is_drained_has_left_once_it_holds_nothing(replica: Callable[..., Replica]) -> None:
    draining = reading(HostPhase.DRAINING, drain=True, holds=True)
    replica(reading(), draining, reading(HostPhase.LOST, drain=True, holds=True), reading(HostPhase.LOST, drain=True))
    assert run("drain", "h1", "--url=http://a", "--wait") == Exit.OK


def test_wait_for_a_drain_ends_when_its_time_is_over_or_somebody_takes_it_back(
        replica: Callable[..., Replica], capsys: pytest.CaptureFixture[str]) -> None:
    replica(reading(HostPhase.DRAINING, drain=True, holds=True))
    assert run("drain", "h1", "--url=http://a", "--wait", "--timeout=0.01") == Exit.DEADLINE
    said = capsys.readouterr().err
    assert "still holds driver/j after 0.01 s" in said and "the drain continues; follow it with" in said
    replica(reading(), reading(HostPhase.DRAINING, drain=True, holds=True), reading())
    assert run("drain", "h1", "--url=http://a", "--wait") == Exit.FAILED
    assert "was taken back by ann" in capsys.readouterr().err


def test_host_is_forgotten(replica: Callable[..., Replica], capsys: pytest.CaptureFixture[str]) -> None:
    asked = replica(reading(HostPhase.LOST))
    assert run("forget", "h1", "--url=http://a", "-o", "json") == Exit.OK
    assert '"phase": "lost"' in capsys.readouterr().out
    assert asked.sent == [("DELETE", "http://a/v1/hosts/h1", None)]
