"""Growth: a long run without faults, in which nothing may grow with its steps. What is measured (``sampler``), and how
it is judged (``check``)."""

from collections.abc import Mapping
from typing import Any

SETTINGS: Mapping[str, Any] = {
    "sft.max_steps": 0, "rollout.engines": 1, "train.prompts_per_step": 2, "train.group_size": 2,
    "train.updates_per_step": 1, "train.eval_every_steps": 1_000_000, "trainer.tensor_parallel": 1,
    "trainer.data_parallel": 1, "coordinator.replicas": 2, "coordinator.max_events": 200,
    "coordinator.max_step_metrics": 200, "model.hidden_size": 32, "model.intermediate_size": 64, "model.num_layers": 1,
    "model.num_heads": 2, "model.num_kv_heads": 1}
"""The job whose steps are as short as steps can be: a third of a second on two free cores. What etcd keeps of the
newest steps and events is so little that it stops growing in the warm-up."""
