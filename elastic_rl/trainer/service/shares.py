"""Shares of batches as a rank takes them: the samples themselves, or what says where in the queue they are."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_rl.config import Config
from elastic_rl.data.batch import Batch
from elastic_rl.data.queue.queued_batch import QueuedShare
from elastic_rl.data.queue.row_client import RemoteSamples
from elastic_rl.errors import ConfigError
from elastic_rl.trainer.service.server import LARGER_PIECES


class Shares:
    """The shares of batches that one rank gets. Any thread may use it."""

    def __init__(self, cfg: Config, *, needs: Sequence[str], vocab: int) -> None:
        """``needs``: tensors that a share for RL must have. ``vocab``: tokens of the model."""
        self._needs, self._vocab, self._limit = needs, vocab, cfg.trainer.share_piece_bytes
        # Imported before the first share comes, which would wait for it.
        self._samples = RemoteSamples(cfg.train.queue_call_timeout_s) if cfg.uses_transfer_queue else None

    def take(self, raw: bytes) -> bytes:
        """A piece of a share as safetensors, from itself or from what says where its samples are. Raises ConfigError
        for what is none or too large; GroupsLost and QueueUnavailable."""
        where = QueuedShare.from_bytes(raw)
        if where is None:
            self._check(Batch.from_bytes(raw))
            return raw
        if self._samples is None:
            raise ConfigError("the share is in a queue that this job does not have")
        if where.read_bytes > self._limit:  # before it is read
            raise ConfigError(f"a piece of a share has up to {where.read_bytes} bytes; the limit is {self._limit}",
                              hint=LARGER_PIECES)
        batch = where.read(self._samples.at(where.address))
        self._check(batch)
        return batch.to_bytes()

    def _check(self, batch: Batch) -> None:
        batch.require_tokens_below(self._vocab)
        if "old_logprobs" in batch or "advantages" in batch:  # for RL; demonstrations have neither
            for name in self._needs:
                batch[name]
