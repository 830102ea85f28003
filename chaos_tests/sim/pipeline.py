"""A world in which the real schedule, flow, ledger and writer gate run on a virtual clock, and everything else fails.

The world has an etcd (which goes away), a trainer group (which dies at any point and comes back at its last committed
state, as another group), a network (which delays, duplicates and loses commands and answers), engines (which go away),
and actors: one that is the newest, and predecessors that do not know yet that they were replaced. A step of the world
is one thing that happens, chosen at random.

What is checked does not come from the code under test: the world writes down every update that was executed, and cuts
that list when the trainer goes back to an earlier state.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from chaos_tests.sim.violation import RuleViolated
from elastic_rl.data.branch import Branch
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import audit
from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.errors import Conflict, Fenced, StaleSamples, TrainerFailed
from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.flow.group_flow import FlowLimits, GroupFlow
from elastic_rl.pipeline.schedule import Lost, RunPlan, State, StopAsked, TakenStep
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.service.commands import (
    BatchCommand,
    Check,
    Command,
    ForwardReference,
    Save,
    Update,
    WriterGate,
    after_begin_rl,
    after_update,
)

PLAN = RunPlan(mode="rl", steps=7, groups_per_step=3, eval_every_steps=3, stop_eval_accuracy=None,
               sft_max_steps=4, sft_target=0.9, sft_eval_far=2, sft_eval_near=1)
LIMITS = FlowLimits(PLAN.steps, PLAN.groups_per_step, max_staleness=0, max_dropped_groups=4, beside_steps=False)
KINDS = frozenset({
    "actor beside another", "actor fenced", "actor killed", "answer lost", "command answered from memory",
    "command delayed", "command lost", "command refused: conflict", "command refused: fenced", "command repeated",
    "command sent twice", "effect Finish", "effect Resume", "effect Save", "effect SftEvaluate", "effect SftUpdate",
    "engines away", "etcd away", "late command", "late command to another group",
    "lost: the group re-formed", "rank died in a step", "results forgotten", "state committed", "state not committed",
    "trainer killed", "trainer killed before its first state", "updates undone", "waited for engines",
    "waited for etcd"})
"""What can happen in each of these worlds."""
RL_KINDS = KINDS | {"effect BeginRl", "effect Evaluate", "effect Take", "effect Train",
                    "lost: the step does not follow", "publish without etcd", "trainer killed while it publishes"}
MAX_EVENTS = 20_000


@dataclass
class Executed:
    """An update as the world saw it."""

    phase: str
    step: int
    trained: tuple[int, ...]
    dropped: tuple[int, ...]
    oldest_version: int
    version_before: int
    id: int = 0


@dataclass
class Committed:
    progress: Progress
    policy_version: int
    branch: Branch
    lineage: int
    """Length of the list of executed updates that made it."""


Weights = tuple[int, ...]
"""The updates that made them, by ids of the world."""


@dataclass
class Trainer:
    """One formation of the group."""

    group: int
    progress: Progress
    policy_version: int
    gate: WriterGate
    queue: list[Command] = field(default_factory=list)
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    publishing: Command | None = None
    """A step that is trained, and whose version has no number yet."""
    logprob_diff_max: float = 0.0
    """The difference between its log-probs of the last step's samples and those of the engines, which say that they
    have the same weights: 0.0 where that is so."""
    weights_version: int = 0
    """The version as which the weights that there are now were first published."""
    branch: Branch = Branch()
    shown: tuple[Progress, int, Branch] = (Progress(), 0, Branch())
    """Progress, policy version and branch as its status has them: they always belong together."""

    def show(self) -> None:
        if self.publishing is None:
            self.shown = (self.progress, self.policy_version, self.branch)


@dataclass
class Actor:
    term: int
    flow: GroupFlow
    effects: Generator[schedule.Effect, Any, None]
    queue: dict[int, Group] = field(default_factory=dict)
    """Groups that were generated for steps that are not made."""
    doing: Iterator[None] = iter(())
    done: bool = False
    stops: bool = False
    """Whether it was told of the stop that is asked for, and is to end."""
    waiting_for: str = ""


class Recorder:
    """Is told what happens; this one keeps nothing. ``step_log`` has the one that writes a log."""

    def happened(self) -> None:
        """One thing has happened in the world."""

    def formed(self) -> None:
        """The trainer group has formed again."""

    def published(self, progress: Progress) -> None:
        """The weights of the trainer have got the next number."""

    def committed(self, progress: Progress, policy_version: int, branch: Branch) -> None:
        """The state of the trainer is committed."""

    def term_began(self, term: int) -> None:
        """An actor has taken the job over."""

    def leased(self, term: int, groups: IntervalSet) -> None:
        """The actor of a term works on these groups."""

    def resumed(self, term: int, state: State) -> None:
        """An actor has read where the trainer is."""

    def cursor(self, effect: schedule.Train) -> Mapping[str, Any]:
        """What the cursor of a step has beside that of the schedule."""
        return {}

    def trained(self, term: int, effect: schedule.Train, answer: Mapping[str, Any]) -> None:
        """The actor of a term knows that a step was made. ``answer``: the trainer's."""

    def finished(self, term: int) -> None:
        """The run has made its last step."""


class World:
    """``seed`` decides everything. ``asks_reference``: the actor asks for the reference policy's log-probs of each
    step's batch before it trains. ``lies``: how often those who generate say a wrong version of a sample (0 to 1).
    ``trusts_trainer``: whether the actor may leave it to the trainer to refuse samples that it knows to be stale.
    ``poison``: groups that the trainer cannot compute with. ``stops``: how often the operator stops the run, which is
    then resumed: everything of it has ended meanwhile. ``state_every``: RL steps after which the trainer's state is
    committed, so that those since are undone by its loss. ``deaths``: how often the trainer dies beside what else
    fails. ``recorder``: is told what happens; then others judge it, and the world goes on where a rule is broken."""

    def __init__(self, seed: int, plan: RunPlan = PLAN, limits: FlowLimits = LIMITS, *, asks_reference: bool = False,
                 lies: float = 0.0, trusts_trainer: bool = False, poison: Collection[int] = (), stops: int = 0,
                 state_every: int = 2, deaths: int = 0, recorder: Recorder | None = None) -> None:
        self.counts: Counter[str] = Counter()
        """How often each of ``KINDS`` has happened."""
        self.lies, self.trusts_trainer, self.refusals = lies, trusts_trainer, 0
        self.poison, self.refused, self.state_every = poison, 0, state_every
        self.deaths_left = deaths
        self.recorder, self.judges = recorder or Recorder(), recorder is None
        self.random, self.plan, self.limits, self.asks_reference = random.Random(seed), plan, limits, asks_reference
        self.reference_passes = 0
        self.forgets = random.Random(f"forgets {seed}")
        self.ids = itertools.count(1)
        self.term = 0
        self.etcd_up = self.engines_up = True
        self.executed: list[Executed] = []
        self.committed: list[Committed] = []
        self.version = self.served = 0
        self.weights_of: dict[int, Weights] = {}
        """The weights of each version."""
        self.groups = self.undone = 0
        """Groups that were formed, and updates that are to be made again since one of them was lost."""
        self.network: list[tuple[int, Command]] = []
        self.trainer = self.form_group()
        self.actors: list[Actor] = []
        self.finished = self.stop_asked = False
        self.stops_left = stops
        self.stopped_at: list[tuple[int | None, Progress]] = []
        """Step that each stop named, and what the trainer had then."""
        self.faults_left = self.random.randint(0, 14)
        self.waits_shown: Counter[str] = Counter()
        self.resumes = 0
        """How often an actor read the committed state."""

    # -- the trainer ------------------------------------------------------------------------------------------------
    def form_group(self) -> Trainer:
        """A new group, at the last committed state."""
        self.groups += 1
        if self.committed:
            last = self.committed[-1]
            self.counts["updates undone"] += len(self.executed) - last.lineage
            self.undone += len(self.executed) - last.lineage
            del self.executed[last.lineage:]
            progress = Progress.from_json(last.progress.to_json())  # as it is stored
        else:
            self.counts["updates undone"] += len(self.executed)
            self.undone += len(self.executed)
            self.executed.clear()
            progress = Progress()
        formed = Trainer(self.groups, progress, self.version, WriterGate(1, str(self.groups)),
                         branch=last.branch.restored(last.policy_version) if self.committed else Branch())
        self.recorder.formed()
        if progress.phase == "rl":
            self.number(formed)  # a new number for the old weights
        formed.show()
        return formed

    def weights(self) -> Weights:
        """The weights that the trainer has: the RL steps that it has executed."""
        return tuple(e.id for e in self.executed if e.phase == "rl")

    def number(self, trainer: Trainer) -> None:
        """Its weights are published."""
        self.version += 1
        self.weights_of[self.version] = self.weights()
        trainer.policy_version, trainer.branch = self.version, trainer.branch.published(self.version)
        trainer.weights_version = self.version
        self.recorder.published(trainer.progress)

    def execute_next(self) -> None:
        trainer = self.trainer
        if trainer.publishing is not None:
            self.publish(trainer, trainer.publishing)
            return
        if not trainer.queue:
            return
        command = trainer.queue.pop(0)
        if self.etcd_up:
            trainer.gate.term = max(trainer.gate.term, self.term)
        try:
            earlier = trainer.gate.admit(command, trainer.progress, StalenessRule(
                trainer.weights_version, self.limits.max_staleness, trainer.branch, trainer.policy_version))
        except StaleSamples as e:
            self.refuse(trainer, command, e)
            return
        except (Fenced, Conflict, TrainerFailed) as e:
            error = "fenced" if isinstance(e, Fenced) else "conflict"
            self.counts[f"command refused: {error}"] += 1
            self.answer(command, {"error": error})
            return
        if earlier is not None:
            self.counts["command answered from memory"] += 1
            self.answer(command, {"result": earlier})
            return
        self._require_own(trainer, command)
        if self.judges and self.etcd_up and command.term != self.term:
            raise RuleViolated("I1", f"a command of term {command.term} was executed in term {self.term}")
        if isinstance(command, Update):
            self.run_update(trainer, command)
        elif isinstance(command, Check):
            self.done(trainer, command, {})
        elif isinstance(command, Save):
            if begins := command.begin_rl and trainer.progress.phase == "sft":
                trainer.progress = after_begin_rl(trainer.progress, command)
            if begins or command.publish:
                self.number(trainer)
            self.commit(trainer)
            self.done(trainer, command, {"committed": self.etcd_up or self.random.random() < 0.5})
        else:
            assert isinstance(command, ForwardReference)
            if (command.phase, command.step) != (trainer.progress.phase, trainer.progress.step + 1):
                raise RuleViolated("I5", f"the reference of {command.phase} step {command.step} was asked of a trainer "
                                         f"at {trainer.progress.phase} step {trainer.progress.step}")
            self.reference_passes += 1
            self.counts["reference pass"] += 1
            self.done(trainer, command, {})

    def _require_own(self, trainer: Trainer, command: Command) -> None:
        if self.judges and command.group != str(trainer.group):
            raise RuleViolated("I1", f"a command to group {command.group} was taken by group {trainer.group}")

    def refuse(self, trainer: Trainer, command: Command, error: StaleSamples) -> None:
        """The actor knows all that the rule goes by but the newest version."""
        self._require_own(trainer, command)
        self.refusals += 1
        self.counts["command refused: stale"] += 1
        known = [version for version in error.versions if version <= trainer.policy_version]
        if self.judges and known and not self.trusts_trainer:
            raise RuleViolated("I5", f"{command} has samples of versions {known}, which the actor should have refused")
        self.answer(command, {"error": "stale", "versions": error.versions})

    def run_update(self, trainer: Trainer, command: Update) -> None:
        if self.random.random() < 0.05 and self.faults_left:
            self.faults_left -= 1
            self.counts["rank died in a step"] += 1
            self.trainer = self.form_group()  # a rank dies in mid-step: nothing of it remains
            return
        meta = dict(command.cursor)
        now = self.weights()
        for version in meta.get("versions", ()) if self.judges else ():
            if version not in self.weights_of:
                raise RuleViolated("I4", f"step {command.step} was trained on samples of version {version}, which "
                                         "there is not")
            if (made_by := self.weights_of[version]) != now[:len(made_by)]:
                raise RuleViolated("I5", f"step {command.step} was trained on samples of version {version}, whose "
                                         "weights the trainer went back from")
        trainer.logprob_diff_max = float(any(self.weights_of.get(v) != now for v in meta.get("versions", ())))
        self.counts["samples of several versions"] += len(meta.get("versions", ())) > 1
        self.counts["samples older than the newest version"] += int(meta.get("oldest", 0)) not in (
            0, trainer.policy_version)
        self.executed.append(Executed(
            command.phase, command.step, tuple(command.consumption.trained),
            tuple(g for groups in command.consumption.dropped.values() for g in groups),
            int(meta.get("oldest", 0)), trainer.policy_version, next(self.ids)))
        trainer.progress = after_update(trainer.progress, command)
        if command.phase == "rl":
            trainer.publishing = command
            trainer.show()
            return
        self.done(trainer, command, {})

    def publish(self, trainer: Trainer, command: Command) -> None:
        """The version of a step gets its number, which needs etcd."""
        if not self.etcd_up:
            self.counts["publish without etcd"] += 1
            return
        self.number(trainer)
        trainer.publishing = None
        if trainer.progress.step % self.state_every == 0:
            self.commit(trainer)
        self.done(trainer, command, {"policy_version": trainer.policy_version,
                                     "logprob_diff_max": trainer.logprob_diff_max})

    def commit(self, trainer: Trainer) -> None:
        """A publish may be dropped: then the last state is an older one."""
        if self.etcd_up and self.random.random() < 0.9:
            self.committed.append(Committed(trainer.progress, trainer.policy_version, trainer.branch,
                                            len(self.executed)))
            self.recorder.committed(trainer.progress, trainer.policy_version, trainer.branch)
            self.counts["state committed"] += 1
        else:
            self.counts["state not committed"] += 1

    def done(self, trainer: Trainer, command: Command, result: dict[str, Any]) -> None:
        trainer.gate.executed(command, result)
        trainer.show()
        self.answer(command, {"result": result})

    def answer(self, command: Command, outcome: dict[str, Any]) -> None:
        self.trainer.pending.discard(command.id)
        self.trainer.results[command.id] = outcome
        if self.forgets.random() < 0.1:  # the real service keeps a number of results; the gate knows the last one
            self.counts["results forgotten"] += 1
            self.trainer.results.clear()

    # -- actors -----------------------------------------------------------------------------------------------------
    def start_actor(self) -> None:
        """A replica takes the job over, whatever its predecessors do."""
        if not self.etcd_up:
            return
        self.term += 1
        self.recorder.term_began(self.term)
        self.counts["actor beside another"] += bool(self.actors)
        flow = GroupFlow(self.limits)
        steps = schedule.run_sft(self.plan) if self.plan.mode == "sft" else schedule.run_rl(self.plan, flow)
        actor = Actor(self.term, flow, steps)
        actor.doing = self.drive(actor)
        self.actors.append(actor)

    def drive(self, actor: Actor) -> Iterator[None]:
        """Carries the effects of an actor out. Between any two yields everything else may happen."""
        effect = next(actor.effects)
        while True:
            if self.stop_asked and not actor.stops and not isinstance(effect, schedule.NOT_STOPPED):
                self.counts["stop before an effect"] += 1
                actor.stops, effect = True, actor.effects.throw(schedule.StopAsked())
            try:
                outcome = yield from self.interruptible(actor, effect)
            except StopAsked:
                self.counts["stop in the middle of an effect"] += 1
                actor.stops, effect = True, actor.effects.throw(schedule.StopAsked())
                continue
            except Lost as e:
                self.counts[f"lost: {e}"] += 1
                actor.stops, effect = False, actor.effects.throw(e)
                continue
            try:
                effect = actor.effects.send(outcome)
            except StopIteration:
                actor.done = True
                self.finished = not isinstance(effect, schedule.Stop)
                if not self.finished:
                    self.end_everything()
                return

    def interruptible(self, actor: Actor, effect: schedule.Effect) -> Generator[None, None, Any]:
        """Performs an effect; a stop may come at each of its waits, if it need not be done."""
        self.counts[f"effect {type(effect).__name__}"] += 1
        doing = self.perform(actor, effect)
        while True:
            if self.stop_asked and isinstance(effect, schedule.INTERRUPTIBLE) and self.random.random() < 0.3:
                raise StopAsked
            try:
                next(doing)
            except StopIteration as e:
                return e.value
            yield

    def end_everything(self) -> None:
        """What the end of a run's processes leaves: what is committed."""
        self.stop_asked = False
        self.actors.clear()
        self.network.clear()
        self.trainer = self.form_group()

    def perform(self, actor: Actor, effect: schedule.Effect) -> Generator[None, None, Any]:
        match effect:
            case schedule.Resume():
                self.resumes += 1
                return (yield from self.resume(actor))
            case schedule.SftUpdate(step=step, cursor=cursor):
                yield from self.command(actor, Update, phase="sft", step=step, cursor=dict(cursor))
            case schedule.SftEvaluate() | schedule.Evaluate():
                yield from self.wait(actor, "engines", lambda: self.engines_up)
                return 0.5
            case schedule.BeginRl(step=step, cursor=cursor):
                yield from self.command(actor, Save, phase="sft", step=step, cursor=dict(cursor),
                                        begin_rl=True)
            case schedule.Take():
                return (yield from self.take(actor))
            case schedule.Train():
                samples = effect.taken.groups.samples
                if failed := [g.ordinal for g in effect.taken.groups.groups if g.ordinal in self.poison]:
                    for _ in range(self.random.randint(0, 3)):  # it looks for them, and may be replaced meanwhile
                        yield from self.command(actor, Check, phase="rl", step=effect.step)
                    self.refused += 1
                    self.counts["groups that cannot be computed with"] += 1
                    return schedule.NotTrained(failed)
                if self.asks_reference:
                    yield from self.command(actor, ForwardReference, phase="rl", step=effect.step)
                result = yield from self.command(
                    actor, Update, phase="rl", step=effect.step, consumption=effect.taken.consumption,
                    sample_versions=effect.taken.groups.versions,
                    cursor={**effect.cursor, **self.recorder.cursor(effect),
                            "oldest": min(s.oldest_version for s in samples),
                            "versions": sorted({v for s in samples for v in s.versions})})
                self.recorder.trained(actor.term, effect, result)
                return result["policy_version"]
            case schedule.Save(phase=phase, step=step, cursor=cursor, publish=publish):
                # The trainer goes on publishing until it is committed; the world does not model that wait.
                while not ((yield from self.command(actor, Save, phase=phase, step=step, publish=publish,
                                                    cursor=dict(cursor)))["committed"] and self.committed
                           and (last := self.committed[-1].progress).step == step and last.phase == phase):
                    pass
            case schedule.Finish():
                yield from self.fenced_write(actor, lambda: self.recorder.finished(actor.term))
            case schedule.Stop(step=stopped_at):
                yield from self.fenced_write(actor, lambda: self.stopped_at.append(
                    (stopped_at, self.committed[-1].progress if self.committed else Progress())))
        return None

    def wait(self, actor: Actor, what: str, holds: Any) -> Iterator[None]:
        while not holds():
            actor.waiting_for = what
            self.waits_shown[what] += 1
            self.counts[f"waited for {what}"] += 1
            yield
        actor.waiting_for = ""

    def fenced_write(self, actor: Actor, write: Any) -> Iterator[None]:
        yield from self.wait(actor, "etcd", lambda: self.etcd_up)
        if self.judges and actor.term != self.term:
            raise Fenced("a newer actor")
        write()  # of a log, the product refuses it
        yield

    def resume(self, actor: Actor) -> Generator[None, None, State]:
        yield
        yield from self.wait(actor, "etcd", lambda: self.etcd_up)
        trainer = self.trainer
        try:
            trainer.gate.claim(1, actor.term)
        except Fenced:
            if actor.term == self.term:
                raise RuleViolated("I11", "the newest actor was fenced off") from None
            raise
        actor.group = trainer.group  # type: ignore[attr-defined]
        p, version, branch = trainer.shown
        state = State(p.phase, p.step, version, p.consumed.groups, p.cursor, branch)
        self.recorder.resumed(actor.term, state)
        return state

    def take(self, actor: Actor) -> Generator[None, None, TakenStep]:
        """The groups of a step are generated now."""
        flow, queue = actor.flow, actor.queue
        while True:
            for ordinal in flow.take_stale():
                self.counts["stale group dropped"] += 1
                del queue[ordinal]
            if (part := flow.choose()) is not None and part.step is not None:
                return TakenStep(StepGroups.from_groups([queue[o] for o in part.step.ordinals]),
                                 part.step.consumption)
            if (grant := flow.lease()) is None:
                raise RuleViolated("I11", "a step lacks groups, and the flow grants none")
            yield from self.fenced_write(actor, lambda: self.recorder.leased(actor.term, flow.open))
            for group, drop in (yield from self.generate(actor, grant.ordinals, grant.min_version)):
                if flow.finished(group.ordinal, group.versions, drop) and flow.arrived(group.ordinal):
                    queue[group.ordinal] = group

    def generate(self, actor: Actor, ordinals: Sequence[int], min_version: int
                 ) -> Generator[None, None, list[tuple[Group, str]]]:
        for _ in range(self.random.randint(0, 3)):
            yield
        # Engines serve what was published, some time ago or just now, perhaps newer than what this actor knows of.
        yield from self.wait(actor, "engines", lambda: self.engines_up and self.served >= min_version)
        out = []
        for ordinal in ordinals:
            version = self.said(self.served, ordinal)
            group = Group(ordinal, Prompt((1,)), (Sample((Segment((2,), (-0.1,), version=version),)),))
            drop = "uniform" if random.Random(ordinal).random() < 0.2 else ""
            out.append((group, drop))
        return out

    def said(self, version: int, ordinal: int) -> int:
        """The version that samples of this one say of themselves. Who lies says any other: an older one, of abandoned
        weights perhaps, or one that there is not; of some groups always."""
        if self.lies and ordinal % 11 == 7:
            self.counts["lie: a version that there is not"] += 1
            return self.version + 3
        if self.random.random() >= self.lies:
            return version
        self.counts["lie: any version"] += 1
        now = self.weights()
        abandoned = [v for v, made_by in self.weights_of.items() if made_by != now[:len(made_by)]]
        return self.random.choice([self.random.randint(0, self.version + 2), *abandoned[-3:]])

    def command(self, actor: Actor, kind: type[Command], **fields: Any) -> Generator[None, None, dict[str, Any]]:
        """As the client does: send, ask again and again, send again what is not known, give up with the group."""
        group = actor.group  # type: ignore[attr-defined]
        batch = {"batch": "shares"} if issubclass(kind, BatchCommand) else {}
        command = kind(id=f"c{next(self.ids)}", epoch=1, term=actor.term, group=str(group), **batch, **fields)
        sent = False
        while True:
            yield
            if self.trainer.group != group:
                raise Lost("the group re-formed")
            if not sent:
                fate = self.random.random()
                sent = True
                if fate < 0.8:
                    self.submit(command)
                elif fate < 0.9:
                    self.counts["command delayed"] += 1
                    self.network.append((group, command))  # it will arrive some time
                else:
                    self.counts["command lost"] += 1
                    sent = False  # it was lost, and the client knows
                if self.random.random() < 0.1:
                    self.counts["command sent twice"] += 1
                    self.network.append((group, command))  # twice
                continue
            if self.random.random() < 0.2:
                self.counts["answer lost"] += 1
                continue
            outcome = self.trainer.results.get(command.id)
            if outcome is None:
                if command.id not in self.trainer.pending:
                    sent = False
                continue
            if "result" in outcome:
                return outcome["result"]
            if outcome["error"] == "stale":
                for ordinal in actor.flow.refused(outcome["versions"]):
                    actor.queue.pop(ordinal, None)
                raise Lost("the trainer refuses the samples")
            if outcome["error"] == "fenced":
                if actor.term == self.term:
                    raise RuleViolated("I11", "the newest actor was fenced off")
                raise Fenced("a newer actor")
            raise Lost("the step does not follow")

    def submit(self, command: Command) -> None:
        known = command.id in self.trainer.pending or command.id in self.trainer.results
        if not known:
            self.trainer.pending.add(command.id)
            self.trainer.queue.append(command)

    # -- what happens -----------------------------------------------------------------------------------------------
    def step(self) -> None:
        """One thing that happens."""
        self.recorder.happened()
        self.counts["steps"] += 1
        fault = self.random.random() < 0.04 and self.faults_left > 0
        if fault:
            self.faults_left -= 1
            self.random.choice([self.kill_trainer, self.start_actor, self.kill_actor, self.etcd_down,
                                self.engines_down, self.repeat_command])()
            return
        if self.stops_left and self.random.random() < 0.01:
            self.stops_left -= 1
            self.counts["stop asked"] += 1
            self.stop_asked = True
        if self.deaths_left and self.trainer.progress.step and self.random.random() < 0.03:
            self.deaths_left -= 1
            self.kill_trainer()
        chance = self.random.random()
        if chance < 0.05:
            self.etcd_up = self.engines_up = True
        elif chance < 0.15:
            self.served = self.version  # the engines have pulled it
        elif chance < 0.4:
            self.execute_next()
        elif chance < 0.45 and self.network:
            group, command = self.network.pop(self.random.randrange(len(self.network)))
            self.counts["late command" if group == self.trainer.group else "late command to another group"] += 1
            self.submit(command)  # also to a group that was formed later
        elif not self.actors:
            self.start_actor()
        else:
            self.advance(self.random.choice(self.actors))

    def advance(self, actor: Actor) -> None:
        try:
            next(actor.doing)
        except StopIteration:
            if actor in self.actors:  # else it has ended with all of the run
                self.actors.remove(actor)
        except Fenced:
            self.counts["actor fenced"] += 1
            self.actors.remove(actor)
            if actor.term == self.term:
                raise RuleViolated("I11", "the newest actor ended") from None

    def kill_trainer(self) -> None:
        self.counts["trainer killed"] += 1
        self.counts["trainer killed before its first state"] += not self.committed
        self.counts["trainer killed while it publishes"] += self.trainer.publishing is not None
        # What it was sent and has not executed is still on its way, and reaches the group that forms in its place.
        self.network += [(self.trainer.group, command) for command in self.trainer.queue]
        self.trainer = self.form_group()

    def kill_actor(self) -> None:
        if self.actors:
            self.counts["actor killed"] += 1
            self.actors.remove(self.random.choice(self.actors))

    def etcd_down(self) -> None:
        self.counts["etcd away"] += 1
        self.etcd_up = False

    def engines_down(self) -> None:
        self.counts["engines away"] += 1
        self.engines_up = False

    def repeat_command(self) -> None:
        """A command that was sent before is delivered once more."""
        if self.trainer.queue:
            self.counts["command repeated"] += 1
            self.network.append((self.trainer.group, self.random.choice(self.trainer.queue)))

    def run(self) -> Self:
        """To the end of the job. Raises RuleViolated."""
        for _ in range(MAX_EVENTS):
            if self.finished:
                break
            self.step()
            if self.judges:
                self.check_lineage()
        if not self.finished:
            raise RuleViolated("I11", "the job did not finish")
        if self.judges:
            self.check_end()
        return self

    # -- what must hold ---------------------------------------------------------------------------------------------
    def check_lineage(self) -> None:
        sft, rl = ([e for e in self.executed if e.phase == phase] for phase in ("sft", "rl"))
        for made in (sft, rl):
            if [e.step for e in made] != list(range(1, len(made) + 1)):
                raise RuleViolated("I5", f"steps out of order: {made[0].phase} {[e.step for e in made]}")
        if rl and (newest := rl[-1]).oldest_version < newest.version_before - self.limits.max_staleness:
            raise RuleViolated("I5", f"step {newest.step} was trained on samples of version {newest.oldest_version}, "
                                     f"while {newest.version_before} was out")

    def check_end(self) -> None:
        last = self.committed[-1]
        if self.plan.mode == "sft":
            done = [e.step for e in self.executed[:last.lineage] if e.phase == "sft"]
            if last.progress.phase != "sft" or done != list(range(1, self.plan.sft_max_steps + 1)):
                raise RuleViolated("I11", f"the job ended at {last.progress.phase} step {last.progress.step} after "
                                          f"{done}")
            if last.policy_version < 1:
                raise RuleViolated("I11", "the policy was not published")
            return
        if last.progress.phase != "rl" or last.progress.step != self.plan.steps:
            raise RuleViolated("I11", f"the job ended at {last.progress.phase} step {last.progress.step}")
        rl = [e for e in self.executed[:last.lineage] if e.phase == "rl"]
        counted = Counter(g for e in rl for g in (*e.trained, *e.dropped))
        if any(n > 1 for n in counted.values()):
            raise RuleViolated("I5", f"consumed twice: {[g for g, n in counted.items() if n > 1]}")
        if sorted(counted) != list(range(len(counted))):
            raise RuleViolated("I5", f"groups were skipped: {sorted(set(range(max(counted) + 1)) - set(counted))}")
        if any(len(e.trained) != self.plan.groups_per_step for e in rl):
            raise RuleViolated("I5", "a step was trained on too few groups")
        found = audit([(c.progress.step, c.progress.consumed) for c in self.committed if c.progress.phase == "rl"],
                      groups_per_step=self.plan.groups_per_step)
        if not found.clean:
            raise RuleViolated("I5", f"the audit is not clean: {found}")
        if self.trainer.progress.consumed.groups != IntervalSet.from_values(
                g for e in rl for g in (*e.trained, *e.dropped)):
            raise RuleViolated("I5", "the state disagrees with what was executed")
