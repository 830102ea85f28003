"""A member that counts steps: ``python member_process.py ENDPOINTS JOB ROLE ID TTL_S``."""

from __future__ import annotations

import sys
import time

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership
from elastic_rl.runtime import die_with_parent


def main() -> None:
    die_with_parent()
    endpoints, job, role, member_id, ttl_s = sys.argv[1:]
    member = Membership(EtcdClient(endpoints.split(",")), Keys(job), role, member_id, ttl_s=int(ttl_s)).start()
    step = 0
    while True:
        step += 1
        member.progress(step, "counting")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
