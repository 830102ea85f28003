"""The rollout pool and sampling."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class RolloutConfig(Section):
    engines: Annotated[int, Field(ge=1)] = 2
    """Engines that the pool starts with; change it later with ``elastic-rl scale``."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    retries: Positive = 4
    """Attempts for a prompt group before its step fails."""
    ready_timeout_s: Seconds = 240.0
    """Longest wait for an engine that serves the version a step needs."""
