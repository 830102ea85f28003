"""The alternatives for getting tensors from one process to others of the same host, each with its best settings.

An ``Exchange`` is the side that writes. ``LOADERS`` are the other side, by kind; they run in processes of ``reader``,
or, for Ray, in actors that answer like one. None of them verifies what it reads.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # engines load a part of this module, and have no use for these
    from elastic_rl.bench.dcs.pull_latency import Exchange, Named, Reader
    from elastic_rl.bench.dcs.testbed import Cluster
    from elastic_rl.bench.dcs.weights import Weights


class FileExchange:
    """Files of one kind, in a folder for each version."""

    def __init__(self, cluster: Cluster, folder: Path, kind: str, nbytes: int,
                 save: Callable[[Path, dict[str, torch.Tensor]], None]) -> None:
        self._cluster, self._folder, self._kind, self._nbytes, self._save = cluster, folder, kind, nbytes, save
        self._count = 0

    @property
    def path(self) -> Path:
        return self._folder / f"v{self._count}"

    def readers(self, count: int) -> list[Reader]:
        from elastic_rl.bench.dcs.testbed import require_ram
        require_ram(self._nbytes * (count + 1 if self._kind == "dcp" else 1))  # each DCP reader has a copy of its own
        out = [self._cluster.worker("benchmarks.dcs.reader") for _ in range(count)]
        for reader in out:
            reader.call("open", kind=self._kind)
        return list(out)

    def write(self, tensors: Named) -> dict[str, Any]:
        self._count += 1
        named = dict(tensors)
        self._save(self.path, named)
        return {"path": str(self.path), "shapes": [[name, list(t.shape)] for name, t in named.items()]}

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def save_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file
    path.mkdir()
    save_file(dict(tensors), path / "model.safetensors")


def read_safetensors(reference: Mapping[str, Any]) -> Named:
    """Views of the mapped file."""
    from safetensors import safe_open
    with safe_open(Path(reference["path"]) / "model.safetensors", framework="pt") as opened:
        yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118 (no mapping)


def save_dcp(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """torch.distributed.checkpoint in one process; a flush to disk is left out, since nothing else here does one."""
    from torch.distributed import checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a missing process group: none is needed
        checkpoint.save(dict(tensors), storage_writer=checkpoint.FileSystemWriter(
            path, single_file_per_rank=False, sync_files=False, thread_count=2), no_dist=True)


class DcpReader:
    """Loads into the same memory each time."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}

    def __call__(self, reference: Mapping[str, Any]) -> Named:
        from torch.distributed import checkpoint
        if not self._state:
            self._state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in reference["shapes"]}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint.load(self._state, storage_reader=checkpoint.FileSystemReader(reference["path"]), no_dist=True)
        return self._state.items()


LOADERS: Mapping[str, Callable[[], Callable[[Mapping[str, Any]], Named]]] = {
    "safetensors": lambda: read_safetensors, "dcp": DcpReader}


def _files(kind: str, save: Callable[[Path, dict[str, torch.Tensor]], None], *, in_memory: bool
           ) -> Callable[[Cluster, Weights], Exchange]:
    def make(cluster: Cluster, weights: Weights) -> Exchange:
        return FileExchange(cluster, cluster.testbed.temporary()[in_memory], kind, weights.nbytes, save)
    return make


def _ray(cluster: Cluster, weights: Weights) -> Exchange:
    from benchmarks.dcs.ray_exchange import RayExchange
    exchange: Exchange = cluster.adopt(RayExchange(cluster.testbed.folder, weights.nbytes))
    return exchange


EXCHANGES: Mapping[str, Callable[[Cluster, Weights], Exchange]] = {
    "safetensors on tmpfs": _files("safetensors", save_safetensors, in_memory=True),
    "safetensors on disk": _files("safetensors", save_safetensors, in_memory=False),
    "torch DCP on tmpfs": _files("dcp", save_dcp, in_memory=True),
    "torch DCP on disk": _files("dcp", save_dcp, in_memory=False),
    "Ray object store": _ray,
}
