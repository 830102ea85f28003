"""What a trainer group can be asked to do, and who may ask. Pure.

There is a class for each kind of command, with the fields that it has. On the wire a command is a JSON object whose
``kind`` says which class it is of.

The actor is the only writer of a trainer, and which actor that is changes: Ray Serve replaces a replica that it takes
for dead, and the old one may still have a command in flight. So each command carries the fencing token of its actor
(epoch, term), the formation of the group that it was sent to, and the step that it is about. All are checked when the
command is *executed*: one that waited in the queue while its actor was replaced, or was delivered twice, or to a group
that has re-formed since, changes nothing. An RL step also carries the versions of the policy that made its samples,
and the policy's group refuses those beyond the staleness, so that no fault of an actor trains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)

from elastic_rl.data.ledger import Consumption
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    ElasticRLError,
    Fenced,
    PluginFailed,
    StaleSamples,
    StepRefused,
    StepsHeld,
    TrainerFailed,
    VersionNotFound,
)
from elastic_rl.trainer.progress import Phase, Progress

REFUSALS: Mapping[str, type[ElasticRLError]] = {
    "fenced": Fenced, "invalid": ConfigError, "stale": StaleSamples, "conflict": Conflict, "held": StepsHeld,
    "plugin": PluginFailed, "version": VersionNotFound, "step": StepRefused}
"""Errors that refuse a command, by their names in its outcome, each before the kind that it is of; any other is a
failure of the trainer."""


def _consumption(value: Any) -> Consumption:
    if isinstance(value, Consumption):
        return value
    try:
        return Consumption.from_json(value)
    except (KeyError, TypeError, AttributeError, OverflowError) as e:
        raise ValueError(f"no record of consumed groups: {type(e).__name__}: {e}") from e


_Text = Annotated[str, StringConstraints(max_length=200)]
_Id = Annotated[str, StringConstraints(max_length=200, pattern=r"^[ -~]+\z")]
"""Printable ASCII: clients ask for the result under this name, in a URL, and the answer repeats it."""
_Consumption = Annotated[Consumption, PlainValidator(_consumption), PlainSerializer(Consumption.to_json)]


class Command(BaseModel):
    """What all commands have."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")

    id: _Id
    """Chosen by the actor; a repetition with the same id is the same command."""
    kind: str
    epoch: int
    term: int
    group: _Text
    """The formation of the trainer group whose state the actor knows."""

    def __str__(self) -> str:
        return self.kind

    def encode(self) -> bytes:
        return self.model_dump_json().encode()

    @staticmethod
    def decode(raw: bytes) -> Command:
        """The command that ``encode`` returned. Raises ConfigError for anything else."""
        try:
            return _ANY.validate_json(raw)
        except ValidationError as e:
            faults = "; ".join(": ".join((*map(str, f["loc"]), f["msg"])) for f in e.errors(include_input=False))
            raise ConfigError(f"not a command of the trainer: {faults:.2000}") from e


class BatchCommand(Command):
    """A command that each rank executes on its replica's share of a batch."""

    batch: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """Name under which the data-parallel ranks hold their shares."""


class ForwardCommand(BatchCommand):
    """Gives tensors of the batch's loss tokens, and changes nothing. The first rank of each replica has those of its
    share."""


class _StepCommand(Command):
    """A command about a step."""

    phase: Phase = "rl"
    step: int

    def __str__(self) -> str:
        return f"{self.kind} of {self.phase} step {self.step}"


class NextStepCommand(_StepCommand):
    """A command for the step after the trainer's."""


class _SamplesCommand(NextStepCommand):
    """A command that makes a step, or a part of one, of samples."""

    sample_versions: tuple[int, ...] = ()
    """The versions of the policy that made what an RL step is trained on, ascending."""


class TrainCommand(_SamplesCommand):
    """The step itself: optimizer updates, after which the trainer is at this step."""

    consumption: _Consumption = Consumption()
    cursor: dict[str, Any] = {}

    def went_back(self, error: PluginFailed | StepRefused, group: str, back_at: int, *, held: bool
                  ) -> StepRefused | StepsHeld:
        """The error that the actor gets when the step failed after an update: the trainer group went back to step
        ``back_at`` and, if it is ``held``, waits for a person."""
        message = f"{error.message}; step {self.step} had made an update by then, so the {group} is back at step " \
                  f"{back_at}"
        if not held:
            return StepRefused(message, hint=error.hint, went_back=True)
        return StepsHeld(f"{message} and makes no step",
                         hint=" ".join(filter(None, (error.hint, f"correct it, and `elastic-rl restart {group}`"))))


class CurrentStepCommand(_StepCommand):
    """A command about the step that the trainer is at."""


class Update(TrainCommand, BatchCommand):
    """Optimizer updates on a batch: one step."""

    kind: Literal["update"] = "update"
    step_id: _Text = ""
    """Name of the step in a job with a critic; see ``Progress``."""


class Accumulate(_SamplesCommand, BatchCommand):
    """Gradients of one part of a step's samples, added to those of the parts before it; nothing is updated."""

    kind: Literal["accumulate"] = "accumulate"
    part: Annotated[int, Field(ge=0)]
    """Number of the part; 0 begins the step, whatever was accumulated before."""


class Apply(TrainCommand):
    """One optimizer update with the gradients of all parts: one step."""

    kind: Literal["apply"] = "apply"
    parts: int
    """How many parts there are."""


class Check(NextStepCommand, BatchCommand):
    """What the next step would compute with a batch, in one update that is not made. What was accumulated of the step
    is discarded."""

    kind: Literal["check"] = "check"


class ForwardLogprobs(ForwardCommand):
    """Log-probs by the policy."""

    kind: Literal["forward_logprobs"] = "forward_logprobs"


class ForwardReference(NextStepCommand, ForwardCommand):
    """Log-probs by the reference policy of a step."""

    kind: Literal["forward_reference"] = "forward_reference"


class ForwardValues(NextStepCommand, ForwardCommand):
    """Values by a critic, before a step."""

    kind: Literal["forward_values"] = "forward_values"


class ForwardVersion(ForwardCommand):
    """Log-probs by a version of the policy, in a group that does not train."""

    kind: Literal["forward_version"] = "forward_version"
    step: int
    """The RL step that made the policy."""
    at_least: int = 0
    """The least number of the policy's version."""


class Save(CurrentStepCommand):
    """Commit the weights and the trainer_state now."""

    kind: Literal["save"] = "save"
    cursor: dict[str, Any] = {}
    begin_rl: bool = False
    """Whether the SFT phase ends first."""
    publish: bool = False
    """Whether the policy is published too, under a new number: what was published may have been lost."""


class Load(CurrentStepCommand):
    """Go back to a committed state."""

    kind: Literal["load"] = "load"
    version: int
    """Number of the state; 0 for the state that the job began with."""


class Offload(Command):
    """Keep everything in host memory until the next ``Onload``, so that engines may have the devices. Commands that
    compute are refused meanwhile. It changes nothing when it is so already."""

    kind: Literal["offload"] = "offload"


class Onload(Command):
    """Compute on the devices again, once engines have released their memory. It changes nothing when it is so already.
    """

    kind: Literal["onload"] = "onload"


_Any = (Update | Accumulate | Apply | Check | ForwardLogprobs | ForwardReference | ForwardValues | ForwardVersion | Save
        | Load | Offload | Onload)
KINDS: tuple[type[Command], ...] = get_args(_Any)
"""The class of every command."""
_ANY: TypeAdapter[Command] = TypeAdapter(Annotated[_Any, Field(discriminator="kind")])


class WriterGate:
    """Decides at the moment of execution whether a command may run."""

    def __init__(self, epoch: int, group: str, term: int = 0) -> None:
        """``group``: this formation of the trainer group; ``term``: the newest that is known of an actor."""
        self.epoch, self.group, self.term = epoch, group, term
        self._last: tuple[str, dict[str, Any]] | None = None
        """Id and result of the last command that changed something."""
        self._held: tuple[int, StepsHeld] | None = None
        """The term since which no step is made, and why."""

    def claim(self, epoch: int, term: int) -> None:
        """An actor says that it has taken over. Raises Fenced for one that is not the newest."""
        if epoch != self.epoch:
            raise Fenced(f"epoch {epoch} is over; the trainer is of epoch {self.epoch}")
        if term < self.term:
            raise Fenced(f"term {term} of the actor is over; term {self.term} has begun",
                         hint="stop; another replica of the actor runs the job")
        self.term = term

    def admit(self, command: Command, progress: Progress, rule: StalenessRule | None = None) -> dict[str, Any] | None:
        """None when the command is to be executed now; the result of the same command when it has been executed before.
        ``rule``: for the samples of an RL step; None in a group that does not train the policy.

        Raises Fenced for a stale actor, TrainerFailed for a command to an earlier formation, Conflict for a command
        about a step that does not fit the trainer's progress, StaleSamples for one with samples that the rule refuses,
        ConfigError for an RL step that does not say which it has, and StepsHeld for one that is for a further step
        while steps are held.
        """
        self.claim(command.epoch, command.term)
        if command.group != self.group:
            # It was decided on the state of an earlier formation, which may have been ahead of this one.
            raise TrainerFailed("the trainer group has re-formed since the command was sent")
        if self._last is not None and self._last[0] == command.id:
            return self._last[1]
        if isinstance(command, NextStepCommand):
            if self._held is not None and self._held[0] == self.term:
                raise self._held[1]
            if command.phase != progress.phase or command.step != progress.step + 1:
                raise Conflict(f"{command.phase} step {command.step} does not follow: the trainer is at "
                               f"{progress.phase} step {progress.step}", hint="resume from the trainer's state")
            if rule is not None and isinstance(command, _SamplesCommand) and command.phase == "rl":
                if not command.sample_versions:
                    raise ConfigError(f"{command} does not say which policy versions made its samples",
                                      hint="pass the versions of the groups that it is trained on")
                rule.require(command.sample_versions)
            if isinstance(command, TrainCommand):
                progress.consumed.check(command.consumption)
        elif isinstance(command, CurrentStepCommand) and (
                command.phase, command.step) != (progress.phase, progress.step):
            raise Conflict(f"the trainer is at {progress.phase} step {progress.step}, not at {command.phase} step "
                           f"{command.step}", hint="resume from the trainer's state")
        return None

    def hold(self, error: StepsHeld) -> None:
        """A step has failed for what only a person can correct, and the group has gone back for it. No step is made
        until another actor has taken over, or the group has re-formed: it would fail again, and the steps before it
        would be made again and again."""
        self._held = self.term, error

    def executed(self, command: Command, result: dict[str, Any]) -> None:
        """Remembers the result, for an actor whose answer was lost."""
        if isinstance(command, TrainCommand | Save | Load):
            self._last = (command.id, result)


def after_update(progress: Progress, command: TrainCommand) -> Progress:
    """Progress once an admitted step was executed."""
    return progress.replace(step=command.step, step_id=command.step_id if isinstance(command, Update) else "",
                            cursor=dict(command.cursor), consumed=progress.consumed.add(command.consumption))


def after_begin_rl(progress: Progress, command: Save) -> Progress:
    """Progress once the SFT phase has ended."""
    return progress.replace(phase="rl", step=0, step_id="", updates=0, cursor=dict(command.cursor))
