"""A training job of your own under `torchrun`, with the rendezvous of elastic-rl in etcd: agents may come and go.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:3 --nproc-per-node=1 --max-restarts=10 \\
        --rdzv-backend=elastic-rl-etcd3 --rdzv-endpoint=ETCD:PORT --rdzv-id=my-run examples/torchrun_ddp.py STATE

Run the same command on each machine. STATE is a file that all of them see. A second argument is the number of steps.
docs/torchrun.md says more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 24
"""Samples of a step, over all ranks: the loss does not depend on how many there are."""


def main(state_file: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if state_file.exists():  # a group that forms again, perhaps of another size, goes on from here
        state = torch.load(state_file, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    print(f"rank {rank} of {world} begins with step {first}", flush=True)
    for step in range(first, steps):
        inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(step))
        targets = inputs.sum(dim=1, keepdim=True)
        own = slice(rank, None, world)
        # DDP takes the mean of the ranks' gradients: the sum over the step's samples is that times the ranks.
        loss = ((model(inputs[own]) - targets[own]) ** 2).sum() * world / SAMPLES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            partial = state_file.with_suffix(".partial")
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1},
                       partial)
            os.replace(partial, state_file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
