"""What condemns a server that someone else runs: another version, or refused connections; never slowness."""

from __future__ import annotations

import contextlib
import ssl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from support import http_servers

from elastic_rl.config import EngineConfig
from elastic_rl.engine.server import external_server
from elastic_rl.engine.server.external_server import ExternalServer
from elastic_rl.errors import EngineFailed
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.engine_key import EngineAccess
from elastic_rl.net.tls import TlsFolder


class Foreign:
    """A server that answers as told, and what its engine sees of it."""

    def __init__(self) -> None:
        self.version, self.error, self.during = "default", None, lambda: None
        self.asked: list[str] = []
        self.server = ExternalServer("http://127.0.0.1:1", "model", cfg=EngineConfig())
        self.server._probe.http = httpx.Client(transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.path)
        self.during()
        if self.error is not None:
            raise self.error
        return httpx.Response(200, json={"weight_version": self.version} if "model" in request.url.path else {})


def test_probe_asks_for_the_version_and_sometimes_for_a_token() -> None:
    foreign = Foreign()
    assert foreign.server.probe() is True
    assert [foreign.server.probe() for _ in range(3)] == [None] * 3
    assert foreign.asked.count("/model_info") == 4 and foreign.asked.count("/health_generate") == 1
    assert foreign.server.alive() and foreign.server.probe_interval_s == 1.0


def test_server_that_reports_another_version_is_dead() -> None:
    foreign = Foreign()
    foreign.server._applied, foreign.version = 7, "7"
    assert foreign.server.probe() and foreign.server.alive()
    foreign.version = "default"
    assert foreign.server.probe() is False and not foreign.server.alive()
    assert "reports version 0 and not 7" in foreign.server.failure


def test_version_that_changes_during_the_probe_is_an_update_of_ours() -> None:
    foreign = Foreign()
    foreign.server._applied, foreign.version = 7, "7"

    def update() -> None:
        foreign.server._applied = 8

    foreign.during = update
    assert foreign.server.probe() is not False and foreign.server.alive()


def test_server_with_another_key_is_started_with_a_key_file() -> None:
    server = Foreign().server
    server._http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(401, text="Unauthorized")))
    with pytest.raises(EngineFailed, match="401") as refused:
        server.in_flight()
    hint = refused.value.hint
    assert "ELASTIC_RL_ENGINE_KEY_FILE=" in hint and "elastic-rl restart job" in hint and "--api-key" not in hint


@pytest.mark.parametrize(("answer", "says"), [
    (httpx.Response(401, text="Unauthorized"), "answers 401.*ELASTIC_RL_ENGINE_KEY_FILE="),
    (httpx.Response(404), "answers 404"), (httpx.Response(200, text="<html>"), "JSON"),
    (httpx.ReadTimeout("slow"), "slow")])
def test_server_that_says_nothing_of_its_model_is_refused_with_what_it_answers(
        answer: httpx.Response | Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_server, "_START_TIMEOUT_S", 0.1)
    foreign = Foreign()

    def reply(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        return answer

    foreign.server._probe.http = httpx.Client(transport=httpx.MockTransport(reply))
    with pytest.raises(EngineFailed, match=says):
        foreign.server.start()


class ModelInfo(BaseHTTPRequestHandler):
    """Says what it serves, and nothing else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"architectures": ["Other"]}')

    def log_message(self, *_: object) -> None:
        pass


def certified(folder: Path) -> TlsFolder:
    """A certificate for loopback, of an authority that no system trusts."""
    folder.mkdir()
    LocalHost(name="a").certify(paths := ClusterPaths(folder), "lab", ClusterSecret.generate())
    return paths.tls


def test_server_with_tls_needs_a_certificate_of_the_clusters_authority(tmp_path: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Own"]}')
    tls, foreign = certified(tmp_path / "own"), certified(tmp_path / "foreign")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    listener = ThreadingHTTPServer((LOOPBACK, 0), ModelInfo)
    listener.socket = context.wrap_socket(listener.socket, server_side=True)

    def refusal(authority: str) -> str:
        server = ExternalServer(f"https://{LOOPBACK}:{listener.server_port}", str(tmp_path), cfg=EngineConfig(),
                                access=EngineAccess(authority=authority))
        with pytest.raises(EngineFailed) as refused, contextlib.closing(server):
            server.start()
        return str(refused.value)

    with http_servers.serving(listener):
        assert "not a ['Own']" in refusal(str(tls.ca)), "it was asked"
        monkeypatch.setattr(external_server, "_START_TIMEOUT_S", 0.5)
        assert "CERTIFICATE_VERIFY_FAILED" in refusal(str(foreign.ca))
        assert "has no authority" in refusal("")


def test_server_that_refuses_connections_is_dead_a_slow_one_is_not() -> None:
    foreign = Foreign()
    foreign.error = httpx.ReadTimeout("slow")
    assert [foreign.server.probe() for _ in range(9)] == [False] * 9 and foreign.server.alive()
    foreign.error = httpx.ConnectError("refused")
    seen = []
    while foreign.server.alive():
        foreign.server.probe()
        seen.append(foreign.server.alive())
    assert len(seen) == external_server._MAX_REFUSED and "no longer answers" in foreign.server.failure
