"""What each rank of a trainer group does, the policy's or the critic's: it restores or initialises its state, then
executes commands."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from elastic_rl.algorithms.registry import CRITIC_LOSS, algorithm_of, required_tensors, uses_reference
from elastic_rl.config.algorithm import reference_step
from elastic_rl.config.groups import ACTOR, CRITIC
from elastic_rl.data.batch import Batch
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    ElasticRLError,
    EtcdUnavailable,
    Fenced,
    PluginFailed,
    StepRefused,
    StepsHeld,
    TrainerFailed,
)
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Severity, StatedWork
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.backoff import RetryBackoff
from elastic_rl.runtime.failpoints import reach
from elastic_rl.trainer.broadcast import Message, Order, broadcast_message
from elastic_rl.trainer.checkpoint.checkpoints import Checkpoints
from elastic_rl.trainer.device_phases import TrainerGroupPhases
from elastic_rl.trainer.group_worker import GroupWorker, restarts
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.megatron.device_memory import DeviceMemory
from elastic_rl.trainer.megatron.optimizer import Adam
from elastic_rl.trainer.megatron.policy import ModelArch, Policy
from elastic_rl.trainer.profiling import StepProfiler
from elastic_rl.trainer.progress import Progress
from elastic_rl.trainer.reference import Reference
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.commands import (
    Accumulate,
    Apply,
    Check,
    Command,
    ForwardLogprobs,
    ForwardReference,
    ForwardValues,
    Load,
    Offload,
    Onload,
    Save,
    TrainCommand,
    Update,
    after_begin_rl,
    after_update,
)
from elastic_rl.trainer.service.dispatch import Refused, executed_by, executes
from elastic_rl.trainer.step import TrainStep
from elastic_rl.trainer.throughput import Passed, Throughput

log = logging.getLogger(__name__)

_PUBLISH_AGAIN_S = 1.0
"""First pause after a publish that was not committed and must be; ranks that are idle say so no less often than the
longest one."""
_ATTEMPTS = 2
"""How often a step may fail after an update of it before steps are held. The actor looks each time for the samples that
are to blame."""
GATHERING = "publishing"
"""Phase of a rank that gathers, and copies, what is to be published."""
_NEXT_PART_S = 30.0
"""A publish that was dropped is not repeated, which discards the parts of a step, until no part has come for so long:
then they may wait for samples of the very version."""


@dataclass
class _Wanted:
    """A publish that is to be begun as soon as etcd gives numbers. ``command``: is done when it has begun or, with
    ``join``, when it has ended; ``result``: the result of that command, so far. ``until_committed``: it is repeated
    until it is, with the weights that it began with, since another group needs that very version."""

    policy: bool = False
    state: bool = False
    join: bool = False
    until_committed: bool = False
    command: Command | None = None
    result: dict[str, Any] = field(default_factory=dict)


class TrainerWorker(GroupWorker):
    """One rank. Rank 0 takes commands from its board and checks them; the others follow."""

    def __init__(self, ctx: RunContext, etcd: EtcdClient, par: parallel.ParallelDims, member: Membership,
                 board: Board, share_urls: list[str], phases: TrainerGroupPhases | None = None) -> None:
        """``share_urls``: the URLs of the ranks that take the shares of a batch, by data-parallel rank. ``phases``: the
        phases of a group that shares devices with engines, and may have device memory now."""
        super().__init__(ctx, etcd, par, member, board, share_urls)
        arch = ModelArch.read(ctx.model_dir)
        self.policy = Policy(arch.as_critic() if ctx.group is CRITIC else arch, self.cfg, par)
        self.adam = Adam(self.policy, self.cfg)
        self.train_step = TrainStep(self.policy, self.adam, self.cfg, par, self._report)
        dtype = next(self.policy.module.parameters()).dtype
        self.profiler = StepProfiler(self.cfg.trainer, JobPaths.of(ctx.config).profiles, ctx.group.name, par.rank,
                                     cuda=torch.device(par.device).type == "cuda", written=self._report_profile)
        self.throughput = Throughput(self.policy.arch, self.cfg.device, par, dtype)
        algorithm = CRITIC_LOSS if ctx.group is CRITIC else algorithm_of(self.cfg)
        own_reference = uses_reference(algorithm, self.cfg.algorithm) and not self.cfg.uses_reference_group
        self._adds_reference = own_reference and "ref_logprobs" in required_tensors(algorithm, self.cfg.algorithm)
        self.reference = (Reference(self.policy, self.cfg.algorithm.reference_every_steps, self.cfg.dcs.bucket_bytes)
                          if own_reference else None)
        self.checkpoints = Checkpoints(ctx, etcd, par, self.policy, self.adam, member.incarnation, board.wake.set,
                                       self._on_restore, self.reference)
        self.progress = Progress()
        self._wanted: _Wanted | None = None
        self._publish_again = RetryBackoff(_PUBLISH_AGAIN_S, max(_PUBLISH_AGAIN_S, self._idle_s))
        self._phases, self._memory = phases, DeviceMemory.of_rank(self.policy, self.adam)
        self._part_at = 0.0
        """When a part was accumulated; monotonic."""
        self._offloaded = False
        self._rewound = (0, 0)
        """The last step that was refused after an update of it, and how often it was."""
        self._moving: Command | None = None
        """The command (rank 0 has it) to move memory, until etcd has its part."""

    # -- main loop ------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Returns on STOP; raises the error of a step, which ends the rank and makes the group re-form."""
        self._restore()
        while True:
            message = broadcast_message(self._next() if self.par.rank == 0 else None, self.par)
            if message.order is Order.STOP:
                self.checkpoints.finish()
                self.profiler.close()
                return
            if message.order is Order.EXECUTE:
                self._execute(Command.decode(message.payload))
            elif message.order is Order.PUBLISH:
                self._publish(message.payload)
            elif message.order is Order.DISCARD:
                self.board.discard_share(message.payload.decode())
            else:
                self._report()  # idle, not hung

    def _restore(self) -> None:
        self._report("starting")
        self.train_step.discard_parts()
        restored = self.checkpoints.restore()
        if restored is None:
            self._begin()
        else:
            self.progress = restored
            if restored.phase == "rl" and self.ctx.group.every_step:
                # A new number for the old weights: engines that hold a later step roll forward to it, never back.
                self._wanted = _Wanted(policy=True)
                return  # ready once that number is known
        self._report(ready=True)

    def _begin(self) -> None:
        """The state of the beginning. A critic takes no part in the supervised phase."""
        self.checkpoints.load_initial(self.ctx.model_dir)
        self.adam.reset()
        self.progress = Progress("rl" if self.ctx.group is CRITIC else "sft")

    def _on_restore(self, phase: str, detail: str) -> None:
        """A sign of life during a restore, which may wait for etcd or a node for as long as they are away."""
        self.member.progress(self.progress.step, phase, restoring=detail)

    def _next(self) -> Message:
        """Rank 0: the next message."""
        self._read_claims()
        if (discard := self._discard()) is not None:
            return discard
        republish_in_s = self._republish_in_s()
        if self._wanted is not None or not republish_in_s:
            return self._begin_publish(self._wanted or _Wanted())
        if isinstance(self._moving, Offload):
            return self._give_up(self._moving)
        command = self._moving or self.board.next()
        if command is None:
            return self._idle(republish_in_s)
        try:
            self._learn_term()
            earlier = self.gate.admit(command, self.progress, self._staleness_rule())
            if self._offloaded and not isinstance(command, Offload | Onload):
                raise Conflict("the trainer's memory is offloaded", hint="onload it, then send the command again")
        except (Fenced, Conflict, ConfigError, TrainerFailed, PluginFailed) as e:
            log.warning("refused %s: %s", command, e)
            self._refuse(command, e)
            self._moving = None
            return Message(Order.IDLE)
        if isinstance(command, Onload) and self._phases is not None and (why := self._phases.take()):
            return self._move_later(command, why)
        self._moving = None
        if earlier is not None:
            self.board.done(command, earlier)
            return Message(Order.IDLE)
        return Message(Order.EXECUTE, command.encode())

    def _staleness_rule(self) -> StalenessRule | None:
        """Which samples the next RL step may have, by what this group has published itself; None for a critic, which
        follows the policy."""
        if self.ctx.group is CRITIC:
            return None
        made = self.checkpoints
        return StalenessRule(made.weights_version, self.cfg.train.max_staleness, made.branch, made.policy_version)

    def _move_later(self, command: Command, why: str) -> Message:
        self._moving, self.board.waits_for = command, why
        assert self._phases is not None
        self._phases.pause()
        return Message(Order.IDLE)

    def _give_up(self, command: Command) -> Message:
        """Every rank has offloaded its memory: says so, and that the command is done."""
        assert self._phases is not None
        if why := self._phases.give_up():
            return self._move_later(command, why)
        self._moving, self.board.waits_for = None, ""
        self._finish(command, {})
        return Message(Order.IDLE)

    def _republish_in_s(self) -> float:
        """Seconds until a dropped publish is to be repeated: not while parts of a step are accumulated, and others are
        on their way. inf where there is none, and while the memory is offloaded."""
        due_s = self.checkpoints.republish_in_s()  # it looks after a publish in flight, too
        if self._offloaded:
            return math.inf
        parts_s = self._part_at + _NEXT_PART_S - time.monotonic() if self.train_step.parts.count else 0.0
        return max(due_s, parts_s)

    def _begin_publish(self, wanted: _Wanted) -> Message:
        """Takes the numbers of a publish while no other rank waits for this one: etcd may be away for an hour, and a
        collective would not wait so long."""
        try:
            numbers = self.checkpoints.begin(self.progress, policy=wanted.policy, state=wanted.state)
        except Fenced:
            raise
        except ElasticRLError as e:  # etcd is away, the catalog is suspended, or a lease was lost meanwhile
            log.warning("waiting to publish step %d: %s", self.progress.step, e)
            self.board.waits_for = f"the trainer to publish step {self.progress.step}: {e}"
            self._report("waiting to publish")
            self._pause.wait(min(1.0, self._idle_s))
            return Message(Order.IDLE)
        return Message(Order.PUBLISH, json.dumps({"numbers": numbers, "join": wanted.join}).encode())

    def _publish(self, payload: bytes) -> None:
        order = json.loads(payload)
        self._report("waiting for the publish")  # of an earlier version
        self.board.waits_for = "the trainer to publish: an earlier version is not committed yet"
        self.train_step.discard_parts()  # a publish may gather in the buffers of the gradients
        published = self.checkpoints.publish(order["numbers"], self.progress.step, self._on_gather,
                                             has_reference=self.progress.reference is not None)
        if order["join"]:
            self._report("waiting for the publish")
            self.board.waits_for = "the trainer to commit its state"
        committed = self.checkpoints.join() if order["join"] else None
        self.board.waits_for = ""
        wanted, self._wanted = self._wanted, None
        if wanted is not None and wanted.until_committed and not committed:
            self._wanted = wanted
            self.board.waits_for = "the trainer to commit a policy that the group reference needs"
            self._publish_again.failed(time.monotonic())
            if self.par.rank == 0:  # the others wait for its next message
                self._pause.wait(self._publish_again.left_s(time.monotonic()))
            return
        self._publish_again.reset()
        if wanted is not None and wanted.until_committed:
            self.progress = self.progress.replace(reference_version=published.policy)
        self._report(ready=True)
        if wanted is not None and wanted.command is not None:
            self._finish(wanted.command, wanted.result | {
                "publish_stall_s": published.stall_s, "gather_s": published.gather_s, "copy_s": published.copy_s,
                "publish_wait_s": published.waited_s, "policy_version": published.policy,
                "state_version": published.state, "committed": committed,
                "reference_version": self.progress.reference_version})

    def _on_gather(self) -> None:
        """The ranks gather what they publish, which is no wait: one that stays behind holds the others up."""
        self.board.waits_for = ""
        self.member.progress(self.progress.step, GATHERING)

    def _report(self, phase: str = "", work: StatedWork | None = None, *, ready: bool = False) -> None:
        p = self.progress
        self._ready = self._ready or ready
        self.member.progress(p.step, phase or "waiting for a command", work=work, ready=self._ready)
        if work is not None:  # what the board has does not change between micro-batches
            return
        if self.par.rank == 0 and self._wanted is None:  # else step and version would not belong together
            self.board.set_status(
                group=self.member.incarnation, epoch=self.ctx.epoch, step=p.step, phase=p.phase, pair=p.pair,
                cursor=p.cursor, branch=self.checkpoints.branch.to_json(),
                consumed=p.consumed.to_json(), policy_version=self.checkpoints.policy_version,
                state_version=self.checkpoints.state_version, reference_version=p.reference_version,
                share_urls=self._share_urls, minibatches=self.cfg.train.minibatches,
                cost=asdict(self.train_step.cost), restarts=restarts(),
                **({"ready": True} if ready else {}))

    # -- commands -------------------------------------------------------------------------------------------------
    @executes(ForwardLogprobs)
    def _forward_logprobs(self, command: ForwardLogprobs, share: Batch) -> dict[str, torch.Tensor]:
        return self.train_step.forward_logprobs(share, self.progress.phase)

    @executes(ForwardReference)
    def _forward_reference(self, command: ForwardReference, share: Batch) -> dict[str, torch.Tensor]:
        return {"logprobs": self._reference_logprobs(share)}

    @executes(ForwardValues)
    def _forward_values(self, command: ForwardValues, share: Batch) -> dict[str, torch.Tensor]:
        return self.train_step.forward_values(share)

    def _reference_logprobs(self, share: Batch) -> torch.Tensor:
        """[l] fp32, of the reference policy of the next step."""
        assert self.reference is not None  # by ``_require_possible``
        with self.reference.in_place():
            return self.train_step.forward_logprobs(share, greedy=False)["logprobs"]

    def _require_possible(self, command: Command, share: Batch | None = None) -> None:
        super()._require_possible(command, share)
        is_critic = self.ctx.group is CRITIC
        if is_critic and isinstance(command, Update | Check) and share is not None:
            needs = (*CRITIC_LOSS.needs, *(("numbers",) if self.cfg.train.minibatches > 1 else ()))
            if missing := [name for name in needs if name not in share]:
                raise Refused(ConfigError(f"a batch for a critic needs {', '.join(missing)}"))
        elif isinstance(command, Accumulate | Apply) and self.cfg.train.prompts_per_part is None:
            raise Refused(ConfigError("the settings of this trainer ask for no parts of a step",
                                      hint="set train.prompts_per_part in a new job"))
        elif isinstance(command, ForwardLogprobs | ForwardReference if is_critic else ForwardValues):
            raise Refused(ConfigError(
                f"the group {self.ctx.group.name} has no {command.kind.removeprefix('forward_')}"))
        if fault := self._reference_fault(command):
            raise Refused(fault)

    def _reference_fault(self, command: Command) -> ConfigError | None:
        """Why a command cannot be executed that needs the reference policy; the same on every rank."""
        if self.reference is not None:
            uses = isinstance(command, Update | Accumulate | Check | ForwardReference) and command.phase == "rl"
            return self.reference.fault(self.progress) if uses else None
        if not isinstance(command, ForwardReference):
            return None
        return ConfigError("the settings of this trainer ask for no reference policy",
                           hint="set algorithm.kl_coef or algorithm.report_kl in a new job")

    @executes(Update)
    def _update(self, command: Update, share: Batch) -> dict[str, Any] | None:
        updates = self.adam.updates
        share = self._with_reference(command, share)
        try:
            with self.profiler.step(command.phase, command.step):
                metrics: dict[str, Any] = dict(self.train_step.train(share, command.phase, command.step))
        except (PluginFailed, StepRefused) as e:  # on every rank
            log.error("step %d was not made: %s", command.step, e)
            if self.adam.updates == updates:
                raise Refused(e) from e
            raise Refused(self._go_back_from(command, e)) from e  # a step is made whole or not at all
        minibatches = 1 if command.phase == "sft" else self.cfg.train.minibatches
        passes = (self.adam.updates - updates) // minibatches
        metrics |= self.throughput.of_step(Passed.of(share), passes, metrics["train_s"])
        return self._stepped(command, metrics)

    @executes(Accumulate)
    def _accumulate(self, command: Accumulate, share: Batch) -> dict[str, Any]:
        if command.part:  # the first one begins the step
            self._require_parts(command, command.part)
        share = self._with_reference(command, share)
        try:
            with self.profiler.step(command.phase, command.step, f"part-{command.part}"):
                self.train_step.accumulate(share, command.part)
        except (PluginFailed, StepRefused) as e:  # on every rank
            log.error("part %d of step %d was not computed: %s", command.part, command.step, e)
            raise Refused(e) from e
        self._part_at = time.monotonic()
        return {"parts": self.train_step.parts.count}

    @executes(Check)
    def _check(self, command: Check, share: Batch) -> dict[str, Any]:
        try:
            return dict(self.train_step.check(self._with_reference(command, share), command.phase))
        except PluginFailed as e:  # on every rank
            raise Refused(e) from e

    def _with_reference(self, command: Update | Accumulate | Check, share: Batch) -> Batch:
        """The share with what its loss reads of the reference policy, where these ranks compute that."""
        if command.phase != "rl" or not self._adds_reference:
            return share
        return Batch({**share.tensors, "ref_logprobs": self._reference_logprobs(share)})

    @executes(Apply)
    def _apply(self, command: Apply) -> dict[str, Any] | None:
        self._require_parts(command, command.parts)
        with self.profiler.step(command.phase, command.step, "apply"):
            metrics, passed = self.train_step.apply(command.step)
        return self._stepped(command, metrics | self.throughput.of_step(passed, 1, metrics["train_s"]))

    def _report_profile(self, path: Path) -> None:
        """Called in a thread of its own: etcd may be away for as long as it likes."""
        name = self.ctx.group.name
        with contextlib.suppress(ElasticRLError):  # the file is there
            self.ctx.writer_of_group(self._etcd).emit(
                event_kinds.TRAINER_GROUP_EVENTS[name].profiled, name,
                f"rank {self.par.rank} of {name} has written a profile on {self.ctx.host}: {path}", file=str(path))

    def _require_parts(self, command: Accumulate | Apply, parts: int) -> None:
        """Raises Refused, on every rank, unless so many parts of the step, and at least one, were accumulated."""
        if (found := self.train_step.parts.count) != parts or not found:
            raise Refused(Conflict(f"{command} after {parts} parts: {found} are accumulated",
                                   hint="send the parts of the step again, from 0"))

    def _stepped(self, command: TrainCommand, metrics: dict[str, Any]) -> dict[str, Any] | None:
        """Goes on to the state of a step after its update(s), and publishes what is to be published."""
        self.progress = after_update(self.progress, command)
        reach("rank.stepped")
        if self.reference is not None:
            if command.phase == "rl":
                metrics["reference_step"] = self.progress.reference
            self.progress = self.reference.renew(self.progress)
        sft = command.phase == "sft"
        every = self.cfg.sft.state_every_steps if sft else self.cfg.train.state_every_steps
        state = command.step % every == 0
        weights = not sft and (state or self.ctx.group.every_step)
        if weights or state:
            for_reference = not sft and self._is_reference(command.step)
            if for_reference:
                self.progress = self.progress.replace(reference_version=0)
            self._wanted = _Wanted(policy=weights, state=state, join=for_reference, until_committed=for_reference,
                                   command=command, result=metrics)
            return None  # when the publish has begun
        return metrics

    def _go_back_from(self, command: Update, error: PluginFailed | StepRefused) -> StepRefused | StepsHeld:
        """The group goes, after an update of a step failed that was not its first, back to its last committed state.
        The actor looks for the samples that are to blame; once it has found none, and the same step fails again, the
        group makes no step until a person has corrected what failed. Returns what the actor is told, and tells the
        operator."""
        self._rewound = command.step, 1 + (self._rewound[1] if self._rewound[0] == command.step else 0)
        self._join_before_restore("its last state")
        self._restore()
        self.board.waits_for = ""
        name = self.ctx.group.name
        told = command.went_back(error, name, self.progress.step, held=self._rewound[1] > _ATTEMPTS)
        if self.par.rank == 0:
            if isinstance(told, StepsHeld):
                self.gate.hold(told)
            with contextlib.suppress(EtcdUnavailable):  # the status of the job says it too
                self.ctx.writer_of_group(self._etcd).emit(
                    event_kinds.TRAINER_GROUP_EVENTS[name].rewound, name, str(told), severity=Severity.ERROR,
                    step=command.step, to_step=self.progress.step)
        return told

    def _join_before_restore(self, state: str) -> None:
        self.board.waits_for = f"the trainer to commit what is being published, and to go back to {state}"
        self._report("waiting for the publish")
        self.checkpoints.join()  # else its collectives would meet those of the restore

    @executes(Load)
    def _load(self, command: Load) -> dict[str, Any] | None:
        """Goes back to a committed state, or to the newest that there is: which it is, the status says."""
        before = self.progress
        self._join_before_restore(f"version {command.version} of its state")
        self.train_step.discard_parts()
        restored = self.checkpoints.load(command.version) if command.version else None
        if restored is not None:
            self.progress = restored
        elif command.version:
            self._restore()
        else:
            self._begin()
        self.board.waits_for = ""
        result = {"loaded": restored is not None or not command.version}
        if self.par.rank == 0:
            name = self.ctx.group.name
            kind = event_kinds.TRAINER_GROUP_EVENTS[name].went_back
            with contextlib.suppress(EtcdUnavailable):
                self.ctx.writer_of_group(self._etcd).emit(
                    kind, name, f"the group {name} went back from step {before.step} to step {self.progress.step}, "
                    "which the other group has too", step=self.progress.step)
        if self.progress.phase == "rl" and self.ctx.group.every_step:
            self._wanted = _Wanted(policy=True, command=command, result=result)  # see ``_restore``
            return None
        self._wanted = None
        return result

    @executes(Save)
    def _save(self, command: Save) -> None:
        if command.begin_rl and self.progress.phase == "sft":
            self.adam.reset()  # RL starts with its own learning rate, without the momentum of the supervised gradient
            self.progress = after_begin_rl(self.progress, command)
            if self.reference is not None:
                self.progress = self.reference.renew(self.progress)
        else:
            self.progress = self.progress.replace(cursor=dict(command.cursor))
        weights = command.begin_rl or command.publish or not self.ctx.group.every_step
        self._wanted = _Wanted(policy=weights, state=True, join=True, command=command,
                               until_committed=command.begin_rl and self._is_reference(0))

    def _is_reference(self, step: int) -> bool:
        """Whether the reference group is going to need the policy of this RL step."""
        return (self.cfg.uses_reference_group and self.ctx.group is ACTOR
                and reference_step(step + 1, self.cfg.algorithm.reference_every_steps) == step)

    @executes(Offload, Onload)
    def _move(self, command: Offload | Onload) -> dict[str, Any] | None:
        if self._phases is None:
            raise Refused(ConfigError("the trainer shares no device with engines",
                                      hint="it does with placement=colocated"))
        if isinstance(command, Offload):
            freed = self._memory.offload()
            log.info("offloaded %d MiB of device memory", freed >> 20)
        else:
            self._memory.onload()
        self._offloaded = isinstance(command, Offload)
        parallel.barrier(self.par)  # what rank 0 says is of all ranks
        if self._offloaded:
            self._moving = command if self.par.rank == 0 else None
            return None  # when etcd has it, see ``_give_up``
        self.board.waits_for = ""
        return {}


TrainerWorker.methods = executed_by(TrainerWorker)
