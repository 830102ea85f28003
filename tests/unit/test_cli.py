"""The command line: what it says and which code it ends with."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import httpx
import pytest
import yaml

from elastic_rl import cli, etcd_server
from elastic_rl.admin_client import AdminClient, RequestRefused
from elastic_rl.cluster import ClusterInfo
from elastic_rl.errors import (
    ConfigError,
    DeadlineExceeded,
    ElasticRLError,
    EngineFailed,
    MachineUnfit,
    StoreUnavailable,
)


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(args)
    return int(e.value.code or 0)


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "exit codes" in capsys.readouterr().out


def test_a_wrong_setting_is_a_message_and_a_hint_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--train.stepz=3") == 2
    said = capsys.readouterr().err
    assert "did you mean 'train.steps'" in said
    assert "hint:" in said
    assert "Traceback" not in said


def test_an_unknown_command_is_wrong_usage() -> None:
    assert run("explode") == 2


def test_the_configuration_is_shown_with_overrides_applied(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--train.steps", "7") == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 7
    assert run("config", "schema") == 0
    assert "properties" in json.loads(capsys.readouterr().out)


def test_no_cluster_is_code_3_and_says_how_to_start_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", f"--run_dir={tmp_path}", "--job=nobody") == 3
    assert "elastic-rl up --job=nobody" in capsys.readouterr().err


def test_several_clusters_must_be_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in ("a", "b"):
        (tmp_path / job / "cluster").mkdir(parents=True)
        ClusterInfo(job, [], [], "", "", str(tmp_path / job / "cluster")).save()
    assert run("status", f"--run_dir={tmp_path}") == 2
    assert "a, b" in capsys.readouterr().err


def test_a_bench_that_does_not_exist_names_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "nothing") == 2
    assert "loop" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [
    (ConfigError("x"), 2), (StoreUnavailable("x"), 3), (MachineUnfit("x"), 4), (DeadlineExceeded("x"), 6),
    (RequestRefused("x", status=422, type="t"), 5), (EngineFailed("x"), 1), (ElasticRLError("x"), 1)])
def test_each_kind_of_error_has_its_code(error: ElasticRLError, code: int) -> None:
    assert cli.exit_code(error) == code


def test_being_told_to_end_is_like_an_interrupt_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), cli._interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_cleaning_up_is_not_interrupted() -> None:
    with cli._deaf():
        signal.raise_signal(signal.SIGINT)


def _api(monkeypatch: pytest.MonkeyPatch, answers: dict[str, httpx.Response | httpx.HTTPError]) -> AdminClient:
    def request(method: str, url: str, **_: object) -> httpx.Response:
        answer = answers[url.split("/v1")[0]]
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer
    monkeypatch.setattr(httpx, "request", request)
    return AdminClient(ClusterInfo("j", [], list(answers), "/nonexistent", "", ""))


def test_the_next_replica_is_asked_when_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    api = _api(monkeypatch, {"http://a": httpx.ConnectError("gone"), "http://b": httpx.Response(
        200, json={"items": [{"id": 1}], "next": None})})
    assert api.items("/v1/engines") == [{"id": 1}]


def test_a_refusal_carries_the_problem_and_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = httpx.Response(422, json={"type": "urn:x", "detail": "desired must be 0 to 64"})
    api = _api(monkeypatch, {"http://a": problem, "http://b": httpx.Response(200, json={})})
    with pytest.raises(RequestRefused, match="0 to 64") as e:
        api.post("/v1/pools/rollout/scale", {"desired": -1})
    assert (e.value.status, e.value.type) == (422, "urn:x")


def test_no_replica_at_all_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match="no coordinator answered"):
        _api(monkeypatch, {"http://a": httpx.ConnectError("gone")}).get("/v1/job")


@pytest.mark.parametrize(("text", "trusted"), [
    ("etcd Version: 3.4.23\nGit SHA: x", True), ("etcd Version: 3.5.1", False), ("etcd Version: 3.5.2", False),
    ("etcd Version: 3.5.21", True), ("etcd Version: 3.6.0", True), ("etcd Version: 3.3.10", False)])
def test_releases_of_etcd_that_corrupt_data_are_not_trusted(text: str, trusted: bool) -> None:
    assert (etcd_server.objection(etcd_server.parse_version(text)) == "") is trusted
