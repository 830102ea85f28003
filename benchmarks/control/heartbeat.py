"""heartbeat, heartbeat-cpu beside torchft's lighthouse.

The lighthouse keeps its members in the memory of one process; ours are leased records of etcd, which the next leader
finds. Compared is what both do: acknowledge a heartbeat, and know who sent none for ``lease_ttl_s``. Both get a sign of
life of each member every third of that.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import psutil

from elastic_rl.bench.control import heartbeat
from elastic_rl.bench.control.testbed import TTL_S, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.bench.timing import with_alternatives
from elastic_rl.bench.workers import Worker

_LIGHTHOUSE = "torchft lighthouse"


def measure(testbed: Testbed) -> Iterator[Row]:
    ours = []
    for row in heartbeat.measure(testbed):
        yield row
        ours.append(row)
    try:
        theirs = _lighthouse(testbed, *heartbeat.effort(testbed))
    except Unmeasurable as e:
        for row in ours:
            yield row.model_copy(update={"unmeasured_alternatives": {_LIGHTHOUSE: e.message}})
    else:
        for row in ours:
            yield with_alternatives(row, {_LIGHTHOUSE: theirs[row.id]})


def _lighthouse(testbed: Testbed, samples: int, window_s: float) -> dict[str, list[float]]:
    """Row → its samples: milliseconds of heartbeats, and microseconds of CPU. Raises Unmeasurable."""
    if importlib.util.find_spec("torchft") is None:
        raise Unmeasurable("torchft is not installed (pip install 'elastic-rl[bench]')")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Worker("benchmarks.control.lighthouse_server",
                                            log=testbed.folder / "lighthouse.log"))
        address = server.call("address")["address"]
        clients = stack.enter_context(Worker(
            "benchmarks.control.lighthouse_clients", address, str(heartbeat.MEMBERS), str(TTL_S),
            log=testbed.folder / "lighthouse-clients.log"))
        times = [float(t) * 1e3 for t in clients.call("time", samples=samples)["seconds"]]
        clients.call("start", timeout_s=120.0)
        cpu = heartbeat.cpu_of([psutil.Process(server.pid)], window_s)
        if late := clients.call("count")["late"]:
            raise Unmeasurable(f"{late} heartbeats of the simulated members were late")
        return {"heartbeat": times, "heartbeat-cpu": [cpu]}
