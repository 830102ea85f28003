"""The policy of a job that trains nothing: the weights of its model folder, published once, by the actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from elastic_rl.config import Config, Stream
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.versions import hf_folder
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import model_folder
from elastic_rl.pipeline.untrained.output import Output
from elastic_rl.pipeline.waits import Waits


def output_of(ctx: RunContext, etcd: EtcdClient, writer: FencedWriter, security: Security, waits: Waits, *, term: int,
              file: Path, alive: Callable[[], None]) -> Output:
    """The output of a job that trains nothing, and its policy, for one term of the actor. See ``Output``."""
    cfg = ctx.config

    def show(done: int, total: int) -> None:
        waits.waits("dcs", f"the model's weights to be published: {done >> 20} of {total >> 20} MiB")

    policy = BasePolicy(cfg, etcd, ctx.keys, security, epoch=ctx.epoch, owner=f"actor-{term}",
                        folder=Path(ctx.model_dir), on_progress=show)
    return Output(etcd, ctx.keys, writer, policy, mode=cfg.mode, term=term, file=file, alive=alive)


class BasePolicy:
    """Publishes under the run's epoch: nobody else publishes versions of such a job, but for an actor that has been
    replaced and does not know it yet, and it publishes the same weights."""

    def __init__(self, cfg: Config, etcd: EtcdClient, keys: Keys, security: Security, *, epoch: int, owner: str,
                 folder: Path, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """``folder``: the model folder. ``on_progress``: called with bytes read and, about, in all; may raise."""
        self._cfg, self._etcd, self._keys, self._security = cfg, etcd, keys, security
        self._epoch, self._owner, self._folder, self._on_progress = epoch, owner, folder, on_progress

    def version(self) -> int:
        """Number of the policy's newest version, which is published now if there is none. Raises as ``publish``."""
        head = reads.head(self._etcd, self._keys, Stream.POLICY)
        return head.number if head is not None else self.publish()

    def publish(self) -> int:
        """Number of a new version, which is committed. Raises ConfigError for a folder that cannot be read, and as
        ``Publisher.publish``."""
        dcs = self._cfg.dcs
        with Publisher(self._etcd, self._keys, Stream.POLICY, epoch=self._epoch, owner=self._owner,
                       chunk_bytes=dcs.chunk_bytes, replicas=dcs.replicas, digest=dcs.digest,
                       staging_ttl_s=dcs.staging_ttl_s, io_timeout_s=dcs.io_timeout_s,
                       security=self._security) as publisher:
            return publisher.publish(self._tensors(), meta={"imported": str(self._folder), "by": self._owner}).number

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the model has, in the dtype of the job, as a trainer would publish them."""
        names = frozenset(model_folder.read(self._folder).arch.hf_names())
        dtype = getattr(torch, self._cfg.device.dtype)
        total, done = hf_folder.nbytes_of(self._folder), 0

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self._on_progress(min(done, total), total)

        for name, tensor in hf_folder.read(self._folder, count):
            if name in names:
                yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor
