"""The server of a host's logs and its client, over real sockets: with the cluster's authority, and on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.errors import ConfigError, HostUnavailable
from elastic_rl.host import stacks
from elastic_rl.host.agent import log_server
from elastic_rl.host.agent.log_server import BLOCK_BYTES, LogServer
from elastic_rl.host.cluster_logs import HostLogs, LogHost
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.log_folders import LogFolders
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.host.processes import RUN_MARK
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.net.cluster_secret import ClusterSecret

SECRET = ClusterSecret("5e" * 32)


@pytest.fixture
def paths(tmp_path: Path) -> ClusterPaths:
    paths = ClusterPaths.of(config.parse({"run_dir": str(tmp_path), "cluster": "lab"}))
    paths.logs.mkdir(parents=True)
    paths.log("agent-0").write_text("".join(f"line {n}\n" for n in range(50)))
    LocalHost(name="h").certify(paths, "lab", SECRET)
    return paths


@pytest.fixture(params=["https", "http"])
def server(request: pytest.FixtureRequest, paths: ClusterPaths, tmp_path: Path) -> Iterator[LogServer]:
    cfg = config.parse({"run_dir": str(tmp_path), "cluster": "lab"})
    made = LogServer(lambda job: LogFolders(cfg, job), lambda job: stacks.read_all(stacks.of_job(cfg, job)),
                     LOOPBACK, SECRET.logs(),
                     paths.tls if request.param == "https" else None).start()
    yield made
    made.close()


def client(server: LogServer, paths: ClusterPaths, token: str = SECRET.logs()) -> HostLogs:
    return HostLogs(LogHost("h", registered=True, url=server.url), "j", token,
                    str(paths.tls.ca) if server.url.startswith("https") else "")


def test_listing_and_lines_of_a_host_are_read_and_followed(server: LogServer, paths: ClusterPaths) -> None:
    with client(server, paths) as logs:
        assert [(part.part, part.path) for part in logs.parts()] == [("agent-0", str(paths.log("agent-0")))]
        block, at = logs.last_lines("agent-0", 2)
        assert block == b"line 48\nline 49\n"
        assert logs.after("agent-0", at, 0.0) == (b"", at)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(logs.after, "agent-0", at, 10.0)
            with paths.log("agent-0").open("a") as log:
                log.write("next\n")
            block, at = waiting.result(60)
        assert block == b"next\n" and logs.after("agent-0", at, 0.0)[0] == b""


def test_stacks_of_a_job_are_read_for_one_request_at_a_time(
        server: LogServer, paths: ClusterPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, line = str((tmp_path / "j" / "cluster").resolve()), "import time; print(1, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", line, "a-secret"], stdout=subprocess.PIPE,
                          env={**os.environ, RUN_MARK: mark}) as process, client(server, paths) as logs:
        assert process.stdout is not None
        process.stdout.readline()
        [found] = logs.stacks()
        assert found.pid == process.pid and "<module>" in found.text and "a-secret" not in found.model_dump_json()

        begun, goes_on = threading.Event(), threading.Event()
        monkeypatch.setattr(stacks, "of_job", lambda cfg, job: (begun.set(), goes_on.wait(60), [])[2])
        with ThreadPoolExecutor(1) as pool, client(server, paths) as other:
            first = pool.submit(logs.stacks)
            assert begun.wait(60)
            with pytest.raises(HostUnavailable, match="another request takes stacks"):
                other.stacks()
            goes_on.set()
            assert first.result(60) == []
        process.kill()


def test_stacks_of_what_is_no_job_are_refused(server: LogServer, paths: ClusterPaths) -> None:
    with client(server, paths) as logs:
        logs._job = "../j"
        with pytest.raises(HostUnavailable, match="no name of a job"):
            logs.stacks()


def test_log_of_many_bytes_comes_in_blocks(server: LogServer, paths: ClusterPaths) -> None:
    whole = b"x" * 1000 + b"\n"
    paths.log("large").write_bytes(whole * 1000)
    with client(server, paths) as logs:
        block, at = logs.last_lines("large", 10 ** 12)
        found = [block]
        while block := (answer := logs.after("large", at, 0.0))[0]:
            at = answer[1]
            found.append(block)
    assert b"".join(found) == whole * 1000 and max(map(len, found)) == BLOCK_BYTES


def test_requests_without_the_token_and_of_web_pages_are_refused(server: LogServer, paths: ClusterPaths) -> None:
    for token in ("wrong", SECRET.api("operator"), ClusterSecret.generate().logs()):
        with client(server, paths, token) as logs, pytest.raises(HostUnavailable, match="no valid token"):
            logs.parts()
    verify = str(paths.tls.ca) if server.url.startswith("https") else False
    for path in ("/v1/parts", "/v1/parts/agent-0"):
        found = httpx.get(server.url + path, verify=verify, headers={
            "Authorization": f"Bearer {SECRET.logs()}", "Origin": "https://example.org"})
        assert found.status_code == 403
        assert httpx.get(server.url + path, verify=verify).status_code == 403


def test_what_cannot_be_served_is_said(server: LogServer, paths: ClusterPaths) -> None:
    verify = str(paths.tls.ca) if server.url.startswith("https") else False
    with httpx.Client(base_url=server.url, verify=verify, headers={"Authorization": f"Bearer {SECRET.logs()}"}) as http:
        for path, code, said in [
                ("/v1/parts/nothing", 404, "no such log"), ("/v1/parts/..%2Fsecret", 404, ""),
                ("/v1/parts/%2e%2e", 404, ""), ("/v1/parts/agent-0%00", 404, "no such log"),
                ("/v1/parts/%ff", 404, "no such log"), ("/v1/parts/agent-0?after=x", 400, "no position"),
                ("/v1/parts/agent-0?wait_s=nan", 400, "wait_s must"), ("/v1/parts/agent-0?wait_s=1e9", 400, "wait_s"),
                ("/v1/parts/agent-0?lines=-1", 400, "lines must be")]:
            found = http.get(path)
            assert (found.status_code, said in found.text) == (code, True), (path, found.text)
        assert http.post("/v1/parts").status_code == 405 and http.put("/v1/parts/agent-0").status_code == 405
    with client(server, paths) as logs, pytest.raises(ConfigError, match="host h has no log of 'nothing'"):
        logs.last_lines("nothing", 1)


def test_requests_that_wait_are_limited(server: LogServer, paths: ClusterPaths, monkeypatch: pytest.MonkeyPatch
                                        ) -> None:
    monkeypatch.setattr(log_server, "_REQUESTS", 2)
    with client(server, paths) as logs, ThreadPoolExecutor(2) as pool:
        _, at = logs.last_lines("agent-0", 0)
        clients = [client(server, paths) for _ in range(2)]
        waiting = [pool.submit(each.after, "agent-0", at, 10.0) for each in clients]

        wait_until(lambda: server._logs._requests == 2, what="the requests that wait", timeout_s=60)
        with pytest.raises(HostUnavailable, match="host h answers 503: 2 other requests read logs of this host"):
            logs.parts()
        with paths.log("agent-0").open("a") as log:
            log.write("next\n")
        assert [each.result(60)[0] for each in waiting] == [b"next\n"] * 2
        assert logs.parts(), "served again"
        for each in clients:
            each.close()


def test_disk_that_does_not_answer_holds_up_no_other_part_of_the_process(
        server: LogServer, paths: ClusterPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(log_server, "_READ_S", 0.1)
    monkeypatch.setattr(LogFolders, "parts", lambda self: released.wait(60) and [])
    try:
        with client(server, paths) as logs:
            for said in ("no answer within", "no answer within", "threads run calls that were abandoned"):
                with pytest.raises(HostUnavailable, match=f"disk with the logs does not answer: .*{said}"):
                    logs.parts()
            released.set()
            wait_until(lambda: logs.last_lines("agent-0", 1)[0] if _answers(logs) else None, what="the disk's return")
    finally:
        released.set()


def _answers(logs: HostLogs) -> bool:
    try:
        return bool(logs.last_lines("agent-0", 1))
    except HostUnavailable:
        return False


def test_server_that_is_gone_or_silent_is_an_error_with_a_hint(paths: ClusterPaths, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    monkeypatch.setattr("elastic_rl.host.cluster_logs._TIMEOUT_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as silent:
        url = f"http://{LOOPBACK}:{silent.getsockname()[1]}"
        with HostLogs(LogHost("h", registered=True, url=url), "j", "token", "") as logs:
            for _ in range(2):
                with pytest.raises(HostUnavailable, match=f"host h does not answer at {url}") as caught:
                    logs.parts()
                assert "elastic-rl hosts" in caught.value.hint
                silent.close()  # then nothing listens there


def test_host_that_sends_a_byte_now_and_then_holds_no_command_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.host.cluster_logs._ANSWER_S", 0.3)
    ended = threading.Event()

    def trickle(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nX-Slow: ")
                while not ended.wait(0.02):  # within the headers: there is nothing that the reader of a body could see
                    peer.sendall(b"x")

    with socket.create_server((LOOPBACK, 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        try:
            url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
            with HostLogs(LogHost("h", registered=True, url=url), "j", "token", "") as logs:
                for said in ("no answer within 0.3 s", "abandoned"):
                    with pytest.raises(HostUnavailable, match=said):
                        logs.parts()
        finally:
            ended.set()
            thread.join(60)


def test_server_of_another_cluster_is_not_believed(server: LogServer, paths: ClusterPaths, tmp_path: Path) -> None:
    if server.url.startswith("http:"):
        return
    other = ClusterPaths.of(config.parse({"run_dir": str(tmp_path / "other"), "cluster": "lab"}))
    other.folder.mkdir(parents=True)
    LocalHost(name="h").certify(other, "lab", ClusterSecret.generate(), now=time.time())
    with client(server, other) as logs, pytest.raises(HostUnavailable, match="(?i)certificate"):
        logs.parts()
