"""A rank over gloo: ``python -m support.ray_probe_rank STORE RANK RANKS FILE``. Counts its all-reduces in the file."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    store, rank, ranks, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
                            timeout=timedelta(minutes=30))
    done = 0
    while True:
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == ranks
        done += 1
        file.write_text(str(done))
        time.sleep(0.2)


if __name__ == "__main__":
    main()
