"""A publisher in a process of its own (``support.forked``), for tests that kill it in the middle of a publish. The
process's arguments:

    ETCD JOB EPOCH NODE CHUNK_BYTES

Writes two chunks, prints ``written``, and then waits for a third that never comes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import torch

from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys


def tensors(chunk_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(3):
        yield f"t{i}", torch.full((chunk_bytes,), 200 + i, dtype=torch.uint8)
    print("written", flush=True)  # two are sealed, the third is in an open region
    threading.Event().wait(120)


def main() -> None:
    etcd_servers, job, epoch, node, chunk_bytes = sys.argv[1:]
    with EtcdClient([etcd_servers], call_timeout_s=2.0) as etcd:
        publisher = Publisher(etcd, Keys(job), "policy", epoch=int(epoch), owner="doomed",
                              chunk_bytes=int(chunk_bytes), staging_ttl_s=2, node=node)
        publisher.publish(tensors(int(chunk_bytes)), meta={})
