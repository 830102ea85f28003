"""One step of the checkpoint service in a process of its own, so that it can die in the middle of it.

    hub_actor.py ETCD JOB EPOCH NODE publish SEED | pull | sweep KEEP

Publishes the content of a seed, pulls the head and checks it, or sweeps once; prints what came of it.
"""

from __future__ import annotations

import sys

from hub_publisher import CHUNK_BYTES, content

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.store import Store
from elastic_rl.dcs.janitor import Janitor
from elastic_rl.dcs.publisher import Publisher
from elastic_rl.dcs.puller import Puller
from elastic_rl.dcs.retention import Keep
from elastic_rl.processes import die_with_parent

LEASE_S = 2


def main(etcd: str, job: str, epoch: str, node: str, what: str, *args: str) -> None:
    die_with_parent()
    with Store([etcd], call_timeout_s=2.0) as store:
        keys = Keys(job)
        if what == "publish":
            with Publisher(store, keys, "policy", epoch=int(epoch), owner="actor", chunk_bytes=CHUNK_BYTES,
                           staging_ttl_s=LEASE_S, io_timeout_s=10, node=node) as publisher:
                print(publisher.publish(content(int(args[0])), meta={"seed": int(args[0])}).number, flush=True)
        elif what == "pull":
            puller = Puller(store, keys, "actor", pin_ttl_s=LEASE_S, io_timeout_s=10, node=node)
            with puller, puller.pull("policy") as pulled:
                print(pulled.version.number, flush=True)
        else:
            janitor = Janitor(store, keys, Keep(int(args[0])))
            print(janitor.sweep([]), flush=True)
            janitor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
