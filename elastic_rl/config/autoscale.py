"""Autoscaling of a pool: its mode, bounds and thresholds."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from elastic_rl.config.section import Positive, Seconds, Section

AutoscaleMode = Literal["disabled", "automatic", "dry_run", "external"]
Share = Annotated[float, Field(gt=0, le=1)]


class AutoscaleFields(BaseModel):
    """What an autoscaler goes by. The same for the settings of a job, a change through the API, and the record."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    mode: AutoscaleMode = "disabled"
    """Who sets the pool's desired number of engines. ``automatic``: the leader, from the load of its engines.
    ``dry_run``: nobody, but the leader reports what it would set. ``external``: a scaler of yours, and the bounds hold.
    ``disabled``: operators alone."""
    min_engines: Positive = 1
    """Smallest desired number of engines."""
    max_engines: Positive = 8
    """Largest desired number of engines, at most ``coordinator.max_engines``."""
    queue_high: Annotated[float, Field(gt=0)] = 1.0
    """Requests that wait in an engine, as the mean over the pool, from which on the load is high. With at most a tenth
    of it the load may be low."""
    token_usage_high: Share = 0.85
    """Used share of the engines' KV caches, as the mean over the pool, from which on the load is high. Engines are
    removed only where those that stay would be below it."""
    token_usage_low: Share = 0.4
    """Used share of the KV caches up to which the load is low, where next to no request waits."""
    min_trainer_idle: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the last step in which the trainer waited for samples, below which engines are not added to the pool of
    the policy: the trainer is the bottleneck then. Other pools, and jobs that do not train, do not go by it."""
    up_after_s: Seconds = 30.0
    """Seconds for which the load must be high before engines are added. Seconds in which the run asks for no samples do
    not count."""
    down_after_s: Seconds = 300.0
    """Seconds for which the load must be low before engines are removed, and at least twice the last step's."""
    up_cooldown_s: Seconds = 60.0
    """Seconds after any change of the desired number in which no engines are added."""
    down_cooldown_s: Seconds = 600.0
    """Seconds after any change of the desired number in which none are removed."""
    max_step_up: Positive = 4
    """Most engines that one change adds."""
    max_step_down: Positive = 1
    """Most engines that one change removes."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.min_engines > self.max_engines:
            raise ValueError(f"min_engines={self.min_engines} must not be larger than max_engines={self.max_engines}")
        if self.token_usage_low >= self.token_usage_high:
            raise ValueError(f"token_usage_low={self.token_usage_low:g} must be smaller than token_usage_high="
                             f"{self.token_usage_high:g}: the number of engines would go up and down")
        return self

    @property
    def bounds_hold(self) -> bool:
        """Whether nobody may set a desired number beyond the bounds."""
        return self.mode in ("automatic", "external")


class AutoscaleConfig(AutoscaleFields, Section):
    """Autoscaling of a pool: mode, bounds, thresholds. ``elastic-rl autoscale`` and the API take its place from the
    first change on."""
