"""heartbeat, heartbeat-cpu: a member's heartbeat, and what a thousand members cost the servers.

Each member sends a sign of life every third of ``lease_ttl_s``: a keep-alive of its lease, and each third time its
record with its progress as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from elastic_rl.bench.control.testbed import TTL_S, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.timing import seconds
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Member
from elastic_rl.etcd.transaction import Compare, Op

MEMBERS = 1000
_SETTLE_S = 5.0


def measure(testbed: Testbed) -> Iterator[Row]:
    samples, window_s = effort(testbed)
    with testbed.replicas("a") as replicas:
        times = [t * 1e3 for t in seconds(_heartbeat(testbed, replicas.keys), samples, warm=20)]
        yield Row.of("heartbeat", "a heartbeat until it is acknowledged", times, "ms")
        with testbed.members(replicas.keys, MEMBERS):
            cpu = cpu_of([replicas.process("a"), psutil.Process(testbed.etcd_pid)], window_s)
        yield Row(id="heartbeat-cpu", name=f"CPU of all servers for one of {MEMBERS} members and a second", value=cpu,
                  unit="µs")


def effort(testbed: Testbed) -> tuple[int, float]:
    """Heartbeats that are timed, and seconds for which the CPU time is counted."""
    return (200, 5.0) if testbed.options.quick else (1000, 15.0)


def _heartbeat(testbed: Testbed, keys: Keys) -> Callable[[], None]:
    """Writes a member's record as ``etcd/membership.py`` does."""
    member = Member(role="trainer", id="rank-0", pid=1, host="h", incarnation="i")
    key, lease = keys.member(member.role, member.id), testbed.etcd.grant(10 * TTL_S)
    revision = testbed.etcd.put(key, member.encode(), lease=lease)

    def write() -> None:
        nonlocal revision
        revision = testbed.etcd.txn([Compare.mod(key, "==", revision)],
                                    [Op.put(key, member.replace(beat_at=time.time()).encode(), lease)]).revision

    return write


def cpu_of(servers: Sequence[psutil.Process], window_s: float) -> float:
    """Microseconds of the servers' CPU for a member and a second."""
    time.sleep(_SETTLE_S)
    busy, began = sum(sum(p.cpu_times()[:2]) for p in servers), time.monotonic()
    time.sleep(window_s)
    took = time.monotonic() - began
    return (sum(sum(p.cpu_times()[:2]) for p in servers) - busy) / took / MEMBERS * 1e6
