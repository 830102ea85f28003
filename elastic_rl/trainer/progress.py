"""Where a run stands in training: the part of a trainer_state that is not tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

Phase = Literal["sft", "rl"]


@dataclass(frozen=True)
class Progress:
    """``step`` counts the current phase's steps: supervised ones in SFT phase, RL steps after it."""

    phase: Phase = "sft"
    step: int = 0
    updates: int = 0
    """Adam's update count."""
    sft: dict[str, Any] = field(default_factory=dict)
    """Result of the SFT phase once it ended: steps, eval_accuracy, loss."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """What the controller gave with the last step; handed back after a restart."""

    def replace(self, **changes: Any) -> Progress:
        return replace(self, **changes)

    def meta(self) -> dict[str, Any]:
        """As JSON values, for the version's record."""
        return asdict(self)

    @classmethod
    def of(cls, meta: dict[str, Any]) -> Progress:
        names = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in meta.items() if k in names})
