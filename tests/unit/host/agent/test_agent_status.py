"""What the host agent says of itself where its disk takes nothing, and what that says to its standby, which kills an
agent that is silent. ``chaos_tests/tests/test_cluster_on_a_full_disk.py`` has a disk that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.etcd.cluster_records import RunState, ServiceStatus
from elastic_rl.host.agent import status as status_module
from elastic_rl.host.agent.__main__ import HostAgent
from elastic_rl.host.agent.status import SILENT_AFTER_S, AgentStatus, reported_problems
from elastic_rl.host.paths import ClusterPaths

SAID = AgentStatus(name="agent-0", pid=1, at=1.0, error="a longer error than the next one")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.json"


def refuse(patch: pytest.MonkeyPatch, number: int) -> None:
    def replace_file(*_: object) -> None:
        raise OSError(number, os.strerror(number))
    patch.setattr(status_module, "replace_file", replace_file)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_status_is_written_over_the_last_one_where_there_is_no_room(
        path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.save(path)
    refuse(monkeypatch, number)
    SAID.replace(at=2.0, error="short").save(path)
    assert AgentStatus.load(path) == SAID.replace(at=2.0, error="short")


def test_status_that_has_no_room_is_marked_as_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.save(path)
    os.utime(path, (1.0, 1.0))
    refuse(monkeypatch, errno.ENOSPC)
    SAID.replace(error="x" * (1 << 20)).save(path)
    assert AgentStatus.load(path) == SAID and path.stat().st_mtime > 1.0


def test_first_status_is_not_begun_where_there_is_no_room(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.ENOSPC)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        SAID.save(path)
    assert not path.exists()


def test_disk_that_fails_otherwise_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SAID.save(path)
    refuse(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        SAID.replace(at=2.0).save(path)
    assert AgentStatus.load(path) == SAID


def test_what_was_said_lately_of_the_job_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = {name: ServiceStatus(state=RunState.ENDED, reason="has ended")
             for name in ("etcd-0", "agent-1", "dcs-other")}
    cluster: Any = SimpleNamespace(paths=SimpleNamespace(agent_status=path), cfg=SimpleNamespace(job="j"))
    assert reported_problems(cluster) == ""
    SAID.replace(at=100.0, services=ended).save(path)
    told = f"etcd-0 has ended; host agent: {SAID.error}"
    for now, said in ((100.0 + SILENT_AFTER_S, told), (101.0 + SILENT_AFTER_S, ""), (10.0, "")):
        monkeypatch.setattr(status_module.time, "time", lambda now=now: now)
        assert reported_problems(cluster) == said, "the wall clock may have been set back, too"


def test_no_status_is_expected_from_an_agent_whose_disk_takes_nothing(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = ClusterPaths(tmp_path)
    cluster: Any = SimpleNamespace(paths=paths)
    agent = HostAgent("agent-1", cluster)
    paths.active_agent_lock.parent.mkdir(parents=True, exist_ok=True)
    paths.active_agent_lock.touch()
    assert not agent._expects_status(), "it is starting the cluster, or takes it down"
    paths.info.touch()
    assert agent._expects_status()

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", read_only)
    assert not agent._expects_status()
