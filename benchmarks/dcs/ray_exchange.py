"""Ray's object store as a way for tensors: one ``put``, and actors that ``get`` views of its shared memory."""

from __future__ import annotations

import base64
import io
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
import torch

from elastic_rl.bench.dcs.testbed import FOLDER_PREFIX
from elastic_rl.runtime.process import RAY_PRIORITY

_SPARE_BYTES = 256 << 20
_LOGICAL_CPUS = 64
_FEED_S = 120.0


class RayExchange:
    """A separate Ray whose object store holds two versions."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ |= RAY_PRIORITY  # as in a job
        # Short, since Ray puts sockets below it, whose paths are limited to 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
        self._refs: list[Any] = []
        self._actors: list[Any] = []
        try:
            ray.init(address="local", num_cpus=_LOGICAL_CPUS, include_dashboard=False, log_to_driver=False,
                     object_store_memory=2 * nbytes + _SPARE_BYTES, _temp_dir=str(self._folder),
                     _node_ip_address="127.0.0.1", logging_level=logging.ERROR)
        except BaseException:  # an interrupt, too
            self.close()
            raise

    def readers(self, count: int) -> list[Any]:
        self._actors = [ray.remote(num_cpus=1)(_RayReader).remote() for _ in range(count)]
        return [_Remote(actor, self._refs) for actor in self._actors]

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        # As integers: numpy has no bfloat16, and arrays of its own dtypes are what Ray moves without a copy.
        self._refs[:] = [ray.put({name: tensor.view(torch.uint16).numpy() for name, tensor in tensors})]
        return {}

    def delete(self) -> None:
        self._refs.clear()

    def feeders(self, urls: list[str]) -> list[Any]:
        """An actor beside each engine."""
        return [ray.remote(num_cpus=1)(_Feeder).remote(url) for url in urls]

    def feed(self, feeders: list[Any]) -> None:
        """Has each actor get what was written and give it to its engine; returns when the last engine has it."""
        ray.get([feeder.feed.remote(list(self._refs)) for feeder in feeders], timeout=_FEED_S)

    def close(self) -> None:
        ray.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def in_shared_memory(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Tensors for ``update_weights_from_tensor``, which takes base64 of torch's own pickle with file handles."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(list(named))
    return base64.b64encode(buffer.getvalue()).decode()


class _Remote:
    """An actor that is driven like a worker."""

    def __init__(self, actor: Any, refs: list[Any]) -> None:
        self._actor, self._refs = actor, refs
        self._pending: Any = None

    def send(self, op: str, **fields: Any) -> None:
        fields.pop("reference", None)
        # In a list: a reference that is an argument itself would be resolved before the call.
        self._pending = self._actor.load.remote(list(self._refs), **fields) if op == "load" else \
            self._actor.release.remote()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        found: dict[str, Any] = ray.get(self._pending, timeout=timeout_s)
        return found


class _RayReader:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, refs: list[Any], names: int, nbytes: int) -> dict[str, float]:
        arrays: dict[str, np.ndarray[Any, Any]] = ray.get(refs[0])
        self._tensors = {name: torch.from_numpy(array).view(torch.bfloat16) for name, array in arrays.items()}
        at = time.monotonic()
        found = sum(t.nbytes for t in self._tensors.values())
        if len(self._tensors) != names or found != nbytes:
            raise RuntimeError(f"{len(self._tensors)} tensors of {found} bytes came, not {names} of {nbytes}")
        return {"at": at}

    def release(self) -> dict[str, float]:
        self._tensors = {}
        return {}


class _Feeder:
    def __init__(self, url: str) -> None:
        torch.set_num_threads(1)
        self._url = url
        self._http = httpx.Client(timeout=_FEED_S)

    def feed(self, refs: list[Any]) -> None:
        arrays: dict[str, np.ndarray[Any, Any]] = ray.get(refs[0])
        named = [(name, torch.from_numpy(array).view(torch.bfloat16)) for name, array in arrays.items()]
        self._post("/begin_weight_update")
        self._post("/update_weights_from_tensor", serialized_named_tensors=[in_shared_memory(named)], flush_cache=True)
        self._post("/end_weight_update")

    def _post(self, path: str, **body: Any) -> None:
        reply = self._http.post(self._url + path, json=body)
        if not reply.is_success or reply.json().get("success") is False:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:300]}")
