"""heartbeat, heartbeat-cpu: a member's heartbeat, beside that of torchft's lighthouse.

The lighthouse keeps its members in the memory of one process; ours are leased records of etcd, which the next leader
finds. Compared is what both do: acknowledge a heartbeat, and know who sent none for ``lease_ttl_s``. Both get a sign of
life of each member every third of that: the lighthouse a heartbeat, ours a keep-alive of the lease, and each third time
the member's record with its progress as well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator

import psutil

from elastic_rl.bench.control.testbed import TTL_S, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.bench.timing import seconds, with_alternatives
from elastic_rl.bench.workers import Worker
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Member
from elastic_rl.etcd.transaction import Compare, Op

_MEMBERS = 1000
_LIGHTHOUSE = "torchft lighthouse"
_SETTLE_S = 5.0


def measure(testbed: Testbed) -> Iterator[Row]:
    samples, window_s = (200, 5.0) if testbed.options.quick else (1000, 15.0)
    with testbed.replicas("a") as replicas:
        ours = [t * 1e3 for t in seconds(_heartbeat(testbed, replicas.keys), samples, warm=20)]
        latency = Row.of("heartbeat", "a heartbeat until it is acknowledged", ours, "ms")
        yield latency
        with testbed.members(replicas.keys, _MEMBERS):
            cpu = Row(id="heartbeat-cpu", name=f"CPU of all servers for one of {_MEMBERS} members and a second",
                      value=_cpu([replicas.process("a"), psutil.Process(testbed.etcd_pid)], window_s), unit="µs")
        yield cpu
    try:
        theirs, theirs_cpu = _lighthouse(testbed, samples, window_s)
    except Unmeasurable as e:
        missing = {"unmeasured_alternatives": {_LIGHTHOUSE: e.message}}
        yield latency.model_copy(update=missing)
        yield cpu.model_copy(update=missing)
    else:
        yield with_alternatives(latency, {_LIGHTHOUSE: [t * 1e3 for t in theirs]})
        yield with_alternatives(cpu, {_LIGHTHOUSE: [theirs_cpu]})


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


def _cpu(servers: list[psutil.Process], window_s: float) -> float:
    """Microseconds of the servers' CPU for a member and a second."""
    time.sleep(_SETTLE_S)
    busy, began = sum(sum(p.cpu_times()[:2]) for p in servers), time.monotonic()
    time.sleep(window_s)
    took = time.monotonic() - began
    return (sum(sum(p.cpu_times()[:2]) for p in servers) - busy) / took / _MEMBERS * 1e6


def _lighthouse(testbed: Testbed, samples: int, window_s: float) -> tuple[list[float], float]:
    """Seconds of heartbeats, and what ``_cpu`` gives. Raises Unmeasurable."""
    if importlib.util.find_spec("torchft") is None:
        raise Unmeasurable("torchft is not installed (pip install 'elastic-rl[bench]')")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Worker("elastic_rl.bench.control.lighthouse_server",
                                            log=testbed.folder / "lighthouse.log"))
        address = server.call("address")["address"]
        clients = stack.enter_context(Worker(
            "elastic_rl.bench.control.lighthouse_clients", address, str(_MEMBERS), str(TTL_S),
            log=testbed.folder / "lighthouse-clients.log"))
        times = [float(t) for t in clients.call("time", samples=samples)["seconds"]]
        clients.call("start", timeout_s=120.0)
        cpu = _cpu([psutil.Process(server.pid)], window_s)
        if late := clients.call("count")["late"]:
            raise Unmeasurable(f"{late} heartbeats of the simulated members were late")
        return times, cpu
