"""The real router under its supervisor, with workers that answer as engines do: it is killed, frozen, and its list of
workers is changed behind the supervisor's back."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from support import http_servers
from support.stub_actors import StubServer
from support.waiting import wait_until

from elastic_rl.driver.router_supervisor import RouterSupervisor
from elastic_rl.engine.router import RouterClient, RouterProcess
from elastic_rl.errors import EngineFailed, Fenced
from elastic_rl.etcd.records import Engine, EngineState, Straggler
from elastic_rl.host import processes
from elastic_rl.host.service_files import SERVICE_FILE_ENV, ServiceFiles
from elastic_rl.net.engine_key import EngineAccess

EPOCH = 3


@pytest.fixture
def urls() -> Iterator[list[str]]:
    """Two servers that answer the router's questions."""
    with contextlib.ExitStack() as held:
        found = []
        for _ in range(2):
            server = held.enter_context(http_servers.serving(ThreadingHTTPServer(("127.0.0.1", 0), StubServer)))
            found.append(f"http://127.0.0.1:{server.server_port}")
        yield found


class Supervised:
    """The supervisor, and the engines that etcd would list. Each poll of ``until`` is another reading of etcd."""

    def __init__(self, folder: Path, *, replaced: bool = False) -> None:
        """``replaced``: whether a newer driver has begun."""
        key, file = "0" * 64, folder / "engine.key"
        file.write_text(key)
        file.chmod(0o600)
        self.process = RouterProcess(ServiceFiles(folder / "compute"), "router", epoch=EPOCH, host="127.0.0.1",
                                     log=folder / "router.log", key_file=lambda: file, request_timeout_s=60.0)
        self.replaced = replaced
        self.supervisor = RouterSupervisor(self.process, epoch=EPOCH, interval_s=0.1, frozen_s=3.0,
                                           access=EngineAccess(key), require=self._require)
        self.states: dict[str, EngineState] = {}
        self.supervisor.start()
        self.client = RouterClient(self.supervisor.url, access=EngineAccess(key))

    def _require(self) -> None:
        if self.replaced:
            raise Fenced("a newer driver has begun")

    def listed(self) -> set[str]:
        try:
            return set(self.client.workers())
        except EngineFailed:
            return {"no answer"}

    def until(self, check: Callable[[], object], what: str) -> None:
        def observed() -> object:
            self.supervisor.observe(Engine(id=url, pool="rollout", state=state, epoch=EPOCH, url=url)
                                    for url, state in self.states.items())
            return check()

        wait_until(observed, what=what, poll_s=0.2)

    def until_listed(self, *urls: str) -> None:
        self.until(lambda: self.listed() == set(urls), f"the workers {urls}")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Supervised]:
    made = Supervised(tmp_path)
    yield made
    made.supervisor.stop()


@pytest.fixture
def left_router(tmp_path: Path, urls: list[str]) -> Iterator[int]:
    """Pid of a router with both workers, whose driver was killed."""
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from {Path(__file__).stem} import EngineState, Supervised
driver = Supervised(Path({str(tmp_path)!r}))
driver.states = dict.fromkeys({urls!r}, EngineState.READY)
driver.until_listed(*driver.states)
driver.until(lambda: False, "its end")
"""
    files = ServiceFiles(tmp_path / "compute")
    driver = processes.spawn([sys.executable, "-c", program], log=tmp_path / "driver.log")
    try:
        def with_both() -> bool:
            record = files.get("router")
            with contextlib.suppress(EngineFailed):
                return record is not None and set(RouterClient(
                    record.url, access=EngineAccess("0" * 64)).workers()) == set(urls)
            return False

        wait_until(with_both, what="both workers", alive=lambda: driver.poll() is None)
        driver.kill()
        driver.wait()
        [record] = files.running()
        yield record.pid
    finally:
        driver.kill()
        driver.wait()
        processes.sweep(files.mark("router"), SERVICE_FILE_ENV)


def test_router_of_a_killed_driver_is_adopted_with_its_workers(
        left_router: int, tmp_path: Path, urls: list[str]) -> None:
    router = Supervised(tmp_path)
    try:
        assert router.process.pid == left_router
        router.until_listed(*urls)
        kept, lost = urls
        router.states = {kept: EngineState.READY}  # the other one ended while there was no driver
        router.until_listed(kept)
        assert router.process.pid == left_router and router.process.alive()
        assert router.supervisor.fault == "" and router.supervisor.restarts() == []

        url = router.supervisor.url
        os.kill(left_router, signal.SIGKILL)
        router.until(lambda: router.process.pid != left_router and router.listed() == {kept}, "the next router")
        assert router.supervisor.url == url and router.supervisor.restarts() == ["it ended"]
    finally:
        router.supervisor.stop()
    assert ServiceFiles(tmp_path / "compute").all() == []


def test_engine_that_an_adopted_router_lacks_is_added_after_a_second_look(
        left_router: int, tmp_path: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have removed itself since its record was read. A router that was just launched has lost nobody."""
    added: list[str] = []
    monkeypatch.setattr(RouterClient, "request_add", lambda self, url: added.append(url))
    router = Supervised(tmp_path)
    try:
        def observe_and_compare() -> None:
            router.supervisor.observe([Engine(id="e", pool="rollout", state=EngineState.READY, epoch=EPOCH, url="u")])
            wait_until(lambda: router.supervisor._compared == router.supervisor._observed, what="a comparison")

        observe_and_compare()
        assert router.process.pid == left_router and added == []
        observe_and_compare()
        wait_until(lambda: added == ["u"], what="the engine")
    finally:
        router.supervisor.stop()


def test_router_that_is_killed_comes_back_at_its_address_with_its_workers(router: Supervised, urls: list[str]) -> None:
    router.states = dict.fromkeys(urls, EngineState.READY)
    router.until_listed(*urls)
    before = router.process.pid
    os.kill(before, signal.SIGKILL)
    router.until(lambda: router.process.pid != before and router.listed() == set(urls), "the next router")
    router.until(lambda: router.supervisor.fault == "", "the end of the fault")
    assert router.supervisor.restarts() == ["it ended"] and router.supervisor.restarts() == []


def test_frozen_router_is_replaced(router: Supervised, urls: list[str]) -> None:
    router.states = {urls[0]: EngineState.READY}
    router.until_listed(urls[0])
    before = router.process.pid
    os.kill(before, signal.SIGSTOP)
    router.until(lambda: router.process.pid != before and router.listed() == {urls[0]}, "the next router")
    [reason] = router.supervisor.restarts()
    assert "did not answer" in reason


def test_list_of_workers_follows_the_records(router: Supervised, urls: list[str]) -> None:
    kept, lost = urls
    router.states = {kept: EngineState.READY, lost: EngineState.READY}
    router.until_listed(kept, lost)

    # Someone removes a worker whose engine is ready.
    router.client.remove(kept, timeout_s=30)
    router.until_listed(kept, lost)

    # An engine dies, and its runner with it: nobody else takes it out.
    router.states[lost] = EngineState.DEAD
    router.until_listed(kept)

    # An engine adds itself before its record says READY: it is not fought.
    router.states[lost] = EngineState.SYNCING
    router.client.add(lost, timeout_s=30)
    for _ in range(20):
        router.until(lambda: True, "a reading")
    assert router.listed() == {kept, lost}

    # The driver has seen it end: it does not wait for two more readings, nor for etcd.
    router.states = {kept: EngineState.READY}
    router.until(lambda: True, "a reading")
    router.supervisor.unroute(lost)
    wait_until(lambda: router.listed() == {kept}, what="the removal")


def test_engine_that_is_behind_leaves_the_router_which_says_so_of_this_time_alone(
        router: Supervised, urls: list[str]) -> None:
    router.states = dict.fromkeys(urls, EngineState.READY)
    router.until_listed(*urls)
    slow, other = (Engine(id=url, pool="rollout", state=EngineState.READY, epoch=EPOCH, url=url, version=4)
                   for url in urls)
    behind = slow.replace(straggler=Straggler(needs=5, missed=5, since=3.0))
    assert not router.supervisor.has_left(behind)

    def left() -> bool:
        router.supervisor.observe([behind, other])
        return router.supervisor.has_left(behind)

    wait_until(left, what="that the router does not have it", poll_s=0.05)
    assert router.listed() == {other.url}
    assert not router.supervisor.has_left(slow)
    assert not router.supervisor.has_left(slow.replace(straggler=Straggler(needs=6, missed=6, since=9.0))), (
        "it may have joined again since")


def test_worker_that_is_no_engine_of_the_pool_is_removed_and_reported(router: Supervised, urls: list[str]) -> None:
    own, foreign = urls
    router.states = {own: EngineState.READY}
    router.until_listed(own)
    router.client.add(foreign, timeout_s=30)
    router.until_listed(own)
    assert router.supervisor.foreign() == [foreign] and not router.supervisor.foreign()
    router.states = {own: EngineState.DEAD}  # what was an engine is none
    router.until_listed()
    assert not router.supervisor.foreign()


def older_ends(router: Supervised) -> None:
    """Returns when the supervision by a driver that a newer one has replaced is over."""
    wait_until(lambda: not router.supervisor._thread.is_alive(), what="the end of the supervision")
    assert router.supervisor.restarts() == []


def test_replaced_driver_changes_no_list_of_workers(router: Supervised, urls: list[str]) -> None:
    """Another engine may serve by now at the address of one that it has seen end."""
    router.states = dict.fromkeys(urls, EngineState.READY)
    router.until_listed(*urls)
    router.replaced = True
    router.supervisor.unroute(urls[0])
    older_ends(router)
    assert router.listed() == set(urls)


def test_replaced_driver_does_not_end_a_router_that_is_silent(router: Supervised) -> None:
    """After a suspension, one that the newer driver is just restarting seems silent for as long as that was."""
    router.until_listed()
    router.replaced = True
    os.kill(router.process.pid, signal.SIGSTOP)
    older_ends(router)
    assert router.process.alive()


def test_replaced_driver_starts_no_router(tmp_path: Path) -> None:
    with pytest.raises(Fenced):
        Supervised(tmp_path, replaced=True)
    assert ServiceFiles(tmp_path / "compute").all() == []
