"""The rollout pool and sampling."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class RolloutConfig(Section):
    engines: Annotated[int, Field(ge=1)] = 2
    """Number of engines that the pool starts with; change it later with ``elastic-rl scale``."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    max_attempts: Positive = 4
    """Number of attempts to generate a prompt group before the step fails."""
    ready_timeout_s: Seconds = 240.0
    """Seconds that a step waits for an engine that serves the weight version it needs."""
