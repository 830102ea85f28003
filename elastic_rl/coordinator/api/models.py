"""Bodies of requests, and of answers that are not records."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

from elastic_rl.config.autoscale import AutoscaleFields
from elastic_rl.coordinator.alerts.silences import LONGEST_S
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.api.auth import Role
from elastic_rl.coordinator.autoscalers import AutoscalerView
from elastic_rl.coordinator.hosts.times import LONGEST_DRAIN_S
from elastic_rl.coordinator.hosts.view import HostView
from elastic_rl.coordinator.job_view import JobView
from elastic_rl.coordinator.pools import PoolView
from elastic_rl.etcd.cluster_records import Drain
from elastic_rl.etcd.records import Engine, Event, Member, Operation, SampleRecord, Silence, StepMetrics, Version


class Body(BaseModel):
    """Body of a request: unknown fields are refused, and values are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Scale(Body):
    desired: StrictInt = Field(examples=[4])
    """Desired number of engines, from 1 to coordinator.max_engines."""


class AutoscalerChange(AutoscaleFields, Body):
    """Autoscaling of a pool as it is to be; what is left out has its default."""

    model_config = ConfigDict(strict=True, title="AutoscalerChange")


class EngineDrain(Body):
    replace: StrictBool = True
    """Whether another engine takes its place; if not, the pool's desired number goes down by one."""


class HostDrain(Body):
    within_s: float = Field(default=600.0, ge=0, le=LONGEST_DRAIN_S, allow_inf_nan=False, strict=True)
    """Seconds within which each singleton may choose when it moves; after that it is moved."""


class HostChange(Body):
    """What changes of what is wanted of a host; a field that is left out stays as it is."""

    cordoned: StrictBool = False
    """Whether the host is given nothing more; it keeps what it has."""
    drain: HostDrain | None = None
    """Has the host emptied; null withdraws that. Another request restarts its deadline."""
    reason: StrictStr = Field(default="", max_length=500, examples=["new kernel"])
    """Why, for the other operators; it takes the place of the reason before. That of a drain stays as long as that."""

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not {"cordoned", "drain"} & self.model_fields_set:
            raise ValueError("name `cordoned` or `drain`")
        return self

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of ``HostSpec`` that change."""
        found = {name: getattr(self, name) for name in self.model_fields_set}
        if self.drain is not None:
            found["drain"] = Drain(within_s=self.drain.within_s)
        return found


class NewExternalEngine(Body):
    url: StrictStr = Field(min_length=1, max_length=300, examples=["http://10.0.0.9:30000"])
    """URL of an SGLang server on a host of the cluster, as ``http://HOST:PORT`` or ``https://HOST:PORT``."""
    pool: StrictStr = Field(default="rollout", min_length=1, max_length=200)
    """The pool that it joins. It does not count towards the pool's desired number."""
    via: StrictStr = Field(default="", max_length=100, examples=["gpu-7"])
    """Name of the host of the cluster that it is on, whose checkpoint node gives it its weights; empty: the host of
    the run."""


class NewRestart(Body):
    target: StrictStr = Field(min_length=1, max_length=200, examples=["trainer"])
    """``engines/ID``, ``roles/NAME``, ``trainer``, ``critic``, ``actor_fwd``, ``reference``, ``driver`` or ``job``."""
    reason: StrictStr = Field(default="", max_length=500)
    """Why, for the events."""


class NewSilence(Body):
    duration_s: float = Field(gt=0, le=LONGEST_S, allow_inf_nan=False, strict=True, examples=[3600])
    """Length of the silence, which starts now."""
    kind: StrictStr = Field(default="*", min_length=1, max_length=500, examples=["engine.*"])
    subject: StrictStr = Field(default="*", min_length=1, max_length=500)
    comment: StrictStr = Field(default="", max_length=500)
    """Why, for the other operators."""


class NewSessionLink(Body):
    role: Role | None = None
    """Role of the session that it opens, at most that of the token; null: that of the token."""


class NewSession(Body):
    link: StrictStr = Field(default="", max_length=200)
    """A link that was not used yet; empty: the request has a token instead."""


class SessionView(BaseModel):
    """A caller: the owner of a token, or a browser with a session."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: str
    """Name of the token."""
    role: Role
    expires_at: float | None = None
    """Unix seconds; null for a token, which does not expire."""


class SessionLink(SessionView):
    link: str
    """Opens one session, once, before ``expires_at``."""


class _Page(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    next: str | None
    """The value of ``after`` for the next page; null on the last one."""


class JobPage(_Page):
    items: list[JobView]


class HostPage(_Page):
    items: list[HostView]


class PoolPage(_Page):
    items: list[PoolView]


class AutoscalerPage(_Page):
    items: list[AutoscalerView]


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


class SamplePage(_Page):
    items: list[SampleRecord]


class ReplicaHealth(BaseModel):
    status: str
    replica: str


class Readiness(ReplicaHealth):
    leader: str | None


class RequestError(BaseModel):
    pointer: str
    detail: str


class ProblemBody(BaseModel):
    """An error, as of RFC 9457."""

    model_config = ConfigDict(extra="allow", title="Problem", use_attribute_docstrings=True)

    type: str
    """Stable: programs may decide by it."""
    title: str
    status: int
    detail: str
    """The problem in words, for people; the text may change."""
    instance: str
    errors: list[RequestError] = []
    """What is wrong, and where in the request."""
