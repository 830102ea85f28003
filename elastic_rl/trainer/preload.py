"""Imported by the fork server alone: what every rank needs, so that a restarted one does not import it again.

Nothing here may start a thread, open a connection or touch CUDA, since ranks are forked from the result. The server
asks to die with the agent: ranks inherit the pipe by which it would otherwise notice, and keep it open.
"""

from __future__ import annotations

import torch

from elastic_rl.runtime import die_with_parent
from elastic_rl.trainer import megatron_cpu

die_with_parent()
if not torch.cuda.is_available():
    megatron_cpu.install()

import megatron.core.distributed  # noqa: E402, F401
import megatron.core.models.gpt.gpt_layer_specs  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401

import elastic_rl.trainer.worker  # noqa: E402, F401
