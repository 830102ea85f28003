"""The folder of a pool's model on this host: the job's where it is here, else one with the files that the checkpoint
service has of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from elastic_rl.config import PoolSettings, Stream
from elastic_rl.dcs import model_files
from elastic_rl.dcs.publish.growing_stream import GrowingStream
from elastic_rl.errors import ConfigError, ElasticRLError, EngineFailed, Fenced
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.file_lock import taken
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.backoff import RetryBackoff

log = logging.getLogger(__name__)

_LOCK_S = 5.0
"""Longest wait for another engine of this host that brings the files; then it is looked at again."""
_RETRY_S = (0.5, 10.0)
"""First and longest pause after a try."""


class HostModel:
    """What an engine of the pool is started with on this host."""

    def __init__(self, ctx: RunContext, pool: PoolSettings) -> None:
        self._ctx, self._pool, self._paths = ctx, pool, JobPaths.of(ctx.config)
        self.is_here = (Path(pool.model_dir) / model_files.CONFIG).exists()
        """Whether the job's own folder is on this host, as it is on the driver's."""
        self.folder = Path(pool.model_dir) if self.is_here or pool.stream is None else self._paths.engine_model
        """Folder that the server is started with."""
        self.has_weights = pool.stream is None or self.is_here and model_files.has_weights(self.folder)
        """Whether the server is to load weights from it: one that follows a stream need not."""

    def bring(self, etcd: EtcdClient, pause: Callable[[float], bool]) -> None:
        """Returns when the folder is complete, or ``pause(seconds)``, which waits, says that the engine is to leave.
        What cannot be had is tried again without end. Raises EngineFailed where it is never here, and Fenced."""
        if self.is_here:
            return
        if self._pool.stream is None:
            raise EngineFailed(f"there is no model in {self.folder} on host {self._ctx.host}",
                               hint="a pool that serves the weights of a folder needs it on this host")
        cfg, said, retry = self._ctx.config, "", RetryBackoff(*_RETRY_S)
        self._paths.private.mkdir(parents=True, exist_ok=True)
        stream = GrowingStream(etcd, self._ctx.keys, Stream.MODEL, cfg.dcs, epoch=self._ctx.epoch, owner="engine",
                               token=FencedWriter.of_epoch(etcd, self._ctx.keys, self._ctx.epoch),
                               security=dcs_security(cfg))
        try:
            while True:
                try:
                    with self._paths.engine_model_lock.open("w", encoding="utf-8") as lock:
                        if taken(lock, timeout_s=_LOCK_S):
                            model_files.bring(stream, self.folder)
                            return
                except Fenced:
                    raise
                except ConfigError as e:  # of what is published, which stays as it is
                    raise EngineFailed(f"the files of the model cannot be used: {e.message}", hint=e.hint) from e
                except (ElasticRLError, OSError) as e:
                    if said != (said := str(e)):
                        log.warning("the files of the model cannot be had yet: %s", e)
                retry.failed(now := time.monotonic())
                if pause(retry.left_s(now)):
                    return
        finally:
            stream.close()
