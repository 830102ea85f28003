"""Pools of engines: the one of the policy, and further ones with models of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any

from pydantic import Field

from elastic_rl.config.autoscale import AutoscaleConfig
from elastic_rl.config.dcs import Stream
from elastic_rl.config.engine import EngineConfig
from elastic_rl.config.host_selector import HostSelector
from elastic_rl.config.section import PathText, Positive, Section

ROLLOUT_POOL = "rollout"
"""Name of the pool that serves the policy."""
PoolName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,30}[a-z0-9])?$")]


class PoolConfig(Section):
    """A further pool of engines, such as that of a judge (``rollout.reward=genrm``) or a teacher."""

    model: Annotated[PathText, Field(min_length=1)]
    """Hugging Face folder of the model that its engines serve, with the weights that are in it; at this path on every
    host. Any model that SGLang serves."""
    engines: Positive = 1
    """Number of engines that the pool starts with; change it later with ``elastic-rl scale --pool=NAME``."""
    autoscale: AutoscaleConfig = AutoscaleConfig()
    host_selector: HostSelector = {}
    """Labels that a host must have, all of them with these values, for engines of the pool to be placed on it
    (``elastic-rl node --label``), in a cluster with a name. Such a host has the folder ``model``. Empty: the pool is on
    the host of the run. Engines that run stay where they are when labels change."""
    engine: dict[str, Any] = {}
    """Settings of the section ``engine`` that are different for this pool, such as ``max_total_tokens`` and
    ``extra_args``."""


@dataclass(frozen=True)
class PoolSettings:
    """What the engines of a pool are."""

    name: str
    model_dir: str
    """Hugging Face folder of their model."""
    stream: Stream | None
    """Stream whose versions the engines serve; None: the weights of the folder, which never change."""
    engines: int
    """Number of engines that the pool starts with."""
    engine: EngineConfig
    colocated: bool = False
    """Whether its engines share devices with the trainer, in alternation."""
    host_selector: HostSelector = field(default_factory=dict)
    """Labels of the hosts that its engines may be on; empty: any host that its weights can be on."""
    reads_text: bool = False
    """Whether some requests have texts with which a response ends, so that its engines need their tokenizer."""
    unseeded: bool = False
    """Whether ``min_p`` of some requests is why it has no seeds for any, with ``engine.seeded_sampling=auto``."""
    template_date: date | None = None
    """The date of ``data.template_date``, for the chat template of its model."""

    @property
    def max_unavailable(self) -> int | str | None:
        """``engine.max_unavailable`` of the pool, with its default; None: no limit, or the engines never update."""
        return None if self.stream is None or self.engine.max_unavailable == "auto" else self.engine.max_unavailable

    def call_timeout_s(self, attempts: int) -> float:
        """Limit of a call of a role that asks the pool, in seconds: more than the role takes for so many attempts."""
        return self.engine.request_timeout_s * (attempts + 1)


def slots_of(limit: str | int, engines: int) -> int:
    """Engines of ``engines`` that may pause at once, at least one. ``limit``: ``engine.max_unavailable``, but for
    ``auto``; a percentage is rounded down. Pure."""
    if isinstance(limit, int):
        return limit
    return max(1, engines * int(limit.rstrip("%")) // 100)
