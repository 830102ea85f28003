"""The command line: its output and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import webbrowser
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import elastic_rl
from elastic_rl import config
from elastic_rl.cli import common, completion, listings, main, watch_loop
from elastic_rl.cli import run as running
from elastic_rl.cli.exit_codes import MEANING, Exit, code_of
from elastic_rl.config import durations
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.coordinator.api import auth
from elastic_rl.coordinator.api.models import NewRestart
from elastic_rl.coordinator.client.admin_client import AdminClient, RequestRefused
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.client.credentials import read_token
from elastic_rl.coordinator.client.event_stream import Decoder, Frame
from elastic_rl.coordinator.failure.policy import POLICY
from elastic_rl.errors import (
    ConfigError,
    DeadlineExceeded,
    ElasticRLError,
    EngineFailed,
    EtcdUnavailable,
    PreflightFailed,
)
from elastic_rl.host import cluster_settings, etcd_server
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import jobs_with_cluster
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main.main(args)
    return int(e.value.code or 0)


def test_help_and_docs_name_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    said = capsys.readouterr().out
    manual = (Path(__file__).parents[3] / "docs" / "operating" / "command-line.md").read_text()
    for code in Exit:
        assert f"{code.value:>3}  {MEANING[code]}" in said
        assert f"| {code.value} | {MEANING[code]} |" in manual


@pytest.mark.parametrize("command", [
    "status", "hosts", "pools", "members", "events", "scale", "autoscale", "drain", "restart", "dashboard",
    "engines ls", "engines register", "engines deregister", "operations ls", "operations show", "operations wait",
    "operations cancel", "alerts ls", "alerts silence", "alerts unsilence", "alerts silences", "alerts test"])
def test_every_command_that_addresses_a_cluster_takes_its_url(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("--config", "--output", "--url", "--token-file", "--ca"))


def test_failure_policy_lists_the_built_in_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("failure-policy", "-o", "json") == 0
    assert [(r["part"], r["fault"]) for r in json.loads(capsys.readouterr().out)["rules"]] == [
        (r.part, r.fault.value) for r in POLICY]
    assert run("failure-policy") == 0
    assert "torch elastic re-forms the group" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    program = [sys.executable, "-c", "import sys, elastic_rl.cli.main; print(*sys.modules)"]
    loaded = set(subprocess.run(program, capture_output=True, text=True, check=True).stdout.split())
    assert not loaded & {"pydantic", "yaml", "httpx", "grpc", "torch", "ray", "elastic_rl.config", "rich.live"}


def test_unknown_setting_names_the_nearest_and_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--train.stepz=3") == 2
    said = capsys.readouterr().err
    assert "did you mean 'train.steps'" in said
    assert "hint:" in said
    assert "Traceback" not in said


def test_unknown_command_is_wrong_usage() -> None:
    assert run("explode") == 2


def test_config_show_applies_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "--train.steps", "7") == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 7
    assert run("config", "schema") == 0
    assert "properties" in json.loads(capsys.readouterr().out)


def test_missing_cluster_is_code_3_and_names_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", f"--run_dir={tmp_path}", "--job=nobody") == 3
    assert "elastic-rl up --job=nobody" in capsys.readouterr().err


def test_several_clusters_need_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job in ("a", "b"):
        (tmp_path / job / "cluster").mkdir(parents=True)
        ClusterInfo(job, [], [], "").save(tmp_path / job / "cluster" / "cluster.json")
    assert run("status", f"--run_dir={tmp_path}") == 2
    assert "a, b" in capsys.readouterr().err


def test_folder_of_another_user_is_no_cluster_that_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in ("another-users", "own"):
        (tmp_path / job / "cluster").mkdir(parents=True)
        ClusterInfo(job, [], [], "").save(tmp_path / job / "cluster" / "cluster.json")
    stat = os.stat

    def refused(path: str | Path, **options: Any) -> os.stat_result:
        if "another-users" in str(path) and str(path).endswith(".json"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refused)
    assert jobs_with_cluster(tmp_path) == ["own"]


def test_unknown_bench_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "nothing") == 2
    assert "loop" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [
    (ConfigError("x"), 2), (EtcdUnavailable("x"), 3), (PreflightFailed("x"), 4), (DeadlineExceeded("x"), 6),
    (RequestRefused("x", status=422, type="t"), 5), (EngineFailed("x"), 1), (ElasticRLError("x"), 1)])
def test_each_kind_of_error_has_its_exit_code(error: ElasticRLError, code: int) -> None:
    assert code_of(error) == code


def test_sigterm_interrupts_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), running.signals_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_cleanup_is_not_interrupted(sent: signal.Signals) -> None:
    before, reached = signal.getsignal(sent), False
    with running.ignore_signals():
        signal.raise_signal(sent)
        reached = True
    assert reached and signal.getsignal(sent) is before


# -- addressing a cluster ----------------------------------------------------------------------------------------------
def test_token_file_holds_one_token_or_those_of_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("abc\n")
    assert read_token(path, "operator") == "abc"
    path.write_text('{"viewer": "v", "operator": "o"}')
    assert (read_token(path, "operator"), read_token(path, "viewer")) == ("o", "v")
    path.write_text('{"viewer": "v"}')
    assert read_token(path, "operator") == "v"


@pytest.mark.parametrize(("content", "says"), [
    ("{", "not valid JSON"), ("", "empty"), ("two words", "no token"), ("[]", "no tokens by role"),
    ("{}", "no tokens by role"), ('{"root": "x"}', "no tokens by role"), ('{"operator": ""}', "no token"),
    ('{"operator": 7}', "no tokens by role"), ("-----BEGIN CERTIFICATE-----\nMIIB\n", "no token"),
    ("\xff", "no token")])
def test_file_without_a_token_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=says) as refused:
        read_token(path, "operator")
    assert "--token-file" in refused.value.hint


def test_table_of_digests_is_refused_as_token_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auth.write_table(tmp_path / "tokens.json", {"operator": auth.new_token()})
    assert run("pools", "--url=http://127.0.0.1:9", f"--token-file={tmp_path / 'tokens.json'}") == 2
    assert "use the credentials.json beside it" in capsys.readouterr().err


@pytest.mark.parametrize(("environment", "terminal", "opened"), [
    ({}, True, False), ({"DISPLAY": ":0"}, True, True), ({"WAYLAND_DISPLAY": "w"}, True, True),
    ({"BROWSER": "b"}, True, True), ({"DISPLAY": ":0"}, False, False)])
def test_dashboard_opens_a_browser_where_there_is_one_and_prints_the_link(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: dict[str, str],
        terminal: bool, opened: bool) -> None:
    monkeypatch.setattr(http_client, "request", lambda *_, **__: httpx.Response(201, json={
        "link": "code", "role": "viewer", "expires_at": time.time() + 120}))
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    urls: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: not urls.append(url))
    monkeypatch.setattr(Console, "is_terminal", terminal)
    assert run("dashboard", "--url=http://127.0.0.1:8400", "--job=j") == 0
    said = capsys.readouterr()
    assert said.out == "http://127.0.0.1:8400/jobs/j#link=code\n"
    assert urls == (["http://127.0.0.1:8400/jobs/j#link=code"] if opened else [])
    assert ("ssh -L 8400:127.0.0.1:8400" in said.err and "as viewer" in said.err) == (not opened)


def test_remote_cluster_that_does_not_answer_is_code_3(capsys: pytest.CaptureFixture[str],
                                                       monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    assert run("pools", "--url", gone) == 3
    assert "check --url" in capsys.readouterr().err
    monkeypatch.setenv("ELASTIC_RL_URL", gone)
    assert run("pools") == 3
    assert "check --url" in capsys.readouterr().err
    file = tmp_path / "my.yaml"
    file.write_text(f"run_dir: {tmp_path}\njob: nobody\n")
    for local in (f"--run_dir={tmp_path} --job=nobody", f"-c {file}", f"--url= -c {file}"):
        assert run("pools", *local.split()) == 3
        assert "elastic-rl up" in capsys.readouterr().err, "a named folder overrides the environment"


@pytest.mark.parametrize(("url", "in_clear"), [
    ("http://gpu-1:8400", True), ("http://10.0.0.1:8400", True), ("https://gpu-1:8400", False),
    ("http://127.0.0.1:8400", False), ("http://[::1]:8400", False), ("http://localhost:8400", False)])
def test_command_warns_of_a_token_that_crosses_the_network_in_clear(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, in_clear: bool) -> None:
    (token := tmp_path / "token").write_text("x" * 20)
    common._remote_info("j", url, token, None)
    assert ("in clear" in capsys.readouterr().err) == in_clear
    common._remote_info("j", url, None, None)
    assert not capsys.readouterr().err, "there is no token"


@pytest.mark.parametrize("args", [["pools", "--url=gpu-1:8400"], ["pools", "--url=http://[::1"], ["pools", "--url=,"],
                                  ["pools", "--url=http://"], ["pools", "--url=http://a:99999"],
                                  ["pools", "--url=http://a", "--ca=/nonexistent"],
                                  ["pools", "--url=http://a", "--train.stepz=3"],
                                  ["pools", "--url=http://a", "--token-file=/nonexistent"],
                                  ["events", "--url=http://a", "--since=soon"],
                                  ["alerts", "silence", "x", "--url=http://a", "--for=long"],
                                  ["restart", "job", "--url=http://a"], ["restart", "trainer", "--url=http://a"],
                                  ["scale", "--url=http://a"], ["autoscale", "--url=http://a", "--max=3"],
                                  ["autoscale", "p", "--url=http://a", "--off", "--min=2"],
                                  ["autoscale", "p", "--url=http://a", "--external", "--dry-run"],
                                  ["operations", "ls", "--state=odd", "--url=http://a"]])
def test_invalid_arguments_are_wrong_usage_before_any_request(args: list[str]) -> None:
    assert run(*args) == 2


def test_times_are_relative_of_today_or_dated() -> None:
    noon = datetime(2026, 11, 21, 12, 0, 0).timestamp()
    assert durations.moment("15m", noon) == noon - 900
    assert durations.moment("9:30", noon) == noon - 2.5 * 3600
    assert durations.moment("11:59:30", noon) == noon - 30
    assert durations.moment("2026-11-20T12:00", noon) == noon - 86400
    for odd in ("soon", "25:00", "1x", "2026-13-01"):
        with pytest.raises(ConfigError):
            durations.moment(odd, noon)


# -- output ------------------------------------------------------------------------------------------------------------
def test_watch_ignores_heartbeats() -> None:
    before = {"members": [{"id": "a", "step": 3, "beat_at": 1.0, "progress_at": 1.0}], "job": {"updated_at": 1}}
    after = {"members": [{"id": "a", "step": 3, "beat_at": 2.0, "progress_at": 2.0}], "job": {"updated_at": 2}}
    moved = {"members": [{"id": "a", "step": 4, "beat_at": 2.0, "progress_at": 2.0}], "job": {"updated_at": 2}}
    assert watch_loop.without_clocks(before) == watch_loop.without_clocks(after) != watch_loop.without_clocks(moved)


def test_job_without_a_run_or_a_leader_says_so() -> None:
    facts = listings.job_facts({"name": "j", "status": None, "leader": None, "epoch": 0, "replica": "a"})
    assert facts["phase"] == "no run has begun" and "election" in facts["leader"]


def test_status_says_what_keeps_the_leader_from_deciding_about_the_job() -> None:
    job = {"name": "j", "status": None, "leader": None, "epoch": 0, "replica": "b", "health": "ok", "message": ""}
    assert listings.job_facts(job)["health"] == ""
    assert listings.job_facts({**job, "health": "failing", "message": "a: a bug"})["health"] == "failing: a: a bug"


def test_status_shows_the_metrics_of_the_last_step() -> None:
    last = {"step": 3, "update": {"kl": 0.00123, "grad_norm": 0.5, "my_stat": 1.0},
            "throughput": {"train_tokens_per_s": 27_800.0, "mfu": 0.4125}}
    assert listings.step_facts([last]) == {"update": "KL 0.00123, gradient norm 0.5",
                                           "throughput": "27,800 tokens/s trained, MFU 41.2 %"}
    assert listings.step_facts([]) == listings.step_facts([{"step": 3}]) == {}, "of an older release"


def test_status_says_what_a_run_waits_for_and_since_when() -> None:
    run = {"phase": "rl", "stage": "generate", "waiting_for": "an engine at version 7", "waiting_kind": "engines",
           "waiting_since": 1.76e9}
    job = {"name": "j", "status": run, "leader": None, "epoch": 0, "replica": "a"}
    clock = time.strftime("%H:%M:%S", time.localtime(1.76e9))
    assert listings.job_facts(job)["waiting for"] == f"an engine at version 7 (engines, since {clock})"
    assert listings.job_facts(job)["stage"] == "generate"
    supervised = {"phase": "sft", "step": 0, "steps": 100, "sft_step": 7, "sft_steps": 60}
    assert listings.job_facts({**job, "status": supervised})["step"] == "7 of at most 60 of the supervised phase"
    assert listings.eval_sets({"eval_sets": {f"s{n}": n / 10 for n in range(3)}}, 2) == "s0 0.000, s1 0.100 and 1 more"
    assert not listings.job_facts({**job, "status": {"phase": "rl"}})["waiting for"]


def test_decoder_builds_frames_and_skips_comments() -> None:
    decoder = Decoder()
    lines = ["retry: 1000", "", ": still here", "", "id: 7", "event: x", "data: {", "data: }", "", "data:y", ""]
    assert [f for line in lines if (f := decoder.feed(line))] == [Frame("7", "x", "{\n}"), Frame("7", "", "y")]


@given(st.lists(st.tuples(st.integers(1, 10**9), st.text("abc {}\"", min_size=1)), max_size=20))
def test_decoder_inverts_the_encoding(frames: list[tuple[int, str]]) -> None:
    text = "".join(f"id: {n}\nevent: e\ndata: {data}\n\n" for n, data in frames)
    decoder = Decoder()
    assert [(int(f.id), f.data) for line in text.split("\n") if (f := decoder.feed(line))] == frames


# -- completion --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", shell) == 0
    assert "_ELASTIC_RL_COMPLETE" in capsys.readouterr().out


def test_completion_without_a_cluster_is_silent(tmp_path: Path) -> None:
    line = f"elastic-rl drain --run_dir={tmp_path} --job=nobody "
    done = subprocess.run([sys.executable, "-m", "elastic_rl.cli.main"], capture_output=True, text=True, env={
        **os.environ, "_ELASTIC_RL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "4"})
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


# -- the client --------------------------------------------------------------------------------------------------------
def _api(monkeypatch: pytest.MonkeyPatch, answers: dict[str, httpx.Response | httpx.HTTPError]) -> AdminClient:
    def request(method: str, url: str, **_: object) -> httpx.Response:
        answer = answers[url.split("/v1")[0]]
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer
    monkeypatch.setattr(http_client, "request", request)
    return AdminClient(ClusterInfo("j", [], list(answers), ""))


def test_client_tries_the_next_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    api = _api(monkeypatch, {"http://a": httpx.ConnectError("gone"), "http://b": httpx.Response(
        200, json={"items": [{"id": 1}], "next": None})})
    assert api.items("engines") == [{"id": 1}]


def test_client_raises_a_refusal_without_retrying(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = httpx.Response(422, json={"type": "urn:x", "detail": "desired must be 0 to 64"})
    api = _api(monkeypatch, {"http://a": problem, "http://b": httpx.Response(200, json={})})
    with pytest.raises(RequestRefused, match="0 to 64") as e:
        api.post("pools/rollout/scale", {"desired": -1})
    assert (e.value.status, e.value.type) == (422, "urn:x")


def test_client_without_any_replica_raises_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EtcdUnavailable, match="no coordinator answered"):
        _api(monkeypatch, {"http://a": httpx.ConnectError("gone")}).get("")


@pytest.mark.parametrize(("text", "trusted"), [
    ("etcd Version: 3.4.23\nGit SHA: x", True), ("etcd Version: 3.5.1", False), ("etcd Version: 3.5.2", False),
    ("etcd Version: 3.5.21", True), ("etcd Version: 3.6.0", True), ("etcd Version: 3.3.10", False)])
def test_etcd_releases_that_corrupt_data_are_refused(text: str, trusted: bool) -> None:
    assert (etcd_server.objection(etcd_server.parse_version(text)) == "") is trusted


@pytest.mark.parametrize("answer", [httpx.Response(200, text="<html>"), httpx.Response(302, text=""),
                                    httpx.Response(200, text="OK", headers={"Content-Type": "text/plain"})])
def test_another_http_server_is_not_taken_for_the_api(monkeypatch: pytest.MonkeyPatch, answer: httpx.Response) -> None:
    with pytest.raises(EtcdUnavailable, match="no admin API"):
        _api(monkeypatch, {"http://a": answer}).get("")


def test_id_of_a_silence_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def request(method: str, url: str, **_: object) -> httpx.Response:
        asked.append(f"{method} {url}")
        return httpx.Response(204)

    monkeypatch.setattr(http_client, "request", request)
    assert run("alerts", "unsilence", "../pools/a?b", "--url=http://a", "--job=j") == 0
    assert asked == ["DELETE http://a/v1/jobs/j/silences/..%2Fpools%2Fa%3Fb"]


@pytest.mark.parametrize(("jobs", "options", "asked", "hint"), [
    (["a", "b"], ["--job=b"], "http://a/v1/jobs/b/pools", ""), (["a"], [], "http://a/v1/jobs/a/pools", ""),
    (["a", "b"], [], "", "several jobs: a, b"), ([], [], "", "no job")])
def test_remote_cluster_is_asked_for_the_named_or_the_only_job(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], jobs: list[str], options: list[str],
        asked: str, hint: str) -> None:
    def request(method: str, url: str, **_: object) -> httpx.Response:
        path = url.partition("?")[0]
        assert path in ("http://a/v1/jobs", asked)
        listed = [{"name": name} for name in jobs] if path == "http://a/v1/jobs" else [{"name": "rollout"}]
        return httpx.Response(200, json={"items": listed, "next": None})

    monkeypatch.setattr(http_client, "request", request)
    assert run("pools", "--url=http://a", *options) == (Exit.USAGE if hint else Exit.OK)
    said = capsys.readouterr()
    assert hint in said.err and ("rollout" in said.out) == (not hint)
    monkeypatch.setenv("ELASTIC_RL_URL", "http://a")
    assert run("pools", *options) == (Exit.USAGE if hint else Exit.OK), "by the environment as well"
    assert hint in capsys.readouterr().err


def test_config_show_hides_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    for output in ("table", "json"):
        assert run("config", "show", "-o", output, "--alerts.urls=[slack://secret-token]") == 0
        assert "secret-token" not in capsys.readouterr().out


def test_error_has_no_terminal_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "-c", "\x1b]0;owned\x07\u202e.yaml") == 2
    said = capsys.readouterr().err
    assert not set(said) & set("\x1b\x07\u202e")


def test_status_lists_what_the_driver_reports_of_its_parts() -> None:
    from elastic_rl.cli.listings import waiting_rows
    driver = {"role": "driver", "info": {"faults": {"router": "it ended"}, "waiting": {"trainer": "no room"}}}
    others = [{"role": "driver", "info": {}}, {"role": "engine", "info": {"waiting": {"x": "y"}}}]
    assert waiting_rows([driver, *others]) == [
        {"part": "router", "state": "failing", "message": "it ended"},
        {"part": "trainer", "state": "waiting", "message": "no room"}]


@pytest.mark.parametrize("text", ["9" * 5000 + "s", "99999999999999d", "36501d", "0" * 5000 + "s"])
def test_absurd_duration_is_refused_in_few_words(text: str) -> None:
    for read in (durations.seconds, lambda t: durations.moment(t, 1e9)):
        with pytest.raises(ConfigError) as e:
            read(text)
        assert len(str(e.value)) < 300


def test_down_below_a_file_says_what_is_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run("down", f"--run_dir={file}", "--job=nobody") == 2
    assert f"{file} is not a folder" in capsys.readouterr().err.replace("\n", "")
    assert run("down", f"--run_dir={tmp_path / 'nowhere'}", "--job=nobody") == 0


def test_train_says_what_the_check_warns_of_before_anything_starts(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "up", lambda *_, **__: pytest.fail("it starts something"))
    arguments = ["train", "--with-cluster", f"--run_dir={tmp_path}", "--job=nobody"]
    with pytest.raises(pytest.fail.Exception, match="it starts something"):
        run(*arguments, "--train.queue_units=3")
    said = capsys.readouterr().err
    assert "warn  settings: train.queue_units is for" in said and "      → " in said
    (tmp_path / "raising_reward.py").write_text(
        "async def reward(prompt, samples):\n    raise ValueError('no such key')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    assert run(*arguments, "--rollout.reward=raising_reward:reward") == Exit.USAGE
    assert "no such key" in capsys.readouterr().err


def test_train_makes_the_checks_of_a_job_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command makes them, the run does not; else the run alone does."""
    submitted, checked = [], []

    def submit(cluster: Cluster, **how: Any) -> None:
        submitted.append(how["checked"])
        raise ConfigError("that is enough")

    for name, stub in {"up": lambda *_, **__: None, "connect": lambda *_, **__: None, "down": lambda *_: None,
                       "submit": submit}.items():
        monkeypatch.setattr(Cluster, name, stub)
    monkeypatch.setattr("elastic_rl.job.check.require", lambda *_, **__: checked.append(True) or [])
    monkeypatch.setattr("elastic_rl.job.check.check", lambda *_, **__: pytest.fail("another check"))
    assert run("train", "--with-cluster", f"--run_dir={tmp_path}", "--job=new") == Exit.USAGE
    assert run("train", f"--run_dir={tmp_path}", "--job=of-a-cluster-that-is-up") == Exit.USAGE
    assert submitted == [True, False] and checked == [True]


def test_failed_start_of_a_cluster_is_the_error_if_stopping_fails_too(
        tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cluster: Cluster) -> None:
        raise ConfigError("it cannot be ended")

    monkeypatch.setattr(Cluster, "down", fail)
    assert run("train", "--with-cluster", f"--run_dir={tmp_path}", "--job=nobody",
               "--coordinator.host=a.invalid") == Exit.PREFLIGHT
    said = capsys.readouterr().err.replace("\n", " ")
    assert re.search("error: .*coordinator.host", said)
    assert "the cluster cannot be stopped: it cannot be ended" in said and "error: it cannot" not in said


def test_command_line_dashboard_and_api_know_every_trainer_group() -> None:
    """They name them without reading ``config.groups``."""
    script = (Path(elastic_rl.__file__).parent / "coordinator/dashboard/groups.js").read_text()
    assert completion.TRAINER_GROUPS == tuple(re.findall(r'"(\w+)"', script)) == tuple(TRAINER_GROUPS)
    target = str(NewRestart.model_fields["target"].description)
    assert [name for name in TRAINER_GROUPS if f"``{name}``" not in target] == []


def test_members_show_the_seconds_that_their_stated_work_is_expected_to_take() -> None:
    found = {"members?": [{"id": "a", "work": {"flops": 3e12, "s_per_flop": 2e-12}}, {"id": "b", "work": None},
                          {"id": "c", "work": {"flops": 3e12, "s_per_flop": 0.0}}], "members?suspected=true": []}
    api: Any = SimpleNamespace(items=found.__getitem__)
    assert [row.get("expected_s") for row in listings._members(api)] == [6.0, None, None]


def test_status_of_a_job_whose_next_run_is_checked_says_so_beside_the_phase_of_before() -> None:
    def phase(of_job: str | None, state: str) -> str:
        return listings._phase_of_start({"status": of_job and {"phase": of_job}}, {"run": {"state": state}})

    assert phase("finished", "starting") == (
        "starting: checks of model, data and plug-ins; the run before: finished")
    assert phase(None, "running").startswith("starting")
    assert phase("finished", "running") == phase("rl", "starting") == phase("stopped", "stopped") == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_does_not_interrupt_the_rollback_of_a_start(
        number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rolled_back = []

    def up(self: Cluster, **_: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            for again in (number, signal.SIGINT):
                signal.raise_signal(again)
            rolled_back.append(self.cfg.job)

    monkeypatch.setattr(Cluster, "up", up)
    assert run("up", "--job=j", f"--run_dir={tmp_path}") == Exit.INTERRUPTED
    assert rolled_back == ["j"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_job_that_is_refused_leaves_the_cluster_its_settings(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def up(self: Cluster, **_: object) -> None:
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        cluster_settings.save(self.cfg, self.paths.settings)

    def refuse(self: Cluster, **_: object) -> None:
        raise ConfigError("another cluster has the job")

    monkeypatch.setattr(Cluster, "up", up)
    monkeypatch.setattr(Cluster, "admit", refuse)
    monkeypatch.setattr(running, "_print_up", lambda *_, **__: None)
    where = ("--cluster=c", f"--run_dir={tmp_path}")
    main_of = Cluster(config.parse({"cluster": "c", "run_dir": str(tmp_path)}))
    main_of.dir.mkdir(parents=True, mode=0o700)
    cluster_settings.save(main_of.cfg, main_of.paths.settings)
    before = main_of.paths.settings.read_bytes()
    assert run("up", *where, "--job=j", "--seed=21") == Exit.USAGE
    assert "another cluster has the job" in capsys.readouterr().err
    assert main_of.paths.settings.read_bytes() == before
