"""What a fault has stopped, limited or started is undone, also by another process, and only once."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd.process_state import machine_id
from elastic_rl.faults import undo
from elastic_rl.faults.undo import NotUndone, Undo, Undone, UndoRegistry, undo_all
from elastic_rl.runtime.waiting import wait_until

_WAITS = [sys.executable, "-c", "import signal; signal.pause()"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen(_WAITS, start_new_session=True)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def _is(process: subprocess.Popen[bytes], status: str) -> None:
    wait_until(lambda: psutil.Process(process.pid).status() == status, timeout_s=60.0, what=status)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    _is(process, psutil.STATUS_STOPPED)


def test_stopped_process_goes_on_once_all_is_undone(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    UndoRegistry(tmp_path).note(Undo.CONTINUE, process.pid)
    _stop(process)
    assert undo_all(tmp_path) == Undone([f"continue {process.pid}"])
    _is(process, psutil.STATUS_SLEEPING)
    _stop(process)
    assert undo_all(tmp_path) == Undone(), "it was done"
    _is(process, psutil.STATUS_STOPPED)


def test_what_a_killed_injector_has_left_is_undone_by_another_process(process: subprocess.Popen[bytes], tmp_path: Path
                                                                      ) -> None:
    script = f"""
import os, signal
from pathlib import Path
import psutil
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd.process_state import machine_id
from elastic_rl.faults import undo
from elastic_rl.faults.undo import Undo, UndoRegistry
with UndoRegistry(Path({str(tmp_path)!r})).noted(Undo.CONTINUE, {process.pid}):
    os.kill({process.pid}, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == -signal.SIGKILL
    _is(process, psutil.STATUS_STOPPED)
    assert undo_all(tmp_path) == Undone([f"continue {process.pid}"])
    _is(process, psutil.STATUS_SLEEPING)


def test_process_that_has_the_number_of_another_one_is_left_alone(process: subprocess.Popen[bytes], tmp_path: Path
                                                                  ) -> None:
    registry = UndoRegistry(tmp_path)
    entry = registry.note(Undo.END, process.pid)
    assert not registry.undo({**entry, "started": entry["started"] - 1})
    assert process.poll() is None
    assert registry.undo(entry) and process.wait(timeout=60) == -signal.SIGKILL
    assert not registry.undo(entry)


def test_limit_of_files_is_given_back(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    limit = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    with UndoRegistry(tmp_path).noted(Undo.UNLIMIT, process.pid, limit=[*limit]):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, limit[1]))
    assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == limit


def test_line_that_a_killed_writer_has_torn_hides_no_other(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    registry = UndoRegistry(tmp_path)
    first = registry.note(Undo.CONTINUE, process.pid)
    with (tmp_path / "undo.jsonl").open("a") as file:
        file.write('{"id": "torn", "und')
    second = registry.note(Undo.END, process.pid)
    assert registry.pending() == [first, second]


def test_entry_that_the_disk_has_not_taken_is_an_error_and_hides_no_other(process: subprocess.Popen[bytes],
                                                                           tmp_path: Path) -> None:
    registry = UndoRegistry(tmp_path)
    first = registry.note(Undo.CONTINUE, process.pid)
    struck, (_, most) = False, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # the kernel writes what fits, as on a disk that is nearly full
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "undo.jsonl").stat().st_size + 20, most))
        with pytest.raises(OSError, match="20 of"), registry.noted(Undo.CONTINUE, process.pid):
            struck = True
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert not struck
    second = registry.note(Undo.END, process.pid)
    assert registry.pending() == [first, second]


_NO_ENTRIES = (b"5", b"[]", b'{"id": []}', b'{"done": {}}', b"\xff\xfe", b"[" * 100_000, b'{"id": 3, "undo": "end"}')
"""Lines that are no entries."""
_ODD = (b'"undo": "unheard-of", "pid": 1, "started": 0', b'"undo": "continue", "pid": 1e400, "started": 0',
        b'"undo": "continue", "pid": -1, "started": 0', b'"undo": "end", "pid": 0, "started": 0', b'"undo": []',
        b'"a": 1', b'"undo": "end", "pid": true, "started": 0',
        b'"undo": "continue", "pid": 99999999999999, "started": 1', b'"undo": "resize", "pool": "rollout"')
"""Entries that nobody can undo."""


def test_odd_lines_keep_nothing_else_from_being_undone(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    registry = UndoRegistry(tmp_path)
    registry.note(Undo.CONTINUE, process.pid)
    _stop(process)
    machine = machine_id().encode()
    with (tmp_path / "undo.jsonl").open("ab") as file:
        file.write(b"\n".join([*_NO_ENTRIES, *(
            b'{"id": "%d", "machine": "%s", %s}' % (i, machine, odd) for i, odd in enumerate(_ODD)), b""]))
    undone = undo_all(tmp_path)
    assert undone.done == [f"continue {process.pid}"] and len(undone.failed) == len(_ODD)
    assert sum(": it is of another release" in line and line.endswith("undo it by hand") for line in undone.failed
               ) == 3, "those of an unknown kind, and without one"
    assert any(line.startswith("unheard-of 1: ") for line in undone.failed)
    _is(process, psutil.STATUS_SLEEPING)
    assert undo_all(tmp_path) == Undone([], undone.failed), "what failed is still noted"


def test_entry_of_another_machine_or_boot_stays_noted(process: subprocess.Popen[bytes], tmp_path: Path) -> None:
    registry = UndoRegistry(tmp_path)
    entry = registry.note(Undo.END, process.pid)
    registry._append({**entry, "machine": "another-boot.1", "undo": "of another release, too"})
    with pytest.raises(NotUndone):
        registry.undo({**entry, "machine": "another-boot.1"})
    [line] = undo_all(tmp_path).failed
    assert "another machine" in line and process.poll() is None and len(registry.pending()) == 1


def test_process_that_was_started_is_ended_also_where_it_leads_no_group(tmp_path: Path) -> None:
    with subprocess.Popen(_WAITS) as started:
        UndoRegistry(tmp_path).note(Undo.END, started.pid)
        assert undo_all(tmp_path).done == [f"end {started.pid}"]
        assert started.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.parametrize("put", ["link", "fifo", "writable"])
def test_file_that_others_could_have_put_there_is_left_alone(put: str, process: subprocess.Popen[bytes], tmp_path: Path
                                                             ) -> None:
    real, folder = UndoRegistry(tmp_path / "real"), tmp_path / "run"
    real.note(Undo.END, process.pid)
    folder.mkdir()
    file = folder / "undo.jsonl"
    if put == "link":
        file.symlink_to(real.folder / "undo.jsonl")
    elif put == "fifo":
        os.mkfifo(file)
    else:
        file.write_bytes((real.folder / "undo.jsonl").read_bytes())
        file.chmod(0o622)
    [line] = undo_all(folder).failed
    assert "left alone" in line and process.poll() is None
    if put != "writable":
        with pytest.raises(OSError):
            UndoRegistry(folder).note(Undo.END, process.pid)


class Pools:
    """The pools of job j, behind the admin API of a cluster that is up."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.info, self.id_file, self.folder, self.size = folder / "cluster.json", folder / "job_id", folder, 0
        pools = self

        class Api:
            def __init__(self, cluster: ClusterInfo) -> None:
                assert (cluster.job, cluster.coordinators) == ("j", ["http://c"])

            def get(self, path: str) -> dict[str, int]:
                assert path == "pools/rollout"
                return {"desired": pools.size}

            def patch(self, path: str, body: dict[str, int]) -> None:
                pools.size = body["desired"]

        monkeypatch.setattr(undo, "AdminClient", Api)
        ClusterInfo("other", [], ["http://c"], "").save(self.info)
        self.id_file.write_text("1f")

    def undone(self, size: int) -> Undone:
        """What is undone of a fault that has resized a pool of 5 engines to 6 or 7, once it has ``size``."""
        UndoRegistry(self.folder).note(
            Undo.RESIZE, info=str(self.info), job="j", pool="rollout", desired=5, during=[6, 7],
            id_file=str(self.id_file), id_of_job="1f")
        self.size = size
        found = undo_all(self.folder)
        assert not UndoRegistry(self.folder).pending()
        return found


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pools:
    return Pools(tmp_path, monkeypatch)


def test_size_of_a_pool_is_put_back_by_whoever_undoes_it(pools: Pools) -> None:
    assert pools.undone(7) == Undone(["resize rollout"]) and pools.size == 5
    assert pools.undone(5) == Undone(), "it has its size of before"
    pools.info.unlink()
    assert pools.undone(7) == Undone() and pools.size == 7, "the cluster is down"


def test_size_that_somebody_has_set_since_stays(pools: Pools) -> None:
    assert pools.undone(8) == Undone(["resize rollout: left at 8, which somebody has set since"]) and pools.size == 8


def test_pool_of_another_job_of_the_same_name_is_left_alone(pools: Pools) -> None:
    pools.id_file.write_text("2e")
    assert pools.undone(7) == Undone(["resize rollout: left alone, for job j is another one of that name"])
    pools.id_file.unlink()
    assert pools.undone(7).done and pools.size == 7
