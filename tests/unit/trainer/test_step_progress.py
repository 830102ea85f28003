"""Which failures of a group's ranks are in a row: those without a step of the job in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient, KeyValue
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.trainer.group.agent import described
from elastic_rl.trainer.group.step_progress import StepProgress


class Etcd:
    """Has the status of a job, or does not answer."""

    def __init__(self) -> None:
        self.status: JobStatus | None = None
        self.is_away = False

    def get(self, key: str) -> KeyValue | None:
        if self.is_away:
            raise EtcdUnavailable("etcd does not answer")
        return KeyValue(key, self.status.encode(), 1, 1, 1, 0) if self.status is not None else None


def test_step_counts_once_and_not_when_it_is_made_again() -> None:
    etcd = Etcd()
    progress = StepProgress(cast(EtcdClient, etcd), Keys("j"))
    assert not progress.made(), "the job has no status yet"
    seen = []
    for supervised, step in ((0, 0), (3, 0), (3, 0), (4, 0), (4, 5), (4, 4), (4, 5), (4, 6), (4, 6)):
        etcd.status = JobStatus(phase="rl" if step else "sft", sft_step=supervised, step=step)
        seen.append(progress.made())
    assert seen == [False, True, False, True, True, False, False, True, False]


def test_steps_of_before_the_agent_and_an_etcd_that_is_away_are_no_progress() -> None:
    etcd = Etcd()
    etcd.status = JobStatus(phase="rl", step=7)
    progress = StepProgress(cast(EtcdClient, etcd), Keys("j"))
    assert not progress.made()
    etcd.status, etcd.is_away = JobStatus(phase="rl", step=8), True
    assert not progress.made()
    etcd.is_away = False
    assert progress.made(), "it is seen when etcd answers again"
    etcd.is_away = True
    later = StepProgress(cast(EtcdClient, etcd), Keys("j"))
    etcd.is_away = False
    assert not later.made(), "which steps are of before it is not known"
    etcd.status = JobStatus(phase="rl", step=9)
    assert later.made()


def test_failure_is_described_in_one_line() -> None:
    def failure(timestamp: int, exitcode: int = -9, **fields: Any) -> SimpleNamespace:
        return SimpleNamespace(timestamp=timestamp, pid=5, exitcode=exitcode, **fields)

    first = failure(1, message="Signal 9\n(SIGKILL)")
    assert described({0: failure(2, message="later"), 1: first}) == (
        "rank 1 (pid 5) ended with exit code -9: Signal 9 (SIGKILL)")
    assert described({0: failure(1, -15, message="ended by its agent"), 1: first}).startswith("rank 1 ")
    assert len(described({0: failure(1, message="x" * 9999)})) < 600
    assert described({0: failure(1, message="")}) == "rank 0 (pid 5) ended with exit code -9"
