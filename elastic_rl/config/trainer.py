"""The Megatron trainer group."""

from __future__ import annotations

from elastic_rl.config.section import Positive, Seconds, Section


class TrainerConfig(Section):
    tensor_parallel: Positive = 2
    pipeline_parallel: Positive = 1
    """Stages that the layers are divided into, evenly."""
    data_parallel: Positive = 1
    micro_batch_size: Positive = 512
    """Sequences a rank puts through the model at once."""
    max_restarts: Positive = 10
    """Re-formations of the trainer group before the run stops and alerts."""
    collective_timeout_s: Seconds = 60.0
    """A collective that takes longer ends the rank; the group then re-forms."""
    start_timeout_s: Seconds = 120.0
    step_timeout_s: Seconds = 120.0
    """Longest wait of the controller for one train step."""

    @property
    def ranks(self) -> int:
        """Processes of the trainer group."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel
