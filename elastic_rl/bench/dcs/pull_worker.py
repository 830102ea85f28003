"""A process that gets versions and holds them: from the checkpoint service, or from one of the alternatives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from elastic_rl.bench.dcs.exchanges import READERS
from elastic_rl.bench.workers import WorkerFailed, serve
from elastic_rl.dcs.fetch import mapping
from elastic_rl.dcs.fetch.puller import HeadWatch, Pulled, Puller
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys

_HEAD_S = 300.0


class Holder:
    """Holds what it got last, until it is told to rest."""

    def __init__(self) -> None:
        self._puller: Puller | None = None
        self._heads: HeadWatch | None = None
        self._pulled: Pulled | None = None
        self._stream = ""
        self._reader: Callable[[Mapping[str, Any]], Iterable[tuple[str, torch.Tensor]]] | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    # -- the checkpoint service --------------------------------------------------------------------------------------
    def follow(self, endpoint: str, job: str, stream: str, node: str) -> None:
        etcd, keys = EtcdClient([endpoint], call_timeout_s=5.0), Keys(job)
        self._stream = stream
        self._puller = Puller(etcd, keys, f"holder-{time.monotonic_ns()}", io_timeout_s=120.0, node=node)
        self._heads = self._puller.watch_head(stream)

    def hold(self, after: int, verify: bool, names: int, nbytes: int) -> dict[str, float]:
        """Waits for a head beyond ``after``, pulls it and maps it. ``verify``: also in this process, though the node
        has verified every chunk."""
        assert self._puller is not None and self._heads is not None
        version = self._heads.get(_HEAD_S)
        while version is not None and version.number <= after:
            version = self._heads.get(_HEAD_S)
        if version is None:
            raise WorkerFailed("no version came")
        self._pulled = self._puller.pull(self._stream, version.number)
        return self._got(mapping.load_tensors(self._pulled.reference(verify=verify)), names, nbytes)

    def rest(self) -> None:
        """Lets go of what is held."""
        self._tensors = {}
        if self._pulled is not None:
            self._pulled.close()
            self._pulled = None

    # -- the others --------------------------------------------------------------------------------------------------
    def open(self, kind: str) -> None:
        self._reader = READERS[kind]()

    def load(self, reference: dict[str, Any], names: int, nbytes: int) -> dict[str, float]:
        assert self._reader is not None
        return self._got(self._reader(reference), names, nbytes)

    def _got(self, tensors: Iterable[tuple[str, torch.Tensor]], names: int, nbytes: int) -> dict[str, float]:
        self._tensors = dict(tensors)
        at = time.monotonic()
        found = sum(t.nbytes for t in self._tensors.values())
        if len(self._tensors) != names or found != nbytes:
            raise WorkerFailed(f"{len(self._tensors)} tensors of {found} bytes came, not {names} of {nbytes}")
        return {"at": at}


if __name__ == "__main__":
    torch.set_num_threads(1)
    holder = Holder()
    serve({"follow": holder.follow, "hold": holder.hold, "rest": holder.rest, "open": holder.open,
           "load": holder.load})
