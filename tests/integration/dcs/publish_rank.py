"""One rank of a trainer that publishes, without a model: half of the tensors of each version, to a node of its own.
It is a process (``support.forked``) with the arguments

    ETCD JOB EPOCH RANK PORT ROUNDS

Prints ``committed N`` or ``dropped`` after each round, and ``lost: WHY`` when the other rank is lost.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.publish.part_writer import LocalArena
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import TrainerFailed
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.trainer.checkpoint.async_publish import AsyncPublisher, InFlightPublish
from elastic_rl.trainer.checkpoint.owned_tensors import OwnedTensorWriter
from elastic_rl.trainer.megatron.parallel import ParallelDims

TENSORS = 6
STREAMS = ("policy", "trainer_state")


def tensor(version: int, i: int) -> torch.Tensor:
    return torch.full((2000, 8), 100 * version + i, dtype=torch.float32)


def publish_all(etcd_servers: str, job: str, epoch: int, rank: int, rounds: int) -> None:
    cfg, keys = DcsConfig(chunk_bytes=64 << 10, publish_timeout_s=20, io_timeout_s=10), Keys(job)
    with EtcdClient([etcd_servers], call_timeout_s=2.0) as etcd:
        client = DcsClient(etcd, keys, io_timeout_s=10, node=f"n{rank}")
        arena = LocalArena(client)
        publishers = {stream: Publisher(etcd, keys, stream, epoch=epoch, owner="ranks", chunk_bytes=cfg.chunk_bytes,
                                        staging_ttl_s=3, io_timeout_s=10, node="n0") for stream in STREAMS}
        par = ParallelDims(rank, 2, 2, rank, 1, 0, torch.device("cpu"))
        background = AsyncPublisher(par, cfg, etcd, keys, publishers if rank == 0 else {}, lambda: None, "trainer")
        for number in range(1, rounds + 1):
            begun = None
            if rank == 0:
                staged = {stream: publishers[stream].begin({"round": number}) for stream in STREAMS}
                begun = InFlightPublish(staged, {"policy": ("weights",), "trainer_state": ("weights", "extras")},
                                        number)
            share = OwnedTensorWriter(client, arena, cfg)
            for i in range(rank, TENSORS, 2):
                share.add("weights", f"w{i}", tensor(number, i), i)
                share.add("extras", f"adam.w{i}", tensor(number, 50 + i), TENSORS + i)
            background.submit(share, begun)
            print(f"committed {number}" if background.join() else "dropped", flush=True)
        background.close()


def main() -> None:
    etcd_servers, job, epoch, rank, port, rounds = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=2,
                            timeout=timedelta(seconds=30))
    try:
        publish_all(etcd_servers, job, int(epoch), int(rank), int(rounds))
    except TrainerFailed as e:
        print(f"lost: {e.message}", flush=True)
