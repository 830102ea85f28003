"""Files of services: who lives holds the lock, whoever started it, and nothing is started beside it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_until

from elastic_rl.errors import Conflict
from elastic_rl.host import file_lock, processes, service_files
from elastic_rl.host.service_files import ServiceFiles, ServiceRecord

SLEEP = ["sleep", "600"]


class Services(ServiceFiles):
    """The files of a folder, with the processes that a test has started by them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "services")
        self._log = folder / "log"

    def sleep(self, name: str = "a", *, url: str = "") -> int:
        return self.start(name, SLEEP, log=self._log, url=url)

    def kill(self, name: str = "a") -> None:
        record = self.get(name)
        assert record is not None
        psutil.Process(record.pid).kill()
        wait_until(lambda: not self.runs(name), what="the kernel to release the lock")


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    out = Services(tmp_path)
    yield out
    for pid in {pid for path in out.folder.glob("*.json") for pid in file_lock.holders(path)}:
        psutil.Process(pid).kill()


def test_service_is_known_by_its_lock_until_it_ends(services: Services) -> None:
    assert services.all() == [] and services.get("a") is None and not services.runs("a")
    assert not services.is_run_by("a", os.getpid())
    pid = services.sleep(url="127.0.0.1:1")
    assert services.running() == [ServiceRecord("a", "127.0.0.1:1", pid, running=True, named=True)]
    assert services.is_run_by("a", pid) and not services.is_run_by("a", os.getpid())
    services.kill()
    assert not services.is_run_by("a", pid)
    assert services.all() == [ServiceRecord("a", "127.0.0.1:1")] and services.running() == []
    assert services.sleep(url="127.0.0.1:2") != pid
    assert services.get("a").url == "127.0.0.1:2"  # type: ignore[union-attr]
    services.kill()
    services.forget("a")
    assert services.all() == []


def test_no_service_is_started_beside_a_living_one(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "READER_S", 0.1)
    pid = services.sleep()
    with pytest.raises(Conflict, match="a runs already"):
        services.sleep()
    assert [r.pid for r in services.running()] == [pid]


@pytest.mark.parametrize("killed_after", ["lock", "fork"])
def test_service_whose_starter_was_killed_is_found_or_can_be_started(services: Services, killed_after: str) -> None:
    """Between the lock and the fork there is no service; after it there is one, whose pid nobody has written down."""
    program = f"""
import os, signal, sys
from pathlib import Path
from elastic_rl.host import service_files
write = service_files._write
def killed(file, url, generation, pid):
    if {killed_after == "lock"} or pid:
        os.kill(os.getpid(), signal.SIGKILL)
    write(file, url, generation, pid)
service_files._write = killed
files = service_files.ServiceFiles(Path({str(services.folder)!r}))
files.start("a", {SLEEP!r}, log=Path({str(services._log)!r}), url="u")
"""
    starter = processes.spawn([sys.executable, "-c", program], log=services._log)
    assert starter.wait(300) == -signal.SIGKILL
    record = services.get("a")
    assert record is not None
    if killed_after == "lock":
        assert not record.running
        services.sleep()
    else:
        assert record.running and record.url == "u" and psutil.Process(record.pid).name() == "sleep"
    services.kill()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"url": 1}', '{"url": "u", "pid": "x"}', "\0\0"])
def test_service_with_a_damaged_file_is_found_by_its_lock(services: Services, content: str) -> None:
    pid = services.sleep()
    (services.folder / "a.json").write_text(content)
    assert services.running() == [ServiceRecord("a", "", pid, running=True)] and services.is_run_by("a", pid)
    services.kill()
    assert services.all() == [ServiceRecord("a")]
    assert services.sleep(url="u") and services.get("a").url == "u"  # type: ignore[union-attr]


def test_pid_that_another_process_has_now_is_not_the_service(services: Services) -> None:
    pid = services.sleep()
    path = services.folder / "a.json"
    path.write_text(path.read_text().replace(str(pid), str(os.getpid())))
    assert services.get("a") == ServiceRecord("a", "", pid, running=True)


def test_what_a_dead_service_has_forked_does_not_count_as_it(services: Services) -> None:
    """A forked process inherits the lock, and may outlive the service."""
    program = "import os, time\nif os.fork() == 0: time.sleep(600)\nprint('up', flush=True)\ntime.sleep(600)"
    services.start("a", [sys.executable, "-c", program], log=services._log)
    wait_until(lambda: "up" in services._log.read_text(), what="the fork")
    record = services.get("a")
    assert record is not None
    [forked] = psutil.Process(record.pid).children()
    services.kill()
    assert psutil.pid_exists(forked.pid) and services.get("a") == ServiceRecord("a")
    services.end_leftovers("a")
    services.sleep()
    wait_until(lambda: not psutil.pid_exists(forked.pid) or forked.status() == psutil.STATUS_ZOMBIE,
               what="the end of the forked process")
    assert services.runs("a")


def test_readers_of_a_file_are_neither_the_service_nor_killed(services: Services) -> None:
    services.sleep()
    services.kill()
    path = services.folder / "a.json"
    program = f"import fcntl, time; f = open({str(path)!r}); fcntl.flock(f, fcntl.LOCK_SH); print('up', flush=True); " \
              "time.sleep(2); f.close(); time.sleep(600)"
    reader = processes.spawn([sys.executable, "-c", program], log=services._log)
    wait_until(lambda: "up" in services._log.read_text(), what="the reader")
    try:
        assert services.get("a") == ServiceRecord("a")
        services.end_leftovers("a")
        services.sleep()
        assert services.runs("a") and reader.poll() is None
    finally:
        reader.kill()


def test_service_that_only_another_machine_sees_runs_elsewhere(
        services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = services.sleep()
    with monkeypatch.context() as patched:
        patched.setattr(file_lock, "_locks", lambda pid, fd, target: False)  # as in another container
        record = services.get("a")
        assert record is not None and record.elsewhere and record.running and not record.named
    assert services.running() == [ServiceRecord("a", "", pid, running=True, named=True)]


def test_service_finds_itself(services: Services) -> None:
    """It opens and closes files of its own while it looks through them."""
    program = f"""
import time
from pathlib import Path
from elastic_rl.host.service_files import ServiceFiles
print(all(ServiceFiles(Path({str(services.folder)!r})).get("a").pid for _ in range(20)), flush=True)
time.sleep(600)
"""
    services.start("a", [sys.executable, "-c", program], log=services._log)
    wait_until(lambda: services._log.read_text().strip(), what="the answer")
    assert services._log.read_text().strip() == "True"


def test_clear_forgets_every_service(services: Services) -> None:
    services.sleep()
    services.kill()
    (services.folder / "b.json").write_text("{")
    services.clear()
    assert services.all() == []


def test_service_says_that_its_work_is_done_and_its_next_process_has_not_said_it(services: Services) -> None:
    program = "from elastic_rl.host.service_files import report_completed; report_completed()"
    for cmd, completed in (([sys.executable, "-c", program], True), (["true"], False)):
        services.start("a", cmd, log=services._log, url="u", generation=3)
        wait_until(lambda: not services.runs("a"), what="the end of the service")
        assert services.get("a") == ServiceRecord("a", "u", generation=3, completed=completed)


def test_last_word_of_a_service_that_ends_while_it_is_looked_at_is_read(
        services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    services.start("a", ["true"], log=services._log, generation=3)
    wait_until(lambda: not services.runs("a"), what="the end of the service")
    monkeypatch.setenv(service_files.SERVICE_FILE_ENV, services.mark("a"))

    def ends_meanwhile(pid: int, path: Path) -> bool:
        service_files.report_completed()
        return False

    monkeypatch.setattr(file_lock, "holds", ends_meanwhile)
    assert services.get("a") == ServiceRecord("a", generation=3, completed=True)


def test_word_of_a_service_that_was_faster_than_its_starter_is_kept(
        services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """The starter writes the pid when the process runs already."""
    def faster(cmd: list[str], **_: object) -> object:
        with monkeypatch.context() as patched:
            patched.setenv(service_files.SERVICE_FILE_ENV, services.mark("a"))
            service_files.report_completed()
        return type("Child", (), {"pid": 4_000_000})

    monkeypatch.setattr(service_files.processes, "spawn", faster)
    services.start("a", SLEEP, log=services._log, generation=2)
    record = services.get("a")
    assert record is not None and record.completed and record.generation == 2


def test_word_for_an_earlier_generation_does_not_count(services: Services) -> None:
    """A starter that is killed between its two writes leaves it behind the new first line."""
    services.folder.mkdir()
    with (services.folder / "a.json").open("w+b") as file:
        service_files._write(file, "u", 4, pid=0)
        file.seek(0, os.SEEK_END)
        file.write(service_files._completed(3))
    assert services.get("a") == ServiceRecord("a", "u", generation=4)
