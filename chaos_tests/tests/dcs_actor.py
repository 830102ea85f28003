"""One step of the checkpoint service in a process of its own (``support.forked``), so that it can die in the middle
of it. The process's arguments:

    ETCD JOB EPOCH NODE publish SEED | pull | sweep KEEP

Publishes the content of a seed, pulls the head and checks it, or sweeps once; prints the result.
"""

from __future__ import annotations

import sys

from chaos_tests.traffic.dcs import CHUNK_BYTES, content
from elastic_rl.dcs.catalog.garbage_collector import GarbageCollector
from elastic_rl.dcs.catalog.retention import RetentionPolicy
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.publish.publisher import Publisher
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys

LEASE_S = 2


def main() -> None:
    etcd_servers, job, epoch, node, what, *args = sys.argv[1:]
    with EtcdClient([etcd_servers], call_timeout_s=2.0) as etcd:
        keys = Keys(job)
        if what == "publish":
            with Publisher(etcd, keys, "policy", epoch=int(epoch), owner="actor", chunk_bytes=CHUNK_BYTES,
                           staging_ttl_s=LEASE_S, io_timeout_s=10, node=node) as publisher:
                print(publisher.publish(content(int(args[0])), meta={"seed": int(args[0])}).number, flush=True)
        elif what == "pull":
            puller = Puller(etcd, keys, "actor", io_timeout_s=10, node=node)
            with puller, puller.pull("policy") as pulled:
                print(pulled.version.number, flush=True)
        else:
            collector = GarbageCollector(etcd, keys, RetentionPolicy(int(args[0])))
            print(collector.sweep([]), flush=True)
            collector.close()
