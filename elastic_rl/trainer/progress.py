"""Progress of the training: the part of a trainer_state that is not tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

Phase = Literal["sft", "rl"]


@dataclass(frozen=True)
class Progress:
    """``step`` counts the steps of the current phase: supervised steps in the SFT phase, RL steps after it."""

    phase: Phase = "sft"
    step: int = 0
    updates: int = 0
    """Adam's update count."""
    sft: dict[str, Any] = field(default_factory=dict)
    """Result of the SFT phase once it has ended: steps, eval_accuracy, loss."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """Sent by the controller with the last step; returned to it after a restart."""

    def replace(self, **changes: Any) -> Progress:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the version's record."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Progress:
        """Ignores keys of other facts in the version's record."""
        names = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in value.items() if k in names})
