"""A publisher that goes on for ever, in a process of its own, so that it can be killed. The process's arguments:

    ETCD JOB EPOCH NODE HISTORY

It prints the number of each version that it has committed, and writes what it does into the file HISTORY, which
``chaos_tests.history.read`` reads. Exits with ``FENCED_EXIT`` when its epoch is over.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from chaos_tests.history import Recorder
from chaos_tests.traffic.dcs import SteppedPublisher
from elastic_rl.errors import Fenced
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys

FENCED_EXIT = 3


def main() -> int:
    endpoint, job, epoch, node, history = sys.argv[1:]
    with EtcdClient([endpoint], call_timeout_s=2.0) as etcd:
        name, recorder = f"publisher-{secrets.token_hex(3)}", Recorder(Path(history))
        publisher = SteppedPublisher(etcd, Keys(job), int(epoch), name, recorder, node=node)
        try:
            while True:
                print(publisher.publish(secrets.randbits(40)), flush=True)
        except Fenced:
            return FENCED_EXIT


if __name__ == "__main__":
    sys.exit(main())
