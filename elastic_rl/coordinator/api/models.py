"""Bodies of requests and answers that are not records."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from elastic_rl.coordinator.alerts.silences import LONGEST_S
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.pools import PoolView
from elastic_rl.etcd.records import Engine, Event, Member, Operation, Silence, StepMetrics, Version


class Body(BaseModel):
    """Of a request: no unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Scale(Body):
    desired: StrictInt = Field(examples=[4])
    """Engines that the pool shall have, from 1 to coordinator.max_engines."""


class Drain(Body):
    replace: StrictBool = True
    """Whether another engine takes its place; if not, the pool is wanted one smaller from then on."""


class Adopt(Body):
    url: StrictStr = Field(min_length=1, max_length=300, examples=["http://10.0.0.9:30000"])
    """Of an SGLang server on a host of the job, as ``http://HOST:PORT``."""
    pool: StrictStr = Field(default="rollout", min_length=1, max_length=200)
    """It takes part in this pool, beyond the number of engines that is wanted of it."""


class RestartOf(Body):
    target: StrictStr = Field(min_length=1, max_length=200, examples=["trainer"])
    """``engines/ID``, ``roles/NAME``, ``trainer`` or ``job``."""
    reason: StrictStr = Field(default="", max_length=500)
    """Why, for the events."""


class SilenceOf(Body):
    duration_s: float = Field(gt=0, le=LONGEST_S, allow_inf_nan=False, strict=True, examples=[3600])
    """Seconds from now on."""
    kind: StrictStr = Field(default="*", min_length=1, max_length=500, examples=["engine.*"])
    subject: StrictStr = Field(default="*", min_length=1, max_length=500)
    comment: StrictStr = Field(default="", max_length=500)
    """Why, for others."""


class _Page(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    next: str | None
    """Give it as ``after`` for the next page; null on the last one."""


class PoolPage(_Page):
    items: list[PoolView]


class EnginePage(_Page):
    items: list[Engine]


class OperationPage(_Page):
    items: list[Operation]


class VersionPage(_Page):
    items: list[Version]


class MemberPage(_Page):
    items: list[Member]


class AlertPage(_Page):
    items: list[Alert]


class SilencePage(_Page):
    items: list[Silence]


class EventPage(_Page):
    items: list[Event]


class StepPage(_Page):
    items: list[StepMetrics]


class Health(BaseModel):
    status: str
    replica: str


class Readiness(Health):
    leader: str | None


class FaultOfRequest(BaseModel):
    pointer: str
    detail: str


class ProblemBody(BaseModel):
    """An error, as of RFC 9457."""

    model_config = ConfigDict(extra="allow", title="Problem", use_attribute_docstrings=True)

    type: str
    """Stable: decide by it."""
    title: str
    status: int
    detail: str
    """For people; may change."""
    instance: str
    errors: list[FaultOfRequest] = []
    """What is wrong where in the request."""

    @classmethod
    def example(cls, **values: Any) -> dict[str, Any]:
        return cls(**values).model_dump(exclude_defaults=True)
