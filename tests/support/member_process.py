"""A member that counts steps, as a process (``support.forked``) with the arguments ENDPOINTS JOB ROLE ID TTL_S and,
where an agent collects its heartbeats, FOLDER HOST.

Each line on its standard input is a number of seconds for which it holds the GIL, so that none of its threads runs.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from pathlib import Path

from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.heartbeat_folder import HeartbeatFolder
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import Membership

_holding_the_gil = ctypes.PyDLL(None)
"""Calls of functions of a PyDLL, unlike those of a CDLL, do not release it."""


def hold_the_gil_as_told() -> None:
    for line in sys.stdin:
        end = time.monotonic() + float(line)
        while time.monotonic() < end:  # a signal ends a sleep
            _holding_the_gil.usleep(ctypes.c_uint(int(max(0.0, end - time.monotonic()) * 1e6)))


def main() -> None:
    endpoints, job, role, member_id, ttl_s, *collected = sys.argv[1:]
    heartbeats = HeartbeatFolder(Path(collected[0]), collected[1]) if collected else None
    member = Membership(EtcdClient(endpoints.split(",")), Keys(job), role, member_id, ttl_s=int(ttl_s),
                        heartbeats=heartbeats).start()
    threading.Thread(target=hold_the_gil_as_told, daemon=True).start()
    step = 0
    while True:
        step += 1
        member.progress(step, "counting")
        time.sleep(0.05)
