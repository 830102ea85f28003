"""Groups of ranks that compute with the policy and do not train it: ``actor_fwd`` and ``reference``."""

from __future__ import annotations

from typing import Any

from elastic_rl.config.section import Section


class ForwardConfig(Section):
    enabled: bool = False
    """Whether the job has the group: ranks, and with GPUs as many of these, of its own. They have the weights and no
    optimizer, and take each version that they need from the checkpoint service."""
    trainer: dict[str, Any] = {}
    """Settings of the section ``trainer`` that are different for the group, such as ``tensor_parallel``,
    ``data_parallel`` and ``micro_batch_tokens``."""
