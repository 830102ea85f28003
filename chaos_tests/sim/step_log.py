"""The event log of the worlds of steps (``pipeline``, ``flow``): what the actor and the trainer of a real run write
into etcd, and the records of its steps, by the product's own code. The world goes on where it would else say that a
rule was broken, for the validators of real runs to see it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from chaos_tests.event_log import Event, Kind
from chaos_tests.sim.flow import ASYNC_LIMITS, AsyncWorld
from chaos_tests.sim.pipeline import LIMITS, PLAN, Recorder, World
from chaos_tests.sim.store import Log, ObservedEtcd, SimClient
from chaos_tests.sim.violation import RuleViolated
from elastic_rl.config import Config, Stream
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.dcs.catalog.reads import list_versions
from elastic_rl.dcs.catalog.writer import PendingCommit, StreamWriter, commit_together
from elastic_rl.errors import ConfigError, Fenced
from elastic_rl.etcd import fencing
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import DcsNode, Formation, GroupLease, ReplicaSets
from elastic_rl.etcd.transaction import Op
from elastic_rl.host import job_spec
from elastic_rl.pipeline.flow.group_flow import FlowLimits
from elastic_rl.pipeline.records.reporting import log_step, step_metrics
from elastic_rl.pipeline.records.run_events import PRODUCER
from elastic_rl.pipeline.records.run_log import JobStatusWriter, RunLog
from elastic_rl.pipeline.schedule import State, Train
from elastic_rl.pipeline.stages.term import ActorTerm, known_before
from elastic_rl.report import build
from elastic_rl.train import audit_of
from elastic_rl.trainer.progress import Progress

KEYS, GROUP, NODE, EPOCH = Keys("j"), "actor", "n0", 1
EVENT_S = 0.1
"""Seconds that a thing takes that happens in the world."""


class StepLog(Recorder):
    """What a run writes. etcd is never away for the log: the world lets nobody write while its own is."""

    def __init__(self, world: str, seed: int, limits: FlowLimits) -> None:
        self._now = 0.0
        self._limits, self._seed = limits, seed
        self.log = Log(world, seed, clock=lambda: self._now, steps=limits.steps, settings={"mode": "rl", "train": {
            "max_staleness": limits.max_staleness, "prompts_per_step": limits.groups_per_step,
            "schedule": "fully_async" if limits.beside_steps else "sync"}})
        self.model = ObservedEtcd(self.log)
        self.etcd = SimClient(self.model, lambda: self._now)
        self.records = list[dict[str, Any]]()
        """The records of steps.jsonl."""
        self._run_log = RunLog(cast(Any, SimpleNamespace(append=self._line)))
        self._terms = dict[int, JobStatusWriter]()
        self._streams = list[StreamWriter]()
        fencing.raise_epoch(self.etcd, KEYS, "driver")
        self.node = DcsNode(id=NODE, host="h", port=1, pid=1, arena_path="a", arena_bytes=1 << 20)
        self.etcd.put(KEYS.dcs_node(NODE), self.node.encode())
        self._lease = self.etcd.keepalive(0).id
        self._start_job(seed)

    def _start_job(self, seed: int) -> None:
        """What a start of the job does with the settings that it is given."""
        cfg, decided = Config(job=KEYS.job, seed=seed), job_spec.read(self.etcd, KEYS)
        with suppress(ConfigError):
            job_spec.require_same(cfg, decided)
            job_spec.record(self.etcd, KEYS, cfg, decided)

    def _line(self, line: bytes) -> None:
        record = json.loads(line)
        if record["kind"] == "step":
            self.records.append(record)
            self.log.write(Kind.STEP, **{name: value for name, value in record.items() if name not in ("at", "kind")})

    def happened(self) -> None:
        self._now += EVENT_S

    # -- the trainer ---------------------------------------------------------------------------------------------------
    def formed(self) -> None:
        fencing.write(self.etcd, KEYS, EPOCH, Op.put(KEYS.formation(GROUP), Formation(
            epoch=EPOCH, hosts=[], data_parallel=1).encode()))
        token = FencedWriter.of_formation(self.etcd, KEYS, EPOCH, GROUP, self.model.keys[KEYS.formation(GROUP)].version)
        self._streams = [StreamWriter(self.etcd, KEYS, stream, epoch=EPOCH, token=token)
                         for stream in (Stream.POLICY, Stream.TRAINER_STATE)]

    def published(self, progress: Progress) -> None:
        self._publish(self._streams[0], {"step": progress.step, "phase": progress.phase})

    def committed(self, progress: Progress, policy_version: int, branch: Branch) -> None:
        self._publish(self._streams[1], {**progress.to_json(), "policy_version": policy_version,
                                         "branch": branch.to_json()})

    def _publish(self, stream: StreamWriter, meta: Mapping[str, Any]) -> None:
        staged = stream.begin(owner="rank", lease=self._lease, meta=meta)
        commit_together([PendingCommit(stream, staged, f"m{staged.revision}", 1, ReplicaSets(parts=[[NODE]]),
                                       {NODE: self.node.incarnation})])

    # -- the actor -----------------------------------------------------------------------------------------------------
    def term_began(self, term: int) -> None:
        if self.etcd.get(KEYS.stream_head(Stream.POLICY)) is not None:  # before, it may decide on others
            self._start_job(self._seed + term)
        fencing.begin_term(self.etcd, KEYS, EPOCH, f"actor{term}")
        self._terms[term] = JobStatusWriter(
            self.etcd, KEYS, self._writer(term), steps=self._limits.steps, seed=self._seed, clock=lambda: self._now)

    def _writer(self, term: int) -> FencedWriter:
        return FencedWriter.of_term(self.etcd, KEYS, EPOCH, term)

    def leased(self, term: int, groups: IntervalSet) -> None:
        self._writer(term).write(Op.put(KEYS.group_lease(PRODUCER), GroupLease(
            producer=PRODUCER, epoch=EPOCH, term=term, groups=groups.to_json(), at=self._now).encode()))

    def resumed(self, term: int, state: State) -> None:
        """A step that a predecessor made and did not report is reported now, as ``TrainerStages`` does."""
        step = state.step if state.phase == "rl" else 0
        with suppress(Fenced):  # the actor is told so by its next command
            self._terms[term].resume(state.phase, step, policy_version=state.policy_version)
            found = ActorTerm.step_of_predecessor(
                cast(ActorTerm, SimpleNamespace(etcd=self.etcd, keys=KEYS)), state.cursor, step, state.policy_version)
            if found is not None:
                log_step(self._run_log, found[0], found[1], [], [], {})
                self._terms[term].write(state.phase, metrics=found[0], step=step, reward=found[0].reward)

    def cursor(self, effect: Train) -> Mapping[str, Any]:
        return known_before(self._metrics(effect), effect.taken.consumption.trained)

    def _metrics(self, effect: Train) -> Any:
        return step_metrics(effect.step, effect.taken.groups, policy_version=effect.policy_version, dropped={
            reason: len(groups) for reason, groups in effect.taken.consumption.dropped.items()})

    def trained(self, term: int, effect: Train, answer: Mapping[str, Any]) -> None:
        groups, version = effect.taken.groups, int(answer["policy_version"])
        metrics = self._metrics(effect).replace(policy_version=version)
        log_step(self._run_log, metrics, [g.ordinal for g in groups.groups],
                 sorted({v for s in groups.samples for v in s.versions}), [], answer)
        with suppress(Fenced):
            self._terms[term].write("rl", metrics=metrics, step=effect.step, policy_version=version,
                                    staleness=metrics.staleness)

    def finished(self, term: int) -> None:
        self._terms[term].write("finished")

    def end(self) -> list[Event]:
        """The log, with the report that a job leaves that has ended."""
        phase = self._terms[max(self._terms)].latest.phase if self._terms else ""
        report = build.build(
            self.records, job=KEYS.job, seed=self._seed, versions=list_versions(self.etcd, KEYS, Stream.POLICY),
            audit=audit_of(self.etcd, KEYS, self._limits.groups_per_step), status=phase) if phase == "finished" else {}
        return self.log.end(phase=phase, report=report, committed_steps=sorted(
            int(key.rpartition("/")[2]) for key in self.model.keys if key.startswith(KEYS.steps_prefix())))


def _played(world: World, log: StepLog) -> list[Event]:
    with suppress(RuleViolated):
        world.run()
    return log.end()


def steps(seed: int) -> list[Event]:
    """The log of a synchronous run."""
    log = StepLog("steps", seed, LIMITS)
    return _played(World(seed, PLAN, LIMITS, recorder=log), log)


def beside_steps(seed: int) -> list[Event]:
    """The log of a run whose groups are generated beside the steps."""
    limits = replace(ASYNC_LIMITS, max_staleness=seed % 4)
    log = StepLog("async", seed, limits)
    return _played(AsyncWorld(seed, limits, state_every=2 + seed % 3, deaths=seed % 2 * 6, recorder=log), log)
