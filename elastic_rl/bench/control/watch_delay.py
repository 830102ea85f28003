"""watch-delay: from the write of an event to its arrival at every open stream of the API.

Thirty-two streams over three replicas. The alternative: as many clients that each watch etcd themselves. The limit: one
watch of etcd while nothing else is open. The same host writes and reads, so all times come from one clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import httpx

from elastic_rl.bench.control.testbed import Replicas, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.timing import with_alternatives
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.runtime.waiting import wait_until

STREAMS = 32
_OPEN_S, _ARRIVAL_S = 10.0, 10.0


class Receiver:
    """Notes the time at which each event arrives, by its id, until ``close``."""

    def __init__(self, read: Callable[[Receiver], None], end: Callable[[], object]) -> None:
        self.arrived: dict[str, float] = {}
        self.open = threading.Event()
        self.closing = threading.Event()
        self._end = end
        threading.Thread(target=read, args=(self,), daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        self._end()


def stream_receiver(client: httpx.Client, path: str) -> Receiver:
    """Reads the stream of the job's events; ``path``: that of the job."""
    def read(receiver: Receiver) -> None:
        with contextlib.suppress(httpx.HTTPError, RuntimeError), client.stream(
                "GET", f"{path}/events?limit=0", headers={"Accept": "text/event-stream"}) as answer:
            kind = ""
            for line in answer.iter_lines():
                now = time.monotonic()
                receiver.open.set()
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: ") and kind == event_kinds.BENCH_MEASURED.name:
                    receiver.arrived[line.partition('"id":"')[2].partition('"')[0]] = now

    return Receiver(read, client.close)


def watch_receiver(endpoint: str, prefix: str) -> Receiver:
    """Watches etcd on a connection of its own."""
    etcd = EtcdClient([endpoint], call_timeout_s=5.0)

    def read(receiver: Receiver) -> None:
        with etcd.watch(prefix, start_revision=etcd.page(prefix, limit=1).revision + 1) as watch:
            receiver.open.set()
            while not receiver.closing.is_set():
                if (change := watch.get(0.5)) is not None:
                    receiver.arrived[change.kv.key.removeprefix(prefix)] = time.monotonic()
        etcd.close()

    return Receiver(read, lambda: None)


def measure(testbed: Testbed) -> Iterator[Row]:
    samples = 30 if testbed.options.quick else 200
    with testbed.replicas("a", "b", "c") as replicas:
        names, timeout = list(replicas.urls), httpx.Timeout(10.0, read=60.0)

        def watching() -> Receiver:
            return watch_receiver(testbed.endpoint, replicas.keys.events_prefix())

        alone = median(_delays(replicas, [watching()], samples)["last"])
        found = _delays(replicas, [stream_receiver(replicas.client(names[n % len(names)], timeout=timeout),
                                                   replicas.path)
                                   for n in range(STREAMS)], samples)
        last = Row.of("watch-delay", f"write of an event → the last of {STREAMS} streams has it", found["last"], "ms",
                      limit=alone)
        first = Row.of("watch-delay-first", "… the first has it", found["first"], "ms")
        yield from (last, first)
        other = f"{STREAMS} clients that watch etcd themselves"
        bare = _delays(replicas, [watching() for _ in range(STREAMS)], samples)
        yield with_alternatives(last, {other: bare["last"]})
        yield with_alternatives(first, {other: bare["first"]})


def _delays(replicas: Replicas, receivers: Sequence[Receiver], samples: int) -> Mapping[str, list[float]]:
    """Milliseconds until the ``first`` and the ``last`` receiver had each event; the receivers are closed then."""
    delays: dict[str, list[float]] = {"first": [], "last": []}
    with contextlib.ExitStack() as stack:
        for receiver in receivers:
            stack.callback(receiver.close)
        if not all(receiver.open.wait(_OPEN_S) for receiver in receivers):
            raise RuntimeError("a stream did not open")
        for _ in range(samples):
            event = events.build(event_kinds.BENCH_MEASURED, "bench", "a measured event")
            began = time.monotonic()
            replicas.etcd.put(replicas.keys.event(event.id), event.encode())
            wait_until(lambda e=event: all(e.id in r.arrived for r in receivers), timeout_s=_ARRIVAL_S, poll_s=0.005,
                       what="the event at every stream")
            times = sorted((r.arrived[event.id] - began) * 1e3 for r in receivers)
            delays["first"].append(times[0])
            delays["last"].append(times[-1])
    return delays
