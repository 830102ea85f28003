"""The Megatron trainer group."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastic_rl.config.section import Positive, Seconds, Section


class TrainerConfig(Section):
    tensor_parallel: Positive = 1
    """Number of ranks that each layer is split over. The number of ranks is this times ``context_parallel`` times
    ``pipeline_parallel`` times ``data_parallel``."""
    pipeline_parallel: Positive = 1
    """Number of stages that the layers are split into, evenly."""
    context_parallel: Positive = 1
    """Number of ranks that the positions of each sequence are split over, for sequences that are too long for the
    memory of one. Needs ``packing``."""
    data_parallel: Positive = 2
    """Number of model replicas that a batch is split over."""
    min_data_parallel: Positive | None = None
    """Smallest number of model replicas with which the group trains while there is no room for ``data_parallel``, as
    after the loss of a host; it grows again at the next save. None: it waits until there is room for all. The batch of
    a step, its loss and its learning rate are the same with any number."""
    ranks_per_host: Positive | None = None
    """Largest number of ranks on one host. None: as many as have room; those of a CPU all have."""
    cpus_per_rank: Annotated[float, Field(gt=0)] = 0.1
    """CPUs that Ray sets aside for a rank, of those that its host has, beside its GPU. It places ranks by that and
    limits none: by default GPUs bound how many a host takes."""
    expert_parallel: Positive = 1
    """Number of ranks that the experts of each layer of a mixture-of-experts model are split over; a divisor of
    ``data_parallel`` times ``context_parallel`` and of the number of experts."""
    distributed_optimizer: bool = False
    """Whether the replicas of the model share the optimizer's state: each of N replicas keeps and updates a part of the
    master weights and of Adam's moments, about one in N, instead of all. Changing it between two starts of a job keeps
    the state, bit for bit."""
    moe_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the load-balancing loss of a mixture-of-experts model (arXiv 2101.03961), added to the loss of
    each step; 0: none. It is computed for each micro-batch, without its padding."""
    cpu_threads: Positive = 1
    """Number of threads with which a rank runs operators on the CPU. More ranks times threads than the host has cores
    is much slower than fewer."""
    micro_batch_tokens: Positive = 8192
    """Largest number of tokens, padding included, in one forward and backward pass of a rank (of each of the ranks that
    share its sequences); a longer sequence passes alone."""
    packing: bool = True
    """Whether sequences pass through the model one after another in one row, without padding, instead of in a row each
    with others of like lengths. No sequence sees another one."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them (arXiv 2205.05198). ``selective``: the
    scores of the attention, of which fused attention (Transformer Engine, or ``packing``) keeps none anyway. ``full``:
    all but the input of each layer, for about a third more time. Gradients are the same."""
    share_piece_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    """Bytes of one message with samples that a rank takes; the actor sends the share of a replica in pieces of at most
    half as many, or of a single sample. A share has 5 bytes for each token, and for each one that is trained on 4 for
    its log-prob (none in the supervised phase), 4 with log-probs of a reference policy, 4 with an advantage of its own,
    8 for a critic, and 8 (k + 1) with ``algorithm.teacher_top_k``; the rank that receives it may hold four shares in
    host memory."""
    max_restarts: Positive = 10
    """Number of times that the trainer group re-forms after the loss of a rank while the job makes no step in between.
    After one more loss its agent ends, with an alert, and is started again after a backoff. Ranks that end for a step
    which needs too much memory do not count."""
    collective_timeout_s: Seconds = 60.0
    """Seconds that a collective may take in which ranks do the same; a rank that waits longer ends, and the group
    re-forms. It bounds no wait for micro-batches, which may take longer on one replica than on another."""
    start_timeout_s: Seconds = 120.0
    """Seconds that the trainer group may take to start."""
    stop_timeout_s: Seconds = 60.0
    """Seconds that a run which its operator stops may take to commit what it has trained, beside the time for its
    processes to end. It waits for the update in progress, and for no prompt that is being answered. What is not
    committed in time is trained again when the job is resumed."""
    profile_steps: Annotated[list[Positive], Field(max_length=32)] = []
    """Steps that the ranks of ``profile_ranks`` profile, counted from 1 in their phase; of a job with a supervised
    phase those of both phases. A profiled step takes longer. The files are in the folder ``profiles`` of the job, on
    the host of the rank."""
    profile_ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=16)] = [0]
    """Ranks of the trainer group, and of the critic's, that profile the steps of ``profile_steps``."""
    profile: Annotated[list[Literal["trace", "memory"]], Field(min_length=1)] = ["trace"]
    """What is written of a profiled step. ``trace``: what ran when on CPU and GPU, by torch's profiler, for Perfetto
    (ui.perfetto.dev) or chrome://tracing. ``memory``: each allocation of GPU memory with its stack, for
    pytorch.org/memory_viz; a CPU has none."""

    @property
    def ranks(self) -> int:
        """Number of processes in the trainer group."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel * self.data_parallel
