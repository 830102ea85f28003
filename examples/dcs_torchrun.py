"""The checkpoint service in a training script of your own: each rank of a plain `torchrun` publishes its share of the
weights, and a reader elsewhere gets each version in place. No Ray, no Megatron, no job of elastic-rl.

    elastic-rl up --job=weights                             # etcd, coordinators and a DCS node; nothing of a run
    elastic-rl versions access access.json --job=weights    # where they are, and the token; mode 0600

    torchrun --nproc-per-node=2 examples/dcs_torchrun.py train access.json
    python examples/dcs_torchrun.py read access.json        # in another terminal, before or after

A third argument is the number of steps, or of versions to read. docs/checkpoints/for-others.md says more.
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_rl import dcs
from elastic_rl.errors import VersionNotFound

STREAM = "policy"
QUIET_S = 60.0
"""The reader ends when no version came for so long."""


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def train(access: str, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with dcs.connect(access) as service, ThreadPoolExecutor(1) as background:
        if rank == 0:
            service.take_over()  # a trainer that hangs somewhere and wakes up later publishes nothing any more
        pending: Future[dcs.VersionInfo] | None = None
        held: dcs.Shard | None = None
        for step in range(steps):
            inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(world * step + rank))
            loss = ((model(inputs) - inputs.sum(dim=1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            finish(pending, held)  # the version of the step before, which was committed meanwhile
            # Every rank has all weights here, so they are divided; with FSDP or tensor parallelism a rank publishes
            # what it has, under names for its part.
            state = list(model.module.state_dict().items())
            held = service.write_shard(state[rank::world])  # copied: the optimizer may go on
            shards: list[Any] | None = [None] * world if rank == 0 else None
            dist.gather_object(held.describe(), shards)
            if shards is not None:
                meta = {"step": step, "loss": float(loss.detach())}
                pending = background.submit(service.commit, STREAM, shards, meta=meta)
        finish(pending, held)
    dist.destroy_process_group()


def finish(pending: Future[dcs.VersionInfo] | None, held: dcs.Shard | None) -> None:
    """Waits until a version is committed, on all ranks: until then each of them holds its shard."""
    if pending is not None:
        version = pending.result()
        print(f"committed {version.name} of step {version.meta['step']}, loss {version.meta['loss']:.4f}", flush=True)
    if held is not None:
        dist.barrier()
        held.close()


def read(access: str, versions: int) -> None:
    model, seen = make_model(), 0
    probe = torch.ones(1, 16)
    with dcs.connect(access) as service:
        for version in service.follow(STREAM, timeout_s=QUIET_S):
            try:
                service.pull(version, into=model.state_dict())  # verified; in place, so the model has it now
            except VersionNotFound:  # it was released meanwhile (dcs.keep_versions): a newer one is there
                continue
            seen += 1
            print(f"pulled {version.name}: {version.nbytes} bytes of step {version.meta['step']}, "
                  f"f(1, ..., 1) = {model(probe).item():.4f}", flush=True)
            if seen == versions:
                return
    print(f"no newer version came for {QUIET_S:g} s")


if __name__ == "__main__":
    command, access, *rest = sys.argv[1:]
    {"train": train, "read": read}[command](access, int(rest[0]) if rest else 20)
