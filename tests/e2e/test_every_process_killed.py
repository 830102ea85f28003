"""A whole run in which each process of the host is killed with -9, one kind after the other: what a kill costs is what
ran in the killed process, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from support.tiers import full
from support.waiting import wait_until
from support.whole_run import Job, assert_sound, whole_job

from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.event_kinds import TRAINER_GROUP_EVENTS
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import EngineState
from elastic_rl.faults.context import FaultContext, command
from elastic_rl.host import processes
from elastic_rl.host.compute_services import RAY_HEAD, RAY_WORKER, compute_services
from elastic_rl.host.local_cluster import AGENTS
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.report.build import Record, read_records
from elastic_rl.runtime.process import runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600), full(
    proved_in="tests/e2e/test_faults_at_once.py tests/integration/driver/test_compute_plane.py "
              "tests/integration/host/test_host_agent.py",
    why="every process of a run in turn, with what each kill may cost")]

STEPS = 300
"""Steps are short, and some go on while a part is away."""
APART_STEPS = 2
"""Steps between the recovery from a kill and the next one."""
RECOVERY_S = 900.0
SETTINGS = {"rollout.engines": 1, "train.steps": STEPS, "train.state_every_steps": 3, "train.prompts_per_step": 8,
            "train.group_size": 4, "train.updates_per_step": 1, "sft.max_steps": 0, "data.options.operand_below": 30,
            "trainer.tensor_parallel": 1, "trainer.data_parallel": 1, "coordinator.replicas": 2}

DURABLE = frozenset({"etcd", "coordinators", "DCS node", "host agent"})
ON_RAY = frozenset({"engines", "ranks", "trainer agent", "roles"})
OF_HEAD, OF_WORKER = frozenset({RAY_HEAD, "gcs_server", "raylet of the head"}), frozenset({RAY_WORKER, "raylet"})
EVERYTHING = DURABLE | ON_RAY | OF_HEAD | OF_WORKER | {"router", "driver", "run"}
ROLES = ("actor", "rollout", "advantages")
TERMINAL = "terminal"
T = TypeVar("T")
Parts = Mapping[str, frozenset[int]]
"""The processes of each part."""


@dataclass(frozen=True)
class Kill:
    """What a kill of all processes of a part may cost."""

    part: str
    costs: Set[str]
    """The parts whose processes may be others afterwards; all others keep theirs."""
    events: Mapping[str, int] = field(default_factory=dict)
    """How often each kind of event is written for it."""
    redoes_steps: bool = False
    """Whether steps since the last save may be done again."""


KILLS = (
    Kill("run", {"run", "driver"}, {event_kinds.RUN_RESTARTED.name: 1}),
    Kill(TERMINAL, set()),
    Kill("host agent", {"host agent"}),
    Kill("driver", {"driver"}, {event_kinds.DRIVER_RESTARTED.name: 1}),
    Kill("router", {"router"}, {event_kinds.ROUTER_RESTARTED.name: 1}),
    Kill("trainer agent", {"trainer agent", "ranks"}, {TRAINER_GROUP_EVENTS["trainer"].agent_ended.name: 1},
         redoes_steps=True),
    Kill("gcs_server", OF_HEAD),
    Kill("raylet of the head", OF_HEAD),
    # The driver that is connected to the worker ends with it, and the next one replaces what ran there.
    Kill("raylet", OF_WORKER | ON_RAY | {"driver"}, {event_kinds.DRIVER_RESTARTED.name: 1,
                                                     event_kinds.ENGINE_REPLACED.name: 1}, redoes_steps=True),
    Kill("etcd", {"etcd"}, {event_kinds.ETCD_RESTARTED.name: 1}),
    Kill("coordinators", {"coordinators"}, {event_kinds.COORDINATOR_RESTARTED.name: 2}),
    Kill("DCS node", {"DCS node"}, {event_kinds.DCS_RESTARTED.name: 1}),
)
COUNTED = frozenset(kind for kill in KILLS for kind in kill.events) | {
    event_kinds.RUN_GLOBAL_RESTART.name, event_kinds.RUN_CRASH_LOOP.name, event_kinds.ENGINE_REPLACED.name}
"""The kinds of events whose number is compared."""


@dataclass(frozen=True)
class Outcome:
    """What a kill was followed by."""

    kill: Kill
    at: float
    before: Parts
    after: Parts
    epochs: int
    rewinds: int

    def problems(self) -> list[str]:
        changed = {part for part in EVERYTHING if self.before[part] != self.after[part]}
        found = [f"{part} was {set(self.before[part])} and is {set(self.after[part])}"
                 for part in sorted(changed - self.kill.costs)]
        if self.epochs:
            found.append(f"{self.epochs} epochs were begun")
        if self.rewinds and not self.kill.redoes_steps:
            found.append(f"steps were done again, {self.rewinds} times")
        return [f"{self.kill.part} killed: {text}" for text in found]


class KilledRun:
    """A run, as the records of its host and etcd show it."""

    def __init__(self, job: Job, etcd: EtcdClient) -> None:
        self.job, self.cfg, self.etcd, self.keys = job, job.cluster.cfg, etcd, Keys(job.cfg.job)
        info = ClusterInfo.load(job.cluster.paths.info)
        assert info is not None
        self.context = FaultContext(self.cfg, etcd, self.keys, AdminClient(info))
        self.paths = JobPaths.of(self.cfg)
        self.terminal: subprocess.Popen[bytes] | None = None
        self.seen: Parts = {}
        """The parts as they were last seen."""

    def start(self) -> None:
        """Submits the run from a terminal that follows it."""
        self.terminal = subprocess.Popen(
            [sys.executable, "-m", "elastic_rl.cli.main", "train", f"--job={self.cfg.job}",
             f"--run_dir={self.cfg.run_dir}"], start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def attach(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "elastic_rl.cli.main", "attach", f"--job={self.cfg.job}",
             f"--run_dir={self.cfg.run_dir}"], capture_output=True, text=True, check=False)

    def records(self, kind: str) -> list[Record]:
        return [record for record in read_records(self.paths.steps) if record["kind"] == kind]

    def parts(self) -> Parts:
        """The processes that live, by part."""
        services = {r.name: r.pid for r in self.job.cluster.services.running()}
        compute = {r.name: r.pid for r in compute_services(self.paths).running()}
        head, worker = compute.get(RAY_HEAD, 0), compute.get(RAY_WORKER, 0)
        ranks = alive(m.pid for m in self.context.trainer_ranks())
        return {
            "etcd": alive([services.get("etcd-0", 0)]),
            "coordinators": alive(pid for name, pid in services.items() if name.startswith("coordinator-")),
            "DCS node": alive([services.get(self.job.cluster.node, 0)]),
            "host agent": alive(r.pid for r in self.job.cluster.agents.running()),
            "run": alive([self.job.cluster.run.pid]),
            "driver": alive(m.pid for m in self.context.members("driver")),
            "router": alive([self.context.router_pid()]),
            RAY_HEAD: alive([head]), "gcs_server": child(head, "gcs_server"),
            "raylet of the head": child(head, "raylet"),
            RAY_WORKER: alive([worker]), "raylet": child(worker, "raylet"),
            "engines": alive(e.pid for e in self.context.engines() if e.state is EngineState.READY),
            "ranks": ranks, "trainer agent": frozenset(map(agent_of, ranks)),
            "roles": alive(m.pid for role in ROLES for m in self.context.members(role))}

    def works(self) -> Parts | None:
        """The parts, when each of them has all its processes."""
        self.seen = found = self.parts()
        whole = {part: 1 for part in found} | {
            "coordinators": self.cfg.coordinator.replicas, "host agent": len(AGENTS), "roles": len(ROLES),
            "engines": self.cfg.rollout.engines, "ranks": self.cfg.trainer.ranks}
        return found if all(len(found[part]) == number for part, number in whole.items()) else None

    def settled(self, what: str) -> Parts:
        """The parts, once the run has all of them and has done further steps since."""
        self.wait(self.works, what=what)
        first = self.context.step() + APART_STEPS
        self.wait(lambda: self.context.step() >= first, what=f"two steps of {what}")
        return self.wait(self.works, what=what)

    def wait(self, check: Callable[[], T | None], *, what: str) -> T:
        """As ``wait_until``, until the run ends."""
        return wait_until(check, what=what, timeout_s=RECOVERY_S, poll_s=0.3,
                          alive=lambda: not self.context.finished())

    def kill(self, kill: Kill, before: Parts) -> Outcome:
        """Kills all processes of a part at once; returns when the run works as before."""
        epoch, rewinds, at = fencing.current_epoch(self.etcd, self.keys), len(self.records("rewind")), time.time()
        if kill.part == TERMINAL:
            assert self.terminal is not None and self.terminal.poll() is None, "the terminal did not follow the run"
            os.killpg(self.terminal.pid, signal.SIGKILL)
            self.terminal.wait()
        else:
            for pid in before[kill.part]:
                os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not alive(before[kill.part]), what=f"the end of {kill.part}")
        after = self.settled(f"the run after the kill of {kill.part}")
        self.wait(lambda: not Counter(kill.events) - self.counted(at), what=f"the events {dict(kill.events)}")
        outcome = Outcome(kill, at, before, after, fencing.current_epoch(self.etcd, self.keys) - epoch,
                          len(self.records("rewind")) - rewinds)
        print(f"{time.time() - at:.0f} s, step {self.context.step()}: {kill.part}, {outcome.epochs} epochs, "
              f"{outcome.rewinds} rewinds; changed: {sorted(p for p in after if after[p] != before[p])}", flush=True)
        return outcome

    def orphans(self) -> list[str]:
        """Processes of the run that belong to none of its services any more."""
        cluster = self.job.cluster
        services = [r.pid for files in (cluster.services, cluster.agents, cluster.singletons,
                                             compute_services(self.paths))
                    for r in files.running()]
        found = [*processes.marked_outside(services, str(self.paths.private)),
                 *processes.marked_outside(services, str(cluster.dir), OWNER_ENV)]
        return [f"{pid} ({command(psutil.Process(pid))})" for pid in found if alive([pid])]

    def counted(self, since: float, until: float = float("inf")) -> Counter[str]:
        """How often each kind of event was written in a time, in unix seconds."""
        return Counter(e.kind for e in self.job.events() if e.kind in COUNTED and since <= e.at < until)


def alive(pids: Iterable[int]) -> frozenset[int]:
    """Those of these processes that run; 0 is none."""
    found = set()
    for pid in filter(None, pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            if runs(psutil.Process(pid)):
                found.add(pid)
    return frozenset(found)


def child(pid: int, program: str) -> frozenset[int]:
    """The children of a process that run a program."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return alive(c.pid for c in psutil.Process(pid).children() if c.name() == program) if pid else frozenset()
    return frozenset()


def agent_of(rank: int) -> int:
    """The torch-elastic agent of a rank; 0 for a rank that has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        above = psutil.Process(rank).parents()
        return next((p.pid for p in above if "elastic_rl.trainer.group.agent" in command(p)), 0)
    return 0


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[KilledRun]:
    with whole_job(tmp_path, SETTINGS) as job:
        info = job.cluster.up()
        with EtcdClient.from_config(job.cfg.etcd, info.etcd_endpoints, retry_budget_s=120.0) as etcd:
            run = KilledRun(job, etcd)
            try:
                yield run
            finally:
                print(run.seen)  # of a run that does not recover, what it lacks
                if run.terminal is not None and run.terminal.poll() is None:
                    run.terminal.kill()
                    run.terminal.wait()


def test_a_kill_of_any_process_costs_what_ran_in_it_and_no_step_is_lost(killed: KilledRun) -> None:
    run, outcomes, problems = killed, [], []
    run.start()
    before = run.settled("the run")
    for kill in KILLS:
        outcomes.append(outcome := run.kill(kill, before))
        problems += [*outcome.problems(), *(f"{kill.part} killed: {text} is left" for text in run.orphans())]
        before = outcome.after
    attached = run.attach()
    assert attached.returncode == 0, attached.stderr
    assert f"{run.cfg.job}: finished" in attached.stdout
    for outcome, end in zip(outcomes, [*(o.at for o in outcomes[1:]), float("inf")], strict=True):
        found = dict(run.counted(outcome.at, end))
        if found != outcome.kill.events:  # each fault once
            problems.append(f"{outcome.kill.part} killed: events {found}, not {dict(outcome.kill.events)}")
    assert not problems, "\n".join(problems)
    assert_sound(run.job, json.loads(run.paths.report.read_text()), STEPS)
    run.job.cluster.down()
    assert run.job.leftovers() == []
