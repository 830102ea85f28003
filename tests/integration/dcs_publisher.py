"""A publisher in a process of its own, for tests that kill it in the middle of a publish.

    dcs_publisher.py ETCD JOB EPOCH NODE CHUNK_BYTES

Writes two chunks, says ``written`` on stdout, and then waits for a third that never comes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import torch

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.store import Store
from elastic_rl.dcs.publisher import Publisher


def tensors(chunk_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(3):
        yield f"t{i}", torch.full((chunk_bytes,), 200 + i, dtype=torch.uint8)
    print("written", flush=True)  # two are sealed, the third is in an open region
    threading.Event().wait(120)


if __name__ == "__main__":
    etcd, job, epoch, node, chunk_bytes = sys.argv[1:]
    with Store([etcd], call_timeout_s=2.0) as store:
        publisher = Publisher(store, Keys(job), "policy", epoch=int(epoch), owner="doomed",
                              chunk_bytes=int(chunk_bytes), staging_ttl_s=2, node=node)
        publisher.publish(tensors(int(chunk_bytes)), meta={})
