"""watch-delay: from the write of an event to its arrival at every open stream of the API.

Thirty-two streams over three replicas, beside a bare watch of etcd. The same host writes and reads, so both times come
from one clock.
"""

from __future__ import annotations

import contextlib
import threading
import time

import httpx

from elastic_rl.bench.control.testbed import Replicas, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.etcd import events
from elastic_rl.runtime import wait_until

STREAMS = 32
_KIND = "bench.delay"


class _Reader:
    """Notes when each event arrives at one stream."""

    def __init__(self, client: httpx.Client) -> None:
        self.arrived: dict[str, float] = {}
        self.open = threading.Event()
        self._client = client
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(httpx.HTTPError, RuntimeError), self._client.stream(
                "GET", "/v1/events?limit=0", headers={"Accept": "text/event-stream"}) as answer:
            kind = ""
            for line in answer.iter_lines():
                now = time.monotonic()
                self.open.set()
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: ") and kind == _KIND:
                    self.arrived[line.partition('"id":"')[2].partition('"')[0]] = now

    def close(self) -> None:
        self._client.close()


def measure(testbed: Testbed) -> list[Row]:
    samples = 30 if testbed.options.quick else 200
    with testbed.replicas("a", "b", "c") as replicas, contextlib.ExitStack() as stack:
        names, timeout = list(replicas.urls), httpx.Timeout(10.0, read=60.0)
        readers = [_Reader(replicas.client(names[n % len(names)], timeout=timeout)) for n in range(STREAMS)]
        for reader in readers:
            stack.callback(reader.close)
        for reader in readers:
            if not reader.open.wait(10.0):
                raise RuntimeError("a stream did not open")
        return _rows(*_delays(replicas, readers, samples))


def _delays(replicas: Replicas, readers: list[_Reader], samples: int) -> tuple[list[float], list[float], list[float]]:
    first, last, bare = [], [], []
    _, revision = replicas.etcd.range(replicas.keys.events_prefix())
    with replicas.etcd.watch(replicas.keys.events_prefix(), start_revision=revision + 1) as watch:
        for _ in range(samples):
            event = events.build(_KIND, "bench", "how long does it take")
            began = time.monotonic()
            replicas.etcd.put(replicas.keys.event(event.id), event.encode())
            while (change := watch.get(10.0)) is not None and not change.kv.key.endswith(event.id):
                pass
            bare.append(time.monotonic() - began)
            wait_until(lambda e=event: all(e.id in r.arrived for r in readers), timeout_s=10.0, poll_s=0.005,
                       what="the event at every stream")
            times = sorted(r.arrived[event.id] - began for r in readers)
            first.append(times[0])
            last.append(times[-1])
    return first, last, bare


def _rows(first: list[float], last: list[float], bare: list[float]) -> list[Row]:
    limit = sorted(bare)[len(bare) // 2] * 1e3
    return [Row.of("watch-delay", f"write of an event → the last of {STREAMS} streams has it", [t * 1e3 for t in last],
                   "ms", limit=limit, alternatives={"a bare watch of etcd": limit}),
            Row.of("watch-delay-first", "… the first has it", [t * 1e3 for t in first], "ms", limit=limit)]
