"""The alternatives by which new weights get from a trainer into engines.

An ``Update`` brings the tensors into all engines and returns when the last one has them. Each has its best settings.
None of the alternatives verifies anything, and only the files remain for an engine that comes later.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.dcs import loaders
from benchmarks.dcs.exchanges import save_dcp, save_safetensors
from elastic_rl.bench.dcs.dcs_update import Tensors, Update
from elastic_rl.bench.dcs.engines import BenchEngine, everywhere
from elastic_rl.bench.dcs.testbed import Cluster
from elastic_rl.engine.server.sglang_server import pack
from elastic_rl.net.addresses import free_port


@contextmanager
def from_disk(cluster: Cluster, engines: Sequence[BenchEngine], *, in_memory: bool) -> Iterator[Update]:
    """SGLang's ``update_weights_from_disk`` of a safetensors file."""
    folder = cluster.testbed.temporary()[in_memory] / "model"
    # The folder that the engines started from, but for the weights.
    source = Path(engines[0].folder)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))

    def update(tensors: Tensors) -> None:
        partial = folder.with_name("partial")
        save_safetensors(partial, dict(tensors))
        (partial / "model.safetensors").rename(folder / "model.safetensors")
        partial.rmdir()
        everywhere(engines, lambda e: e.post("/update_weights_from_disk", model_path=str(folder), flush_cache=True))

    yield update
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def from_dcp(cluster: Cluster, engines: Sequence[BenchEngine], *, in_memory: bool) -> Iterator[Update]:
    """torch DCP saved by the trainer, and loaded inside each scheduler."""
    folder = cluster.testbed.temporary()[in_memory] / "dcp"

    def update(tensors: Tensors) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        save_dcp(folder, dict(tensors))
        request = {"path": str(folder), "shapes": [[name, list(t.shape)] for name, t in tensors]}
        everywhere(engines, lambda e: e.session(lambda: e.post(
            "/update_weights_from_tensor", serialized_named_tensors=[pack(request)], load_format=loaders.DCP)))

    yield update
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def from_distributed(cluster: Cluster, engines: Sequence[BenchEngine], *, bucket: bool) -> Iterator[Update]:
    """SGLang's ``update_weights_from_distributed`` over gloo: one tensor at a time, or all of them in one bucket."""
    from torch import distributed as dist
    name, port, world = f"bench-{'bucket' if bucket else 'each'}", free_port(), len(engines) + 1
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(everywhere, engines, lambda e: e.post(
            "/init_weights_update_group", master_address="127.0.0.1", master_port=port,
            rank_offset=1 + engines.index(e), world_size=world, group_name=name, backend="gloo"))
        group = _join_as_first(name, port, world)
        joined.result()

    def update(tensors: Tensors) -> None:
        body = {"names": [n for n, _ in tensors], "dtypes": ["bfloat16"] * len(tensors),
                "shapes": [list(t.shape) for _, t in tensors], "group_name": name, "flush_cache": True,
                **({"load_format": "flattened_bucket"} if bucket else {})}
        with ThreadPoolExecutor(1) as sender:
            done = sender.submit(everywhere, engines, lambda e: e.session(
                lambda: e.post("/update_weights_from_distributed", **body)))
            if bucket:
                dist.broadcast(torch.cat([t.reshape(-1) for _, t in tensors]).view(torch.uint8), src=0, group=group)
            else:
                for work in [dist.broadcast(t, src=0, group=group, async_op=True) for _, t in tensors]:
                    work.wait()
            done.result()

    try:
        yield update
    finally:
        everywhere(engines, lambda e: e.post("/destroy_weights_update_group", group_name=name))
        dist.destroy_process_group(group)


def _join_as_first(name: str, port: int, world: int) -> Any:
    """Rank 0 of a group beside any default one, joined as SGLang's engines join it: torch has no public call for a
    group that its members start from different programs."""
    from torch.distributed import PrefixStore, distributed_c10d, rendezvous
    etcd, rank, world = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world))
    group, _ = distributed_c10d._new_process_group_helper(
        world, rank, [], distributed_c10d.Backend("gloo"), PrefixStore(name, etcd), group_name=name,
        backend_options=None, timeout=distributed_c10d.default_pg_timeout)
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


@contextmanager
def from_ray(cluster: Cluster, engines: Sequence[BenchEngine], nbytes: int) -> Iterator[Update]:
    """Ray's object store: one put by the trainer; an actor beside each engine gets the arrays and hands them to
    SGLang's ``update_weights_from_tensor`` through shared memory."""
    from benchmarks.dcs.ray_exchange import RayExchange
    exchange = RayExchange(cluster.testbed.folder, nbytes)
    try:
        feeders = exchange.feeders([e.url for e in engines])

        def update(tensors: Tensors) -> None:
            exchange.write(tensors)
            exchange.feed(feeders)
            exchange.delete()

        yield update
    finally:
        exchange.close()


def checkpoint_engine() -> str:
    """Why PyPI's checkpoint-engine is not among the alternatives."""
    try:
        release = importlib.metadata.version("checkpoint-engine")
        from checkpoint_engine.device_utils import DeviceManager
    except ImportError:
        return "checkpoint-engine is not installed (pip install 'elastic-rl[bench]')"
    try:
        device = DeviceManager().device_type
    except TypeError as e:
        return f"checkpoint-engine {release} hands weights over by CUDA or NPU IPC handles only: {e}"
    return f"checkpoint-engine {release} can run on {device}, where this row has not been written yet"


def alternatives(cluster: Cluster, engines: Sequence[BenchEngine], nbytes: int
                 ) -> dict[str, Callable[[], Any]]:
    """The alternatives by name: context managers that give an ``Update``."""
    return {
        "SGLang from_disk, tmpfs": lambda: from_disk(cluster, engines, in_memory=True),
        "SGLang from_disk, disk": lambda: from_disk(cluster, engines, in_memory=False),
        "SGLang from_distributed, gloo, one bucket": lambda: from_distributed(cluster, engines, bucket=True),
        "SGLang from_distributed, gloo, each tensor": lambda: from_distributed(cluster, engines, bucket=False),
        "Ray object store": lambda: from_ray(cluster, engines, nbytes),
        "torch DCP, tmpfs": lambda: from_dcp(cluster, engines, in_memory=True),
        "torch DCP, disk": lambda: from_dcp(cluster, engines, in_memory=False),
    }
