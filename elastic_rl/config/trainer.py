"""The Megatron trainer group."""

from __future__ import annotations

from elastic_rl.config.section import Positive, Seconds, Section


class TrainerConfig(Section):
    tensor_parallel: Positive = 2
    """Number of ranks that each layer is split over. The number of ranks is this times ``pipeline_parallel`` times
    ``data_parallel``."""
    pipeline_parallel: Positive = 1
    """Number of stages that the layers are split into, evenly."""
    data_parallel: Positive = 1
    """Number of model replicas that a batch is split over."""
    cpu_threads: Positive = 1
    """Number of threads with which a rank runs operators on the CPU. More ranks times threads than the host has cores
    is much slower than fewer."""
    micro_batch_size: Positive = 512
    """Number of sequences in one forward and backward pass of a rank."""
    max_restarts: Positive = 10
    """Number of times that the trainer group re-forms after the loss of a rank. After one more loss its agent ends,
    with an alert, and is started again after a backoff."""
    collective_timeout_s: Seconds = 60.0
    """Seconds that a collective may take; a rank that waits longer ends, and the group re-forms."""
    start_timeout_s: Seconds = 120.0
    """Seconds that the trainer group may take to start."""
    step_timeout_s: Seconds = 120.0
    """Seconds that the actor waits for one training step."""

    @property
    def ranks(self) -> int:
        """Number of processes in the trainer group."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel
