"""Runs on several hosts of this machine: their settings, which the tests of such runs have too, and what is read of
them. They fit a machine with two cores and 8 GiB."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Self

from elastic_rl import config
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Options
from elastic_rl.bench.recovery import trials
from elastic_rl.bench.recovery.trials import Trial, holds
from elastic_rl.bench.suite import why_of
from elastic_rl.config.groups import ACTOR
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.errors import DeadlineExceeded, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import HostPhase
from elastic_rl.etcd.decoding import readable, readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Engine, EngineState, Formation, JobStatus, Member
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.test_hosts.cluster_hosts import ClusterHosts
from elastic_rl.runtime.waiting import wait_until

STEPS = 100_000
"""Steps of a run: it is stopped before."""
ONE_RANK = ("--trainer.tensor_parallel=1", "--trainer.data_parallel=1")
SFT_RUN = ("--mode=sft", "--seed=3", f"--sft.max_steps={STEPS}", "--sft.eval_every_steps=10", "--sft.batch_size=192",
           "--sft.lr=2e-4", "--sft.state_every_steps=5", "--sft.eval_problems=64", "--trainer.tensor_parallel=1",
           "--data.options.operand_below=30")
"""Supervised steps of less than a second, with a state every few of them."""
RL_RUN = (f"--train.steps={STEPS}", "--train.state_every_steps=1", "--train.prompts_per_step=8", "--train.group_size=4",
          "--train.updates_per_step=1", "--sft.max_steps=0", "--data.options.operand_below=30",
          "--train.eval_every_steps=1000", *ONE_RANK)
"""Steps of a few seconds, with a state each, and one rank."""


def over_hosts(replicas: int) -> tuple[str, ...]:
    """Settings of a trainer group with a rank on each of so many hosts, which goes on with one."""
    return (f"--trainer.data_parallel={replicas}", "--trainer.min_data_parallel=1", "--trainer.ranks_per_host=1")


class RunRecords:
    """What etcd has of a run on several hosts."""

    def __init__(self, etcd: EtcdClient, job: str) -> None:
        self._etcd, self._keys = etcd, Keys(job)

    def step(self) -> int:
        """RL steps that are done."""
        return (readable_one(self._etcd.get(self._keys.job_status()), JobStatus) or JobStatus(phase="", step=0)).step

    def members(self, role: str) -> list[Member]:
        return members(self._etcd, self._keys, role)

    def ranks(self) -> list[Member]:
        """The ranks of the trainer group."""
        return self.members(ACTOR.name)

    def trainer_step(self) -> int:
        """The step that the ranks have done last; 0 while there are none."""
        return max((rank.step for rank in self.ranks()), default=0)

    def trainer_hosts(self) -> list[str]:
        """Names of the hosts that the trainer group is on."""
        found = readable_one(self._etcd.get(self._keys.formation(ACTOR.name)), Formation)
        return sorted(found.ranks()) if found else []

    def engines(self) -> dict[str, str]:
        """Id of each engine that serves the newest version that any serves, with the address of its host."""
        found = [e for e, _ in readable(self._etcd.range(self._keys.engines_prefix())[0], Engine)
                 if e.state is EngineState.READY]
        newest = max((e.version for e in found), default=0)
        return {e.id: e.host for e in found if e.version == newest}

    def epoch(self) -> int:
        return fencing.current_epoch(self._etcd, self._keys)


# -- the bench's own runs ---------------------------------------------------------------------------------------------
SETTLE_STEPS = 2
"""Steps between the recovery from a change and the next one, of which one may have been under way."""
CHANGE_S = 600.0
"""Longest wait for the consequence of a change."""
_CALL_S, _API_S = 1.0, 10.0
"""Time for one answer of etcd, and for one of the API, whose coordinator may be slow beside what competes with it."""
_POLL_S = 0.05


class HostsTestbed:
    """Makes clusters of several hosts, with a run each, that end with the block, and with this process."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @classmethod
    @contextlib.contextmanager
    def start(cls, options: Options) -> Iterator[Self]:
        yield cls(options)

    @property
    def trials(self) -> int:
        return 1 if self.options.quick else 3

    @contextlib.contextmanager
    def run(self, hosts: int, settings: Sequence[str], *, cordoned: Sequence[str] = ()) -> Iterator[HostRun]:
        """A run on so many hosts; none of it is on those that are ``cordoned`` from the beginning. Raises
        PreflightFailed where this machine cannot have them."""
        folder = Path(tempfile.mkdtemp(prefix="erl-bench-hosts-", dir="/var/tmp"))  # hosts have a /tmp of their own
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            cfg = config.load(None, [
                "--cluster=bench", f"--job=bench-{secrets.token_hex(3)}", f"--run_dir={folder}",
                "--coordinator.replicas=1", *settings])
            cluster = Cluster(cfg, say=self.options.say)
            made = ClusterHosts(cluster, self.options.say, outlive=False)
            stack.callback(_end, made)
            self.options.say(f"starting {hosts} hosts")
            info = made.up(hosts)
            api = AdminClient(info, retry_budget_s=_API_S)
            for name in cordoned:
                api.change_host(name, {"cordoned": True})
                wait_until(lambda name=name: api.host(name)["phase"] == HostPhase.CORDONED,  # type: ignore[misc]
                           timeout_s=CHANGE_S, what=f"the cordon of {name}")
            self.options.say("starting the run")
            made.submit()
            etcd = stack.enter_context(cluster.etcd(info, retry_budget_s=_CALL_S))
            yield HostRun(cfg.job, made, RunRecords(etcd, cfg.job), api, self.options.say)


def _end(hosts: ClusterHosts) -> None:
    """Ends hosts whose state nobody needs."""
    if hosts.record is not None:
        for host in hosts.all():
            hosts.power_off(host.name)
        hosts.down()


class HostRun:
    """A run on several hosts, and what an operator, or a fault, does to them."""

    def __init__(self, job: str, hosts: ClusterHosts, records: RunRecords, api: AdminClient,
                 say: Callable[[str], None]) -> None:
        self.job, self.hosts, self.records, self.api, self.say = job, hosts, records, api, say
        self.addresses = {host.name: host.address for host in hosts.all()}
        self.names = list(self.addresses)

    # -- reading ------------------------------------------------------------------------------------------------------
    def phase(self, host: str) -> str:
        return str(self.api.host(host)["phase"])

    def has_services(self, host: str, prefix: str) -> bool:
        """Whether a service runs on the host whose name begins so."""
        return any(name.startswith(prefix) and service["state"] == "running"
                   for name, service in self.api.host(host)["services"].items())

    def driver_host(self) -> str:
        """The host that the run is assigned to; empty while there is none."""
        return next((str(host["id"]) for host in self.api.hosts() if host["assignments"]), "")

    def engines_on(self, host: str) -> int:
        """Number of engines there that serve the newest version."""
        return [*self.records.engines().values()].count(self.addresses[host])

    # -- waiting ------------------------------------------------------------------------------------------------------
    def await_that(self, check: Callable[[], object], what: str) -> None:
        wait_until(lambda: holds(check), timeout_s=CHANGE_S, what=what)

    def await_steps(self, step: Callable[[], int]) -> None:
        """Returns once the run has done further steps. ``step``: the newest one."""
        first = 0

        def done() -> bool:
            nonlocal first
            newest = step()
            if newest and not first:  # before, the step is not known
                first = newest + SETTLE_STEPS
            return bool(first) and newest >= first

        self.await_that(done, "further steps of the run")

    def watch(self, step: Callable[[], int], marks: Mapping[str, Callable[[], object]], needed: str) -> Watched:
        """Reads the newest step again and again, until ``SETTLE_STEPS`` further ones are done after the mark
        ``needed``. Raises DeadlineExceeded."""
        watched, end, goal = Watched(), time.monotonic() + CHANGE_S, 0
        while not goal or watched.newest < goal:
            if time.monotonic() > end:
                missing = [name for name in marks if name not in watched.marks] or ["further steps"]
                raise DeadlineExceeded(f"{CHANGE_S:g} s after a change this did not hold: {', '.join(missing)}")
            with contextlib.suppress(EtcdUnavailable):
                watched.add(time.monotonic(), step())
            for name, check in marks.items():
                if name not in watched.marks and holds(check):
                    watched.marks[name] = time.monotonic()
            if not goal and needed in watched.marks:
                goal = watched.newest + SETTLE_STEPS
            time.sleep(_POLL_S)
        return watched


# -- arithmetic, pure -------------------------------------------------------------------------------------------------
NEXT_STEP = "the next new step is done"
REDONE = "steps redone"
_REDONE_ROW = "… steps that were done once more"


@dataclass
class Watched:
    """Which steps were done when, by any clock that never goes back."""

    newest: int = 0
    redone: int = 0
    """Steps that were done once more, since the state that was resumed from is older."""
    marks: dict[str, float] = field(default_factory=dict)
    """When what was first seen to hold."""
    _new: list[float] = field(default_factory=list)
    """When each step was seen that was newer than all before; the first of them when the watch began."""
    _last: int = 0

    def add(self, now: float, step: int) -> None:
        """``step``: the newest one that the run, as it is now, has done; 0 while that is not known."""
        if not step:
            return
        self.redone += max(0, self._last - step)
        if step > self.newest:
            self.newest = step
            self._new.append(now)
        self._last = step

    def trial(self) -> Trial:
        """The longest time without a new step, and when in it the marks were seen."""
        began, ended = max(pairwise(self._new), key=lambda pair: pair[1] - pair[0])
        return {**{name: min(max(at - began, 0.0), ended - began) for name, at in self.marks.items()},
                NEXT_STEP: ended - began, REDONE: float(self.redone)}


@dataclass(frozen=True)
class Kind:
    """What one row of a run on several hosts measures."""

    what: str
    goal: float
    end: str
    stages: tuple[str, ...]
    begin: str
    redoes: bool = False
    """Whether steps may be done once more, which the row's ``-redone`` counts."""


@dataclass(frozen=True)
class HostRows:
    """The rows that one run on several hosts measures in turn."""

    kinds: Mapping[str, Kind]

    def chosen(self, options: Options) -> list[str]:
        """Names of the rows that are to be measured."""
        return [name for name in self.kinds if options.selects(name, f"{name}-max", f"{name}-redone")]

    def of(self, name: str, found: Sequence[Trial]) -> list[Row]:
        """The rows of one kind from its trials. Pure."""
        kind = self.kinds[name]
        timed = [{part: value for part, value in trial.items() if part != REDONE} for trial in found]
        measured = trials.rows(name, kind.what, timed, (kind.end,), goal=kind.goal, stages=kind.stages,
                               begin=kind.begin)
        if kind.redoes:
            measured.append(Row.of(f"{name}-redone", _REDONE_ROW, [trial[REDONE] for trial in found], "steps"))
        return measured

    def measured(self, options: Options, rounds: Iterable[tuple[str, Trial]]) -> Iterator[Row]:
        """The rows of the trials that ``rounds`` gives, until it ends or an error of the project ends it: what was
        measured before counts."""
        found, why = {name: list[Trial]() for name in self.kinds}, ""
        try:
            for name, trial in rounds:
                found[name].append(trial)
                options.say(f"{name}: " + ", ".join(f"{part} {value:.1f}" for part, value in trial.items()))
        except ElasticRLError as e:
            why = why_of(e)
        for name in self.chosen(options):
            if found[name] or not why:
                yield from self.of(name, found[name])
                continue
            yield from trials.unmeasured(name, self.kinds[name].what, why, goal=self.kinds[name].goal)
            if self.kinds[name].redoes:
                yield Row.unmeasured(f"{name}-redone", _REDONE_ROW, why, unit="steps")
