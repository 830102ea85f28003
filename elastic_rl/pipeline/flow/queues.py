"""The registry of group queues (``train.queue``)."""

from __future__ import annotations

from elastic_rl.config import Config
from elastic_rl.pipeline.flow.group_queue import EmbeddedQueue, GroupQueue
from elastic_rl.pipeline.flow.transfer_queue import TransferQueueQueue


def make_queue(cfg: Config, capacity: int, host: str) -> GroupQueue:
    """The queue that ``train.queue`` names, of so many groups. ``host``: IP address at which the ranks of the run reach
    this host; the queue binds no other one. Raises ConfigError."""
    if cfg.train.queue == "transfer_queue":
        return TransferQueueQueue(capacity, units=cfg.train.queue_units, call_s=cfg.train.queue_call_timeout_s,
                                  host=host)
    return EmbeddedQueue(capacity)
