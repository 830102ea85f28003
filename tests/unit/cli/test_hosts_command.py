"""``elastic-rl hosts``: which cluster it addresses, and how it shows what it gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic_rl.cli import completion, hosts, main
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.hosts.view import HostAssignment, HostDrain, HostView
from elastic_rl.etcd.cluster_records import HostPhase, RunState, ServiceStatus

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

    monkeypatch.setattr(httpx, "request", request)
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
    assert reasons(cordoned=True) == "is to be cordoned"
    assert reasons(cordoned=True, phase=HostPhase.CORDONED, reason="cordoned") == "cordoned"
    assert reasons(cordoned=True, drain=HostDrain(timeout_s=60.0, reason="")) == "is to be drained"
    assert reasons(phase=None, unreadable={"/k": "no HostState: …"}) == "cannot be read: /k"


def test_host_is_shown_with_its_services_and_assignments(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    host = READY.model_copy(update={
        "services": {"driver/j": ServiceStatus(state=RunState.ENDED, generation=3, reason="restarted in 2 s")},
        "assignments": {"driver/j": HostAssignment(generation=3, incarnation="i2", reason="host g is lost")},
        "drain": HostDrain(timeout_s=600.0, reason="new kernel")})
    monkeypatch.setattr(httpx, "request", lambda *_, **__: httpx.Response(200, json=host.model_dump(mode="json")))
    assert run("hosts", "h1", "--url=http://a") == Exit.OK
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in ("phase ready", "phase age 2h", "memory 16.0 GiB", "labels rack=b4", "registered yes", "cordoned no",
                 "drain within 10m: new kernel", "driver/j ended 0 3 0 restarted in 2 s",
                 "driver/j 3 i2 host g is lost"):
        assert line.split() in words, line
