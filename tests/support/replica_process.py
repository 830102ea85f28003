"""A replica of the election that does nothing but lead, as a process (``support.forked``) with the arguments ENDPOINTS
JOB NAME TTL_S.

While it believes that it leads, it writes ``NAME n`` to the job's status key under its fencing token, as fast as
possible.
"""

from __future__ import annotations

import sys
import time

from elastic_rl.coordinator.election.election import Election
from elastic_rl.errors import Fenced
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import ClusterKeys, Keys


def main() -> None:
    endpoints, job, name, ttl_s = sys.argv[1:]
    keys = Keys(job)
    etcd = EtcdClient(endpoints.split(","))
    election = Election(etcd, ClusterKeys(keys.job), name, f"http://{name}", int(ttl_s)).start()
    n = 0
    while True:
        time.sleep(0.01)
        try:
            n += etcd.txn(election.guard, [Op.put(keys.job_status(), f"{name} {n}".encode())]).succeeded
        except Fenced:
            continue
