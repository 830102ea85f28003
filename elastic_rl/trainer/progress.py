"""Progress of the training: the part of a trainer_state that is not tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from elastic_rl.data.ledger import ConsumedGroups

Phase = Literal["sft", "rl"]


@dataclass(frozen=True)
class Progress:
    """``step`` counts the steps of the current phase: supervised steps in the SFT phase, RL steps after it."""

    phase: Phase = "sft"
    step: int = 0
    updates: int = 0
    """Adam's update count."""
    consumed: ConsumedGroups = ConsumedGroups()
    """The prompt groups that made these weights (I5)."""
    cursor: dict[str, Any] = field(default_factory=dict)
    """What the actor decided up to this step, such as evaluations: sent with each update and returned after a restart.
    JSON-able and small."""
    reference: int | None = None
    """The RL step whose policy is the reference policy, 0 for the policy with which RL began; None without one."""

    def replace(self, **changes: Any) -> Progress:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, for the version's record."""
        return {"phase": self.phase, "step": self.step, "updates": self.updates, "cursor": self.cursor,
                "consumed": self.consumed.to_json(),
                **({"reference": self.reference} if self.reference is not None else {})}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Ignores keys of other facts in the version's record."""
        return cls(phase="rl" if value.get("phase") == "rl" else "sft", step=int(value.get("step", 0)),
                   updates=int(value.get("updates", 0)), cursor=dict(value.get("cursor") or {}),
                   consumed=ConsumedGroups.from_json(value.get("consumed") or {}),
                   reference=int(value["reference"]) if value.get("reference") is not None else None)
