"""Progress of the training: the part of a trainer_state that is not tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from elastic_rl.data.ledger import ConsumedGroups
from elastic_rl.dcs.catalog.pairs import pair_name
from elastic_rl.dcs.catalog.references import REFERENCE_KEY

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
    """The RL step whose policy is the reference policy, 0 for the policy with which RL began; None without one.
    Of ranks that keep it."""
    reference_version: int = 0
    """Number of the version of the policy that is the reference policy, where another group computes with it; 0 for the
    version of these very weights. By the number and not by its step: after the run has gone back, a step is made again,
    and a version of the first time may still be there."""
    step_id: str = ""
    """Name, in a job with a critic, of the update that made these weights. The actor chose a new one each time that it
    made a step, the same for both groups; empty before RL's first one."""

    @property
    def pair(self) -> str:
        """Name of the state, by which that of the other group is found that belongs to it."""
        return pair_name(self.step if self.phase == "rl" else 0, self.step_id)

    def replace(self, **changes: Any) -> Progress:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The progress as JSON values, for the version's record."""
        return {"phase": self.phase, "step": self.step, "updates": self.updates, "cursor": self.cursor,
                "consumed": self.consumed.to_json(),
                **({"reference": self.reference} if self.reference is not None else {}),
                **({REFERENCE_KEY: self.reference_version} if self.reference_version else {}),
                **({"step_id": self.step_id} if self.step_id else {})}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Ignores keys of other facts in the version's record."""
        return cls(phase="rl" if value.get("phase") == "rl" else "sft", step=int(value.get("step", 0)),
                   updates=int(value.get("updates", 0)), cursor=dict(value.get("cursor") or {}),
                   consumed=ConsumedGroups.from_json(value.get("consumed") or {}),
                   reference=int(value["reference"]) if value.get("reference") is not None else None,
                   reference_version=int(value.get(REFERENCE_KEY, 0)), step_id=str(value.get("step_id", "")))
