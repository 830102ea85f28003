"""heartbeat-*: a member's beat, beside that of torchft's lighthouse.

The lighthouse keeps its members in the memory of one process; ours are leased records of etcd, which another leader
finds after the first one's end. What is compared is what both do: take a beat, and know who has not given one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable

import psutil

from elastic_rl.bench.control.testbed import TTL_S, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.bench.timing import seconds
from elastic_rl.bench.workers import Worker
from elastic_rl.etcd.records import Member
from elastic_rl.etcd.transaction import Compare, Op

_MEMBERS = 1000
_OTHER = "torchft lighthouse"


def measure(testbed: Testbed) -> list[Row]:
    samples, window_s = (200, 5.0) if testbed.options.quick else (1000, 15.0)
    with testbed.replicas("a") as replicas:
        beat = _beats(testbed, replicas.keys)
        ours = seconds(beat, samples, warm=20)
        with testbed.crowd(replicas.keys, _MEMBERS) as crowd:
            mine = [replicas.process("a"), psutil.Process(testbed.etcd_pid)]
            per_beat = _cpu(mine, window_s, lambda: int(crowd.call("count")["beats"]))
    try:
        theirs, theirs_cpu = _lighthouse(testbed, samples, window_s)
    except Unmeasurable as e:
        return [Row.of("heartbeat", f"a beat, to its acknowledgement ({e.message})", [t * 1e3 for t in ours], "ms"),
                Row(id="heartbeat-cpu", name="CPU of the servers for a beat", value=per_beat * 1e6, unit="µs")]
    return [Row.of("heartbeat", "a beat, to its acknowledgement", [t * 1e3 for t in ours], "ms",
                   alternatives={_OTHER: sorted(theirs)[len(theirs) // 2] * 1e3}),
            Row(id="heartbeat-cpu", name=f"CPU of the servers for a beat of one of {_MEMBERS} members, all they do for "
                "them", value=per_beat * 1e6, unit="µs", alternatives={_OTHER: theirs_cpu * 1e6})]


def _beats(testbed: Testbed, keys: object) -> Callable[[], None]:
    """A member's beat as ``coordinator/membership.py`` writes it."""
    from elastic_rl.etcd.keys import Keys
    assert isinstance(keys, Keys)
    member = Member(role="trainer", id="rank-0", pid=1, host="h", incarnation="i")
    key, lease = keys.member(member.role, member.id), testbed.etcd.grant(10 * TTL_S)
    at = [testbed.etcd.put(key, member.encode(), lease=lease)]

    def beat() -> None:
        outcome = testbed.etcd.txn([Compare.mod(key, "==", at[0])],
                                [Op.put(key, member.replace(beat_at=time.time()).encode(), lease)])
        at[0] = outcome.revision

    return beat


def _cpu(servers: list[psutil.Process], window_s: float, beats: Callable[[], int]) -> float:
    """CPU seconds of the servers for a beat, over a while."""
    time.sleep(2.0)
    busy, count = sum(sum(p.cpu_times()[:2]) for p in servers), beats()
    time.sleep(window_s)
    return (sum(sum(p.cpu_times()[:2]) for p in servers) - busy) / max(1, beats() - count)


def _lighthouse(testbed: Testbed, samples: int, window_s: float) -> tuple[list[float], float]:
    if importlib.util.find_spec("torchft") is None:
        raise Unmeasurable("torchft is not installed: pip install 'elastic-rl[bench]'")
    with contextlib.ExitStack() as stack:
        server = Worker("elastic_rl.bench.control.lighthouse_server", log=testbed.folder / "lighthouse.log")
        stack.callback(server.close)
        address = server.call("address")["address"]
        clients = Worker("elastic_rl.bench.control.lighthouse_clients", address, str(_MEMBERS), str(TTL_S),
                         log=testbed.folder / "lighthouse-clients.log")
        stack.callback(clients.close)
        times = [float(t) for t in clients.call("time", samples=samples)["seconds"]]
        clients.call("start", timeout_s=120.0)
        return times, _cpu([psutil.Process(server.pid)], window_s, lambda: int(clients.call("count")["beats"]))
