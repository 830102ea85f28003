"""A start of a server is given up when it makes no progress, and never because it is slow. The server is a small
program in the place of SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from support.waiting import PATIENCE_S

from elastic_rl.config import DeviceConfig, EngineConfig
from elastic_rl.engine.server import sglang_server as server_module
from elastic_rl.engine.server.sglang_server import SGLangServer
from elastic_rl.errors import EngineFailed
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.runtime.waiting import ProgressLimit

LIMIT_S, LINES = 3.0, 6
SLOW = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
for _ in range(LINES):
    print("loading", flush=True)
    time.sleep(0.2)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""
SLOW, QUICK = SLOW.replace("LINES", str(LINES)), SLOW.replace("LINES", "1")
HANGS = "import time\nprint('loading', flush=True)\ntime.sleep(600)"
ENDS = "raise SystemExit('no such model')"
SAYS_ENVIRONMENT = "import json, os\nprint(json.dumps(dict(os.environ)))"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[SGLangServer]:
    monkeypatch.setattr(server_module, "python", lambda _, *args: [sys.executable, "-c", request.param, *args])
    cfg = EngineConfig(start_timeout_s=LIMIT_S if request.param in (SLOW, HANGS) else PATIENCE_S)
    yield SGLangServer("model", host=LOOPBACK, cfg=cfg, device=DeviceConfig(type="cpu"), log=tmp_path / "log", seed=1,
                       tag="test-start")
    if (tmp_path / "log").exists():
        print((tmp_path / "log").read_text())  # pytest shows it with a test that fails


@pytest.mark.parametrize("server", [SLOW], indirect=True, ids=["slow"])
def test_start_that_goes_on_is_waited_for_beyond_the_limit(server: SGLangServer, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only while the program makes progress: two seconds for each of its lines, however slow it is here."""
    def clock() -> float:
        log = tmp_path / "log"
        return 2.0 * log.read_text().count("loading") if log.exists() else 0.0

    monkeypatch.setattr(server_module, "ProgressLimit", partial(ProgressLimit, clock=clock))
    server.start()
    try:
        assert server.alive() and clock() == 2.0 * LINES > LIMIT_S
    finally:
        server.close()


@pytest.mark.parametrize("server", [HANGS], indirect=True, ids=["hangs"])
def test_start_without_progress_is_given_up_and_leaves_no_process(server: SGLangServer) -> None:
    with pytest.raises(EngineFailed, match="no progress for"):
        server.start()
    assert server.pid == 0 and not server.alive()
    server.close()


@pytest.mark.parametrize("server", [ENDS], indirect=True, ids=["ends"])
def test_start_that_ends_is_reported_at_once(server: SGLangServer) -> None:
    with pytest.raises(EngineFailed, match="ended before it was ready"):
        server.start()
    server.close()


@pytest.mark.parametrize("server", [QUICK], indirect=True, ids=["quick"])
def test_stop_says_that_a_killed_server_still_runs(server: SGLangServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device memory of such a server must not be given to the trainer."""
    server.start()
    process = server._process
    assert process is not None

    def never_ends(timeout: float) -> int:
        raise subprocess.TimeoutExpired("server", timeout)

    with monkeypatch.context() as patched:
        patched.setattr(process, "wait", never_ends)
        assert not server.stop() and not server.alive() and not server.stop()
    process.wait(60)
    server.close()


@pytest.mark.parametrize("server", [QUICK], indirect=True, ids=["quick"])
def test_condemned_server_is_killed_and_says_why(server: SGLangServer) -> None:
    server.start()
    server.condemn("no sign of life")
    assert not server.alive() and server.failure == "no sign of life"
    server._process.wait(60)
    server.close()


@pytest.mark.parametrize("server", [SAYS_ENVIRONMENT], indirect=True, ids=["says"])
def test_server_on_a_cpu_downloads_nothing_and_has_one_thread(server: SGLangServer, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    for name in expected:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(EngineFailed, match="ended before it was ready"):
        server.start()
    server.close()
    assert expected.items() <= json.loads((tmp_path / "log").read_text()).items()
