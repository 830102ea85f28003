"""Imported by the fork server only: everything that a rank imports, so that a restarted rank does not import it again.

Nothing here may start a thread, open a connection or touch CUDA, since ranks are forked from the result. The server
sets its parent-death signal itself: it cannot rely on the pipe to the agent, which ranks inherit and keep open.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # until all is imported: modules are no garbage, and to look for some takes a fifth of the time

import torch
import torch._dynamo  # torch's optimizers import it when they are first called

from elastic_rl.runtime.file_tags import tag_temporary_files
from elastic_rl.runtime.process import die_with_parent, freeze_heap
from elastic_rl.trainer.megatron import megatron_cpu

die_with_parent()
tag_temporary_files()
if not torch.cuda.is_available():
    megatron_cpu.install()

import megatron.core.distributed
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer  # noqa: F401

import elastic_rl.trainer.rank  # noqa: F401

freeze_heap()  # a collection in a rank would write to the pages that it shares with the others
gc.enable()
