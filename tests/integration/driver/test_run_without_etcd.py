"""A run whose etcd goes away: it waits, its view is refreshed all the time, and it has its report in the end."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.cluster_files import make_secret
from support.etcd_server import EtcdServers
from support.tiers import parametrize
from support.waiting import wait_until

from elastic_rl import config, train
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Epoch, JobStatus
from elastic_rl.host.paths import JobPaths

_STUB = Path(__file__).with_name("stub_driver.py")
_STEPS = [{"kind": "step", "at": 1.0 + n, "step": n, "reward_mean": 0.5, "samples": 8, "policy_version": n + 1,
           "groups": list(range((n - 1) * 4, n * 4)), "seconds": {"total": 1.0}} for n in (1, 2)]


class Run:
    """``train.run`` in a thread, with a stub in the driver's place, on an etcd of its own."""

    def __init__(self, folder: Path, keys: Keys) -> None:
        self.keys, self.servers = keys, EtcdServers(folder / "etcd", 1)
        self.servers.start()
        self.cfg = config.parse({"job": keys.job, "run_dir": str(folder), "train": {"prompts_per_step": 4},
                                 "etcd": {"call_timeout_s": 0.5, "retry_budget_s": 1.0}})
        make_secret(self.cfg)
        self.info = ClusterInfo(keys.job, self.servers.endpoints, [], "")
        self.ticks, self.interrupt = 0, False
        self.ended: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        with self.servers.connect() as etcd:
            wait_until(lambda: self._driver_holds(etcd), what="the driver")
        JobPaths.of(self.cfg).steps.write_text("".join(json.dumps(r) + "\n" for r in _STEPS))

    def _driver_holds(self, etcd: EtcdClient) -> bool:
        found = etcd.get(self.keys.epoch())
        return found is not None and Epoch.decode(found.value).holder.startswith("driver-")

    def _run(self) -> None:
        try:
            self.ended = train.run(self.cfg, self.info, on_tick=self._tick)
        except BaseException as e:
            self.ended = e

    def _tick(self, waiting: Mapping[str, str]) -> None:
        self.ticks += 1
        if self.interrupt:
            raise KeyboardInterrupt  # as Ctrl-C does in the thread that runs it

    def await_ticks(self, number: int) -> None:
        goal = self.ticks + number
        wait_until(lambda: self.ticks >= goal, what=f"{number} refreshes of the view")

    def finish(self) -> None:
        with self.servers.connect() as etcd:
            etcd.put(self.keys.job_status(), JobStatus(phase="finished", step=2, steps=150).encode())

    def end(self) -> Any:
        self._thread.join(120)
        assert self.ended is not None, "the run has not ended"
        return self.ended

    def report(self) -> dict[str, Any]:
        return json.loads(JobPaths.of(self.cfg).report.read_text())

    def close(self) -> None:
        self.interrupt = True
        if self._thread.ident is not None:
            self._thread.join(60)
        self.servers.close()


@pytest.fixture
def run(tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(train.processes, "python",
                        lambda module, *args: [sys.executable, str(_STUB), "hangs-until-finished", *args])
    out = Run(tmp_path, keys)
    yield out
    out.close()


def test_run_goes_on_after_an_outage_and_its_view_is_refreshed_meanwhile(run: Run) -> None:
    run.start()
    run.servers.kill(0)
    run.await_ticks(12)
    assert run.ended is None
    run.servers.restart(0)
    run.finish()
    assert run.end() == 0
    assert (run.report()["status"], run.report()["steps"], run.report()["note"]) == ("finished", 2, "")


def test_run_that_is_interrupted_without_etcd_has_a_report_that_says_so(run: Run) -> None:
    run.start()
    run.servers.kill(0)
    run.await_ticks(2)
    run.interrupt = True
    assert isinstance(run.end(), KeyboardInterrupt)
    report = run.report()
    assert report["status"] == "interrupted" and report["note"].startswith("Made without etcd")
    assert (report["steps"], report["groups_lost"], report["versions_committed"]) == (2, 0, 2)
    assert "Made without etcd" in JobPaths.of(run.cfg).report_page.read_text()


@parametrize(("code", "status"), [(0, "finished"), (1, "failed")],
             proved_in="tests/integration/driver/test_run_without_etcd.py",
             why="each further end of a run")
def test_report_of_a_run_that_ended_is_written_without_etcd(run: Run, code: int, status: str) -> None:
    ctx = train.prepare(run.cfg, run.info)
    JobPaths.of(run.cfg).steps.write_text("".join(json.dumps(r) + "\n" for r in _STEPS))
    run.servers.kill(0)
    train.write_report(ctx, code, began_at=0.0, ended_at=3.0)
    assert run.report()["status"] == status and "Made without etcd" in run.report()["note"]


def test_group_without_a_record_is_lost_in_a_report_without_etcd(run: Run) -> None:
    ctx = train.prepare(run.cfg, run.info)
    JobPaths.of(run.cfg).steps.write_text(json.dumps(_STEPS[1]) + "\n")
    run.servers.kill(0)
    train.write_report(ctx, 0, began_at=0.0, ended_at=3.0)
    assert run.report()["groups_lost"] == 4
