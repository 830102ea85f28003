"""What a trainer group can be asked to do, and who may ask. Pure.

The actor is the only writer of a trainer, and which actor that is changes: Ray Serve replaces a replica that it takes
for dead, and the old one may still have a command in flight. So each command carries the fencing token of its actor
(epoch, term), the formation of the group that it was sent to, and the step that it is about. All are checked when the
command is *executed*: one that waited in the queue while its actor was replaced, or was delivered twice, or to a group
that has re-formed since, changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Self

from elastic_rl.data.ledger import Consumption
from elastic_rl.errors import (
    ConfigError,
    Conflict,
    ElasticRLError,
    Fenced,
    PluginFailed,
    TrainerFailed,
    VersionNotFound,
)
from elastic_rl.trainer.progress import Phase, Progress


class CommandKind(StrEnum):
    UPDATE = "update"
    """Optimizer updates on a batch: one step."""
    ACCUMULATE = "accumulate"
    """Gradients of one part of a step's samples, added to those of the parts before it; nothing is updated."""
    APPLY = "apply"
    """One optimizer update with the gradients of all parts: one step."""
    FORWARD_LOGPROBS = "forward_logprobs"
    """Log-probs of a batch's loss tokens, by the policy or by the reference policy; changes nothing."""
    FORWARD_VALUES = "forward_values"
    """Of a critic: values of a batch's loss tokens; changes nothing."""
    FORWARD_VERSION = "forward_version"
    """Of a group that does not train: log-probs of a batch's loss tokens by a version of the policy."""
    SAVE = "save"
    """Commit the weights and the trainer_state now; may begin the RL phase."""
    LOAD = "load"
    """Go back to a committed state."""
    OFFLOAD = "offload"
    """Colocated with engines: keep everything in host memory until the next ONLOAD. Commands that compute are refused
    meanwhile."""
    ONLOAD = "onload"
    """Back onto the devices, once engines have released their memory. Both change nothing when it is so already."""


STEPS = (CommandKind.UPDATE, CommandKind.APPLY)
CHANGES = (*STEPS, CommandKind.SAVE, CommandKind.LOAD)
_FOR_NEXT_STEP = (*STEPS, CommandKind.ACCUMULATE, CommandKind.FORWARD_VALUES)
_AT_STEP = (CommandKind.SAVE, CommandKind.LOAD)
MOVES = (CommandKind.OFFLOAD, CommandKind.ONLOAD)
REFUSALS: Mapping[str, type[ElasticRLError]] = {
    "fenced": Fenced, "invalid": ConfigError, "conflict": Conflict, "plugin": PluginFailed, "version": VersionNotFound}
"""Errors that refuse a command, by their names in its outcome; any other is a failure of the trainer."""
Weights = Literal["policy", "reference"]


@dataclass(frozen=True)
class Command:
    """One command. ``id``: chosen by the actor; a repetition with the same id is the same command."""

    id: str
    kind: CommandKind
    epoch: int
    term: int
    group: str
    """The formation of the trainer group whose state the actor knows."""
    phase: Phase = "rl"
    step: int = 0
    """UPDATE, ACCUMULATE and APPLY, and FORWARD_LOGPROBS of the reference policy and FORWARD_VALUES, which depend on
    it: the step that this is (for), one more than the trainer's. SAVE: the step that is saved. LOAD: the one that the
    trainer is at. FORWARD_VERSION: the RL step that made the policy."""
    step_id: str = ""
    """UPDATE, of a job with a critic: see ``Progress``."""
    version: int = 0
    """LOAD: number of the state; 0 for the state that the job began with. FORWARD_VERSION: the least number of the
    policy's version."""
    part: int = 0
    """ACCUMULATE: number of the part; 0 begins the step, whatever was accumulated before. APPLY: how many there are."""
    batch: str = ""
    """Name under which the data-parallel ranks hold their shares of the batch."""
    consumption: Consumption = Consumption()
    cursor: Mapping[str, Any] = field(default_factory=dict)
    begin_rl: bool = False
    """SAVE: end the SFT phase first."""
    publish: bool = False
    """SAVE: publish the policy too, under a new number: what was published may have been lost."""
    weights: Weights = "policy"
    """FORWARD_LOGPROBS: whose log-probs."""

    def held(self, error: PluginFailed, group: str, back_at: int) -> PluginFailed:
        """What is told of its step, which failed after an update: the trainer group went back to step ``back_at``, and
        waits for a person."""
        return PluginFailed(f"{error.message}; step {self.step} had made an update by then, so the {group} is back at "
                            f"step {back_at} and makes no step",
                            hint=" ".join(filter(None, (error.hint, f"correct it, and `elastic-rl restart {group}`"))))

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "kind": self.kind, "epoch": self.epoch, "term": self.term, "group": self.group,
                "phase": self.phase, "step": self.step, "batch": self.batch,
                "consumption": self.consumption.to_json(), "cursor": dict(self.cursor), "begin_rl": self.begin_rl,
                "publish": self.publish, "weights": self.weights, "step_id": self.step_id, "version": self.version,
                "part": self.part}

    @classmethod
    def from_json(cls, raw: Any) -> Self:
        """Raises ConfigError for anything but what ``to_json`` returned."""
        try:
            phase: Phase = "rl" if raw["phase"] == "rl" else "sft"
            if raw["phase"] != phase:
                raise ValueError(f"no such phase: {raw['phase']!r}")
            weights: Weights = "reference" if raw.get("weights", "policy") == "reference" else "policy"
            if raw.get("weights", weights) != weights:
                raise ValueError(f"no such weights: {raw['weights']!r:.80}")
            return cls(id=_id(raw["id"]), kind=CommandKind(raw["kind"]), epoch=int(raw["epoch"]),
                       term=int(raw["term"]), group=_text(raw["group"]), phase=phase,
                       step=int(raw["step"]), batch=_text(raw.get("batch", "")),
                       consumption=Consumption.from_json(raw["consumption"]), cursor=dict(raw.get("cursor") or {}),
                       begin_rl=bool(raw.get("begin_rl", False)), publish=bool(raw.get("publish", False)),
                       weights=weights, step_id=_text(raw.get("step_id", "")), version=int(raw.get("version", 0)),
                       part=int(raw.get("part", 0)))
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as e:
            raise ConfigError(f"not a command of the trainer: {type(e).__name__}: {e}") from e

    def encode(self) -> bytes:
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Raises ConfigError."""
        try:
            return cls.from_json(json.loads(raw))
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"a command must be JSON: {e}") from e


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ValueError(f"a name must be text of at most 200 characters, not {value!r:.80}")
    return value


def _id(value: Any) -> str:
    """Clients ask for the result under this name, in a URL, and the answer repeats it."""
    if not (text := _text(value)) or not text.isascii() or not text.isprintable():
        raise ValueError(f"an id must be printable ASCII, not {value!a:.80}")
    return text


class WriterGate:
    """Decides at the moment of execution whether a command may run."""

    def __init__(self, epoch: int, group: str, term: int = 0) -> None:
        """``group``: this formation of the trainer group; ``term``: the newest that is known of an actor."""
        self.epoch, self.group, self.term = epoch, group, term
        self._last: tuple[str, dict[str, Any]] | None = None
        """Id and result of the last command that changed something."""
        self._held: tuple[int, PluginFailed] | None = None
        """Since which term no step is made, and why."""

    def claim(self, epoch: int, term: int) -> None:
        """An actor says that it has taken over. Raises Fenced for one that is not the newest."""
        if epoch != self.epoch:
            raise Fenced(f"epoch {epoch} is over; the trainer is of epoch {self.epoch}")
        if term < self.term:
            raise Fenced(f"term {term} of the actor is over; term {self.term} has begun",
                         hint="stop; another replica of the actor runs the job")
        self.term = term

    def admit(self, command: Command, progress: Progress) -> dict[str, Any] | None:
        """None when the command is to be executed now; the result of the same command when it has been executed before.

        Raises Fenced for a stale actor, TrainerFailed for a command to an earlier formation, Conflict for a command
        about a step that does not fit the trainer's progress, and PluginFailed for one that is for a further step while
        steps are held.
        """
        self.claim(command.epoch, command.term)
        if command.group != self.group:
            # It was decided on the state of an earlier formation, which may have been ahead of this one.
            raise TrainerFailed("the trainer group has re-formed since the command was sent")
        if self._last is not None and self._last[0] == command.id:
            return self._last[1]
        if command.kind in _FOR_NEXT_STEP or command.weights == "reference":
            if self._held is not None and self._held[0] == self.term:
                raise self._held[1]
            if command.phase != progress.phase or command.step != progress.step + 1:
                raise Conflict(f"{command.phase} step {command.step} does not follow: the trainer is at "
                               f"{progress.phase} step {progress.step}", hint="resume from the trainer's state")
            if command.kind in STEPS:
                progress.consumed.check(command.consumption)
        elif command.kind in _AT_STEP and (command.phase, command.step) != (progress.phase, progress.step):
            raise Conflict(f"the trainer is at {progress.phase} step {progress.step}, not at {command.phase} step "
                           f"{command.step}", hint="resume from the trainer's state")
        return None

    def hold(self, error: PluginFailed) -> None:
        """A step has failed for what only a person can correct, and the group has gone back for it. No step is made
        until another actor has taken over, or the group has re-formed: it would fail again, and the steps before it
        would be made again and again."""
        self._held = self.term, error

    def executed(self, command: Command, result: dict[str, Any]) -> None:
        """Remembers the result, for an actor whose answer was lost."""
        if command.kind in CHANGES:
            self._last = (command.id, result)


def after_update(progress: Progress, command: Command) -> Progress:
    """Progress once an admitted UPDATE or APPLY was executed."""
    return progress.replace(step=command.step, step_id=command.step_id, cursor=dict(command.cursor),
                            consumed=progress.consumed.add(command.consumption))


def after_begin_rl(progress: Progress, command: Command) -> Progress:
    """Progress once the SFT phase has ended."""
    return progress.replace(phase="rl", step=0, step_id="", updates=0, cursor=dict(command.cursor))
