"""The registry of group queues (``train.queue``)."""

from __future__ import annotations

from elastic_rl.config import Config
from elastic_rl.pipeline.fully_async.group_queue import EmbeddedQueue, GroupQueue
from elastic_rl.pipeline.fully_async.transfer_queue import TransferQueueQueue


def make_queue(cfg: Config, capacity: int) -> GroupQueue:
    """The queue that ``train.queue`` names, of so many groups. Raises ConfigError."""
    if cfg.train.queue == "transfer_queue":
        return TransferQueueQueue(capacity, units=cfg.train.queue_units, call_s=cfg.train.queue_call_timeout_s)
    return EmbeddedQueue(capacity)
