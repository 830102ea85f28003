"""A process that reads versions from the checkpoint service."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from elastic_rl.bench.workers import WorkerFailed, serve
from elastic_rl.config import DcsConfig
from elastic_rl.dcs.fetch import mapping
from elastic_rl.dcs.fetch.puller import HeadWatch, Pulled, Puller
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys

_HEAD_S = 300.0


class VersionReader:
    """Keeps the tensors of the last version until ``release``."""

    def __init__(self) -> None:
        self._puller: Puller | None = None
        self._heads: HeadWatch | None = None
        self._pulled: Pulled | None = None
        self._stream = ""
        self._tensors: dict[str, torch.Tensor] = {}

    def follow(self, endpoint: str, job: str, stream: str, node: str) -> None:
        etcd, keys = EtcdClient([endpoint], call_timeout_s=5.0), Keys(job)
        self._stream = stream
        self._puller = Puller(etcd, keys, f"reader-{time.monotonic_ns()}", io_timeout_s=DcsConfig().io_timeout_s,
                              node=node)
        self._heads = self._puller.watch_head(stream)

    def pull(self, after: int, verify: bool, names: int, nbytes: int) -> dict[str, float]:
        """Waits for a head beyond ``after``, pulls and maps it, and confirms it, as ``engine/runner.py`` does.
        ``verify``: every byte is verified in this process too, though the node has verified every chunk."""
        assert self._puller is not None and self._heads is not None
        version = self._heads.get(_HEAD_S)
        while version is not None and version.number <= after:
            version = self._heads.get(_HEAD_S)
        if version is None:
            raise WorkerFailed("no version came")
        self._pulled = self._puller.pull(self._stream, version.number)
        self._tensors = dict(mapping.load_tensors(self._pulled.reference(verify=verify)))
        self._pulled.confirm()
        return complete(self._tensors, names, nbytes)

    def release(self) -> None:
        self._tensors = {}
        if self._pulled is not None:
            self._pulled.close()
            self._pulled = None


def complete(tensors: Mapping[str, torch.Tensor], names: int, nbytes: int) -> dict[str, float]:
    """The answer of a reader that has so many tensors of so many bytes. Raises WorkerFailed when it has others."""
    at = time.monotonic()
    found = sum(t.nbytes for t in tensors.values())
    if len(tensors) != names or found != nbytes:
        raise WorkerFailed(f"{len(tensors)} tensors of {found} bytes came, not {names} of {nbytes}")
    return {"at": at}


if __name__ == "__main__":
    torch.set_num_threads(1)
    reader = VersionReader()
    serve({"follow": reader.follow, "pull": reader.pull, "release": reader.release})
