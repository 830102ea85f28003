"""A real router before engines that only answer: which one is asked, and for how long; and the router as a service,
which outlives the process that launched it and is adopted by the next one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support import http_servers
from support.waiting import PATIENCE_S, wait_until

from elastic_rl.data.samples import Sample
from elastic_rl.engine import router as engine_router
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.errors import Conflict, RouterUnavailable
from elastic_rl.host import file_lock, processes
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.host.service_files import SERVICE_FILE_ENV, ServiceFiles
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.engine_key import EngineAccess
from elastic_rl.net.tls import TlsFolder

EPOCH, SERVICE = 3, "router-rollout"


class Engine(ThreadingHTTPServer):
    """Answers as SGLang does, after ``takes_s`` seconds, with its own number as the version."""

    daemon_threads = True

    def __init__(self, number: int, takes_s: float = 0.0, tls: TlsFolder | None = None) -> None:
        self.health_checks = 0
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.health_checks += 1
                self._send({"model_path": "m", "is_generation": True})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                time.sleep(takes_s)
                self._send([{"output_ids": [5], "meta_info": {
                    "finish_reason": {"type": "stop"}, "weight_version": str(number),
                    "output_token_logprobs": [[-0.5, 5, None]]}} for _ in body["input_ids"]])

            def _send(self, value: Any) -> None:
                raw = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)
        self._scheme = "https" if tls else "http"
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.cert, tls.key)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        http_servers.serve(self)

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.server_port}"


class ImpatientFiles(ServiceFiles):
    """For tests in which the lock is not released."""

    def start(self, *args: Any, **options: Any) -> int:
        return super().start(*args, **options, lock_s=0.1)


def router_of(folder: Path, epoch: int = EPOCH, *, files: type[ServiceFiles] = ServiceFiles, **options: Any
              ) -> RouterProcess:
    """The router of a pool as a driver has it; all drivers of a folder have the same one."""
    return RouterProcess(files(folder / "compute"), SERVICE, epoch=epoch, host="127.0.0.1",
                         log=folder / "router.log", **{"request_timeout_s": 10.0, **options})


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose router ends with the test."""
    yield tmp_path
    processes.sweep(ServiceFiles(tmp_path / "compute").mark(SERVICE), SERVICE_FILE_ENV)


def certificate(folder: Path) -> TlsFolder:
    """A certificate for loopback, of an authority that no system trusts."""
    paths = ClusterPaths(folder)
    LocalHost(name="a").certify(paths, "lab", ClusterSecret.generate())
    return paths.tls


def test_router_and_engines_with_tls_trust_the_clusters_authority_alone(folder: Path) -> None:
    (other := folder / "other").mkdir()
    tls, foreign = certificate(folder), certificate(other)
    engine, stranger = Engine(7, tls=tls), Engine(8, tls=foreign)
    router = router_of(folder, tls=tls)
    router.start()
    access = EngineAccess(authority=str(tls.ca))
    client = RouterClient(router.url, access=access)
    client.add(engine.url, timeout_s=PATIENCE_S)
    client.request_add(stranger.url)

    async def sampled() -> Sample:
        one = GenerateClient(router.url, timeout_s=PATIENCE_S, retries=100, access=access)
        try:
            return (await one.generate([1], Sampling(max_new_tokens=1), 1))[0]
        finally:
            await one.close()

    def checked_several_times() -> bool:
        assert asyncio.run(sampled()).segments[0].version == 7 and not client.workers().get(stranger.url)
        return engine.health_checks >= 4

    wait_until(checked_several_times, what="several health checks", poll_s=0.2)
    with pytest.raises(RouterUnavailable):
        RouterClient(router.url, access=EngineAccess(authority=str(foreign.ca))).workers()


def launch_and_die(folder: Path, before: str = "") -> None:
    """Launches the router in a process that is killed then, or before that where ``before`` arranges it."""
    program = f"""
import os, signal
from pathlib import Path
from elastic_rl.engine.router import RouterProcess
from elastic_rl.host import service_files
def die():
    os.kill(os.getpid(), signal.SIGKILL)
{before}
RouterProcess(service_files.ServiceFiles(Path({str(folder / "compute")!r})), {SERVICE!r}, epoch={EPOCH},
              host="127.0.0.1", log=Path({str(folder / "router.log")!r}), request_timeout_s=10.0).launch()
die()
"""
    driver = processes.spawn([sys.executable, "-c", program], log=folder / "driver.log",
                             env={processes.RUN_MARK: str(folder)})
    assert driver.wait(PATIENCE_S) == -signal.SIGKILL, (folder / "driver.log").read_text()


def test_router_waits_as_long_as_its_clients_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended long requests after a time of its own, and sent them again."""
    monkeypatch.setattr(engine_router, "_LONGER_THAN_CLIENT_S", 0.0)
    engine = Engine(1, takes_s=3.0)

    def answer(limit_s: float) -> int:
        router = router_of(tmp_path, request_timeout_s=limit_s)
        try:
            router.start()
            RouterClient(router.url).add(engine.url, PATIENCE_S)
            return httpx.post(f"{router.url}/generate", json={"input_ids": [[1]]}, timeout=60.0).status_code
        finally:
            router.stop()

    try:
        assert answer(1.0) >= 500, "this router has a shorter limit than its client"
        assert answer(60.0) == 200
    finally:
        http_servers.close(engine)


def test_turns_of_a_conversation_reach_one_engine(tmp_path: Path) -> None:
    engines = [Engine(1), Engine(2)]
    router = router_of(tmp_path, sticky=True)
    try:
        router.start()
        listed = RouterClient(router.url)
        for engine in engines:
            listed.add(engine.url, PATIENCE_S)

        async def turns(count: int) -> list[set[int]]:
            client = GenerateClient(router.url, timeout_s=10.0, retries=8)

            async def one(route: str, turn: int) -> list[Sample]:
                return await client.generate([1] * (turn + 1), Sampling(4), 1, route)

            try:
                found: list[set[int]] = [set() for _ in range(16)]
                for turn in range(count):
                    said = await asyncio.gather(*(one(f"conversation {i}", turn) for i in range(len(found))))
                    for versions, samples in zip(found, said, strict=True):
                        versions.add(samples[0].oldest_version)
                return found
            finally:
                await client.close()

        before = asyncio.run(turns(4))
        assert all(len(versions) == 1 for versions in before)
        assert {1, 2} == set.union(*before), "the conversations are spread"
        http_servers.close(gone := engines.pop(0))
        listed.remove(gone.url, PATIENCE_S)
        assert asyncio.run(turns(2)) == [{2}] * 16
    finally:
        router.stop()
        for engine in engines:
            http_servers.close(engine)


# -- as a service ------------------------------------------------------------------------------------------------------
def test_router_of_a_killed_process_is_adopted_and_restarted_at_its_address(folder: Path) -> None:
    launch_and_die(folder)
    [left] = ServiceFiles(folder / "compute").running()
    adopter, engine = router_of(folder), Engine(1)
    try:
        adopter.start()
        assert (adopter.pid, adopter.url) == (left.pid, left.url) and adopter.alive()
        RouterClient(adopter.url).add(engine.url, PATIENCE_S)

        psutil.Process(adopter.pid).kill()
        wait_until(lambda: not adopter.alive(), what="its end")
        adopter.start()
        assert adopter.pid != left.pid and adopter.url == left.url
        assert RouterClient(left.url).workers() == {}

        # The next driver finds that it has ended.
        psutil.Process(adopter.pid).kill()
        wait_until(lambda: not adopter.alive(), what="its end")
        late = router_of(folder)
        assert not late.alive() and late.url == left.url
        late.start()
        assert late.pid != adopter.pid and late.url == left.url
        late.stop()
        assert not late.alive() and ServiceFiles(folder / "compute").all() == []
    finally:
        http_servers.close(engine)


def test_router_of_a_killed_process_ends_with_the_run_and_its_file_does_no_harm(folder: Path) -> None:
    launch_and_die(folder)
    [left] = ServiceFiles(folder / "compute").running()
    assert processes.sweep(str(folder)) == [left.pid]
    for epoch in (EPOCH, EPOCH + 1):
        router = router_of(folder, epoch)
        assert not router.alive() and router.launch() and router.alive()


@pytest.mark.parametrize("killed_at", ["the lock", "the fork"])
def test_router_whose_launch_was_killed_is_adopted_or_launched(folder: Path, killed_at: str) -> None:
    """Between the lock and the fork there is no router; after it there is one that the service's file does not name."""
    launch_and_die(folder, "service_files.processes.spawn = lambda *_, **__: die()" if killed_at == "the lock" else """
write = service_files._write
service_files._write = lambda file, url, generation, pid: die() if pid else write(file, url, generation, pid)
""")
    router = router_of(folder)
    assert router.alive() == (killed_at == "the fork")
    adopted = router.pid
    router.start()
    assert not adopted or router.pid == adopted
    before, url = router.pid, router.url
    assert router.launch(), "it ends one that runs, also where the file does not name it"
    assert router.pid != before and router.url == url


def test_router_of_an_earlier_epoch_is_replaced_and_one_of_a_later_epoch_is_not(folder: Path) -> None:
    earlier, later = router_of(folder, files=ImpatientFiles), router_of(folder, EPOCH + 1)
    assert earlier.launch()
    assert not router_of(folder, EPOCH + 1).alive()
    assert later.launch() and later.alive() and not earlier.alive()
    assert later.url != earlier.url
    with pytest.raises(Conflict, match="runs already"):
        earlier.launch()
    earlier.stop()
    assert later.alive() and [later.pid] == [r.pid for r in ServiceFiles(folder / "compute").running()]


def test_router_with_a_damaged_file_is_replaced(folder: Path) -> None:
    before = router_of(folder)
    before.launch()
    (folder / "compute" / f"{SERVICE}.json").write_text("{")
    after = router_of(folder)
    assert not after.alive() and after.launch()
    assert not before.alive() and router_of(folder).pid == after.pid


def test_drivers_of_one_epoch_share_the_router_that_one_of_them_launches(folder: Path) -> None:
    one, other = router_of(folder), router_of(folder)
    assert one.url != other.url
    assert one.launch() and not other.launch()
    assert (other.pid, other.url) == (one.pid, one.url)

    # Both find it frozen: the second one does not end what the first one has launched since.
    os.kill(one.pid, signal.SIGSTOP)
    assert one.launch()
    other.end()
    assert one.alive() and not other.alive()
    assert not other.launch() and other.alive() and other.pid == one.pid


def test_router_is_adopted_whose_lock_was_taken_by_another_driver_meanwhile(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = router_of(folder), router_of(folder, files=ImpatientFiles)
    monkeypatch.setattr(other, "end", lambda: one.launch())  # right before it starts its own
    assert not other.launch()
    assert one.alive() and (other.pid, other.url) == (one.pid, one.url)


def test_router_that_cannot_be_ended_is_not_joined_by_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_of(folder, files=ImpatientFiles)
    router.launch()
    monkeypatch.setattr(router, "end", lambda: None)
    with pytest.raises(Conflict, match="runs already"):
        router.launch()
    with monkeypatch.context() as patched:
        patched.setattr(file_lock, "_locks", lambda pid, fd, target: False)  # as in another container
        elsewhere = router_of(folder, files=ImpatientFiles)
        assert not elsewhere.alive() and elsewhere.url == router.url
        with pytest.raises(Conflict, match="runs already"):
            elsewhere.launch()
    assert router.alive()
