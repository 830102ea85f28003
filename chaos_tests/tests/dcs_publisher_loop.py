"""A publisher that goes on for ever, in a process of its own (``support.forked``), so that it can be killed. The
process's arguments:

    ETCD JOB EPOCH NODE

Every version's bytes follow from the seed in its meta, so a reader can check whether it is whole. Exits with 3
when its epoch is over.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator

import torch

from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.errors import Fenced
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys

CHUNK_BYTES = 32 << 10
TENSORS = 6
FENCED_EXIT = 3


def content(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors [12_000] fp32, about nine chunks in all."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(TENSORS):
        yield f"t{i}", torch.rand(12_000, generator=generator)


def main() -> int:
    etcd_servers, job, epoch, node = sys.argv[1:]
    with EtcdClient([etcd_servers], call_timeout_s=2.0) as etcd:
        publisher = Publisher(etcd, Keys(job), "policy", epoch=int(epoch), owner=f"publisher-{secrets.token_hex(3)}",
                              chunk_bytes=CHUNK_BYTES, staging_ttl_s=2, node=node)
        try:
            while True:
                seed = secrets.randbits(40)
                version = publisher.publish(content(seed), meta={"seed": seed})
                print(version.number, flush=True)
        except Fenced:
            return FENCED_EXIT
